"""Every advantage estimator: what holds for all, and verl's numbers of GAE and GRPO.

extras/verl/tests holds each against verl's own.
"""

import inspect
import math
from dataclasses import dataclass, replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.extras import NEEDS_GROUPS
from tests.batches import close
from training.core_algos import ADV_ESTIMATOR_REGISTRY, AdvantageEstimator, Groups

NAN = math.nan
SEEDS = range(20)
ESTIMATORS = {name: ADV_ESTIMATOR_REGISTRY[name] for name in map(str, AdvantageEstimator)}  # an extra's: loaded now
NAMES = [*ESTIMATORS]
OUTCOME = {
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg",
    "gdpo", "reinforce_plus_plus_baseline", "max_rl", "spo", "sppo", "fapo",
} & {*NAMES}  # fmt: skip
TOKENWISE = [name for name in NAMES if name not in OUTCOME]  # they read rewards token by token, under the mask only
READ_NO_REWARD = {"opd", "no_rewards"}  # as shipped
GAMMA, LAM = 0.9, 0.8
DIMENSIONS = {"correct": 1.0, "brief": 0.5}  # gdpo's rewards and their weights
CONFIG = SimpleNamespace(gamma=GAMMA, gdpo_reward_keys=list(DIMENSIONS), gdpo_reward_weights=list(DIMENSIONS.values()))


@dataclass
class Batch:
    """All that an estimator may ask for: `tokens` by name, each [B, R], beside `mask`; the rest is [B]."""

    mask: torch.Tensor
    index: np.ndarray
    tokens: dict[str, torch.Tensor]
    baselines: torch.Tensor
    dimensions: dict[str, np.ndarray]

    @classmethod
    def draw(cls, seed):
        """Holes in the mask, a failed row, scores of 0, groups of one to many; NaN where nobody may look. float64."""
        torch.manual_seed(seed)
        rows, width = 5 + seed % 5, 40 if seed == 0 else 2 + seed % 4
        mask = (torch.rand(rows, width) < 0.6).long()
        mask[seed % rows] = 0
        mask[(seed + 1) % rows, :2] = 1  # whitening needs two tokens
        tokens = {
            "token_level_rewards": torch.randn(rows, width),
            "values": torch.randn(rows, width),
            "old_log_probs": torch.empty(rows, width).uniform_(0.1, 0.9).log(),
            "sum_pi_squared": torch.empty(rows, width).uniform_(0.81, 1),
            "rollout_is_weights": torch.empty(rows, width).uniform_(0.5, 2),
        }
        tokens = {name: torch.where(mask.bool(), values.double(), NAN) for name, values in tokens.items()}
        turns = torch.cumsum(torch.rand(rows, width) < 0.4, 1)
        tokens["turn_ids"] = torch.where(mask.bool(), turns, 10_000)
        failed = ~mask.any(-1)
        # An outcome estimator scores a row by all its rewards, so only a failed row's may be anything.
        tokens["token_level_rewards"][~failed] = tokens["token_level_rewards"][~failed].nan_to_num(0.0)
        tokens["token_level_rewards"][torch.rand(rows) < 0.3] *= 0
        dimensions = {key: torch.where(failed, NAN, torch.randn(rows)).numpy() for key in DIMENSIONS}
        tokens |= {"ref_log_prob": tokens["old_log_probs"] * 1.5, "prm_rewards": tokens["values"] / 2}
        tokens["token_level_scores"] = tokens["token_level_rewards"].clone()
        index = np.array([f"prompt-{g}" for g in torch.randint(4, (rows,)).tolist()], dtype=object)
        return cls(mask, index, tokens, torch.where(failed, NAN, torch.randn(rows).double()), dimensions)

    def estimate(self, name, **settings):
        """(advantages, returns) of a registered estimator, which gets just the arguments that it names."""
        offered = {**self.tokens, "response_mask": self.mask, "index": self.index, "config": CONFIG}
        offered |= {"gamma": GAMMA, "lam": LAM, "non_tensor_batch": self.dimensions}
        offered |= dict.fromkeys(("reward_baselines", "tracked_values"), self.baselines) | {
            "flawed": self.baselines > 0
        }
        estimator = ESTIMATORS[name]
        named = inspect.signature(estimator).parameters
        return estimator(**{key: value for key, value in offered.items() if key in named} | settings)

    def take(self, rows):
        """The batch of these rows only, by position or by a bool tensor."""
        rows = torch.arange(len(self.mask))[rows]
        return Batch(
            self.mask[rows],
            self.index[rows.numpy()],
            {name: values[rows] for name, values in self.tokens.items()},
            self.baselines[rows],
            {key: values[rows.numpy()] for key, values in self.dimensions.items()},
        )

    def packed(self):
        """The rows that did not fail, with the policy's tokens moved together, and zeros behind them."""
        batch = self.take(self.mask.any(-1))
        order = batch.mask.argsort(dim=-1, descending=True, stable=True)
        tokens = {name: values.gather(1, order).nan_to_num(0) for name, values in batch.tokens.items()}
        return replace(batch, mask=batch.mask.gather(1, order), tokens=tokens)


# The twins: rows -> advantages, a list of numbers for each row. Formulas as the specification writes them.


def flat(per_token):
    return list(chain.from_iterable(per_token))


def whitened(per_token):
    numbers = flat(per_token)
    mean = sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)
    return [[(x - mean) / math.sqrt(variance + 1e-8) for x in row] for row in per_token]


def standard_score(score, scores, divide=True, epsilon=1e-6):
    mean, std = (np.mean(scores), np.std(scores, ddof=1)) if len(scores) > 1 else (0.0, 1.0)
    return (score - mean) / (std + epsilon if divide else 1.0)


# The anchors of the specification: 4 samples of 4 tokens, groups a, a, b, b.

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 1], [1, 0, 0, 0]])
ANCHOR = Batch(
    MASK,
    np.array(["a", "a", "b", "b"], dtype=object),
    {
        "token_level_rewards": torch.tensor([[0, 0, 1, 0], [0, 0.5, 0, 0], [0, 0, 0, 2], [1, 0, 0, 0]]),
        "values": torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.4, 0.3, 0.2], [0, 0.1, 0.2, 0.3], [0.9, 0.8, 0.7, 0.6]]),
        "old_log_probs": torch.tensor(
            [[0.5, 0.25, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.25, 0.5, 0.5, 0.25], [0.5, 0.5, 0.5, 0.5]]
        ).log(),
        "sum_pi_squared": torch.full((4, 4), 0.4),
    },
    torch.tensor([0.5, 0.25, 1, 0]),
    {},
)
GAE = [
    [-0.289842, -0.155334, 0.054627, -1.111822],
    [-1.225134, -0.945186, -1.111822, -1.111822],
    [0.740632, 1.044442, 1.044442, 1.720982],
    [-0.945186, -1.111822, -1.111822, -1.111822],
]
GAE_RETURNS = [[0.59328, 0.774, 1, 0.4], [0.432, 0.5, 0.3, 0.2], [1.11168, 1.394, 1.494, 2], [1, 0.8, 0.7, 0.6]]


def test_verls_numbers():
    close(ANCHOR.estimate("grpo")[0], torch.tensor([0.707105, -0.707105, 0.707106, -0.707106])[:, None] * MASK)
    advantages, returns = ANCHOR.estimate("gae")
    close(advantages, GAE)
    close(returns, GAE_RETURNS)


def test_the_sample_alone_in_its_group_and_two_nearly_equal_ones():
    close(ANCHOR.take([0]).estimate("grpo")[0], [[0.999999] * 3 + [0]])
    rewards, mask = torch.tensor([[1.0], [1.0001]]), torch.ones(2, 1)
    close(ADV_ESTIMATOR_REGISTRY["grpo"](rewards, mask, ["a", "a"])[0], [[-0.698078], [0.696416]])


@pytest.mark.parametrize("name", sorted(NEEDS_GROUPS & {*NAMES}))
def test_a_sample_whose_whole_group_else_failed_teaches_nothing(name):
    """A constant reward of 10 gives the survivor of a group no gradient; a group of one keeps its raw score."""
    batch = replace(equal_scores(10.0, [3, 3, 2, 2]), index=np.array(list("aabc"), dtype=object))
    before = batch.estimate(name)[0]
    batch.mask[1] = 0
    found = batch.estimate(name)[0]
    assert not before[0].any() and not found[:2].any()
    assert torch.equal(found[2:], before[2:])


# The statistics that estimators share.


@pytest.mark.parametrize("seed", SEEDS)
def test_group_statistics_equal_loops(seed):
    """Group statistics leave out failed rows and numbers that weigh nothing: both are NaN here."""
    batch = Batch.draw(seed)
    valid, groups = batch.mask.bool().any(-1), Groups(batch.index, batch.mask)
    columns = torch.where(valid[:, None], torch.randn(len(valid), 3).double(), NAN)
    weights = torch.rand(len(valid), 3).double() * (torch.rand(len(valid), 3) < 0.7)
    mean, std = groups.mean(columns), groups.std(columns[:, 0])
    weighted = groups.mean(columns.masked_fill(weights == 0, NAN), weights)
    standard = groups.standardize(columns[:, 0], 0.1, divide_by_std=True)
    for i in valid.nonzero()[:, 0].tolist():
        peers = [j for j in range(len(valid)) if valid[j] and batch.index[j] == batch.index[i]]
        assert groups.count[i] == len(peers)
        survives = len(peers) == 1 < sum(batch.index == batch.index[i])
        for k in range(3):
            numbers = columns[peers, k].tolist()
            for how, reduce in [("sum", sum), ("amax", max), ("amin", min)]:
                close(groups.reduce(columns, how)[i, k], reduce(numbers), 1e-9)
            close(mean[i, k], np.mean(numbers) if len(peers) > 1 or survives else 0.0, 1e-9)
            pairs = [(w, x) for w, x in zip(weights[peers, k].tolist(), numbers, strict=True) if w]
            counts = len(pairs) > 1 or (survives and pairs)
            close(weighted[i, k], sum(w * x for w, x in pairs) / sum(w for w, _ in pairs) if counts else 0.0, 1e-9)
        scores = columns[peers, 0].tolist()
        close(std[i], np.std(scores, ddof=1) if len(peers) > 1 else 1.0, 1e-9)
        expected = 0.0 if survives else standard_score(columns[i, 0].item(), scores, epsilon=0.1)
        close(standard[i], expected, 1e-9)


# What holds for every estimator.


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_failed_rows_observations_and_what_lies_under_the_mask_are_nothing(name, seed):
    batch = Batch.draw(seed)
    failed, valid = ~batch.mask.any(-1).numpy(), batch.mask.bool()
    labels, counts = np.unique(batch.index[~failed].astype(str), return_counts=True)
    batch.index[failed] = labels[counts.argmax()] if counts.max() > 1 else "alone"  # a lone survivor is another test's
    if name in TOKENWISE:
        batch.tokens["token_level_rewards"][~valid] = (NAN, 1e3)[seed % 2]
    packed = batch.packed()
    for found, expected in zip(batch.estimate(name), packed.estimate(name), strict=True):
        close(found[valid], expected[packed.mask.bool()], 1e-9)


@pytest.mark.parametrize("name", sorted(OUTCOME))
def test_an_outcome_estimator_scores_a_row_by_its_rewards_wherever_they_lie(name):
    """A reward counts where an environment gives it for an observation, and so on no token of the policy's."""
    batch = Batch.draw(7)
    rewards = batch.tokens["token_level_rewards"]
    moved = torch.zeros_like(rewards).scatter(
        1, (batch.mask == 0).long().argmax(1, keepdim=True), rewards.sum(1, keepdim=True)
    )
    assert moved[batch.mask == 0].nan_to_num(0).any()
    elsewhere = replace(batch, tokens={**batch.tokens, "token_level_rewards": moved})
    close(elsewhere.estimate(name)[0], batch.estimate(name)[0], 1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_results_are_float32_without_gradient_and_inputs_stay_as_they_are(name):
    batch = Batch.draw(3)
    turns = {"turn_ids": batch.tokens.pop("turn_ids")}
    batch.tokens = turns | {key: values.float().requires_grad_() for key, values in batch.tokens.items()}
    batch.baselines = batch.baselines.float()
    before = {key: values.detach().clone() for key, values in batch.tokens.items()}
    for result in batch.estimate(name):
        assert result.dtype == torch.float32 and result.shape == batch.mask.shape and not result.requires_grad
    for key, values in batch.tokens.items():
        torch.testing.assert_close(values.detach(), before[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_failures_gives_zero(name):
    batch = Batch.draw(0)
    batch.mask[:] = 0
    assert not batch.estimate(name)[0].any()


@pytest.mark.parametrize("name", sorted(OUTCOME))
@given(score=st.floats(-100, 100, width=32), lengths=st.lists(st.integers(1, 4), min_size=2, max_size=9))
@settings(max_examples=30, deadline=None)
def test_equal_scores_give_exactly_zero(name, score, lengths):
    batch = equal_scores(score, lengths)
    assert not batch.estimate(name)[0].any()


@pytest.mark.parametrize("size", [6, 7])
@pytest.mark.parametrize("score", [0.3, 0.7, 0.1])
@pytest.mark.parametrize("name", sorted(OUTCOME | {"reinforce_plus_plus", "optimal_token_baseline"} & {*NAMES}))
def test_the_scores_whose_mean_float32_rounds_give_exactly_zero_too(name, score, size):
    batch = equal_scores(score, [3] * size)
    config = SimpleNamespace(**{**vars(CONFIG), "gamma": 1.0})
    settings = {"config": config} if name in ("reinforce_plus_plus", "gdpo") else {}
    assert not batch.estimate(name, **settings)[0].any()


@pytest.mark.parametrize("total", [0.7, 1.7, 3.0, 30.0])
@pytest.mark.parametrize("name", sorted(OUTCOME - {"spo"}))  # which compares with no other sample
def test_one_total_that_is_paid_in_other_parts_gives_exactly_zero(name, total):
    batch = equal_scores(total, [4] * 8)
    parts = torch.rand(8, 4, generator=torch.Generator().manual_seed(int(10 * total)))
    paid = total * parts / parts.sum(-1, keepdim=True)
    assert paid.sum(-1).unique().numel() > 1  # by rounding
    rewards = batch.tokens | {"token_level_rewards": paid, "token_level_scores": paid}
    assert not replace(batch, tokens=rewards).estimate(name)[0].any()


def equal_scores(score, lengths):
    """One group of samples that all earn `score`, on the last of their 1 to 4 tokens."""
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).long()
    rewards = torch.zeros(len(lengths), 4)
    rewards[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = score
    tokens = {
        "token_level_rewards": rewards,
        "old_log_probs": torch.rand(len(lengths), 4).log(),
        "sum_pi_squared": torch.rand(len(lengths), 4),
        "token_level_scores": rewards,
        "prm_rewards": torch.zeros_like(rewards),
    }
    scores = {key: np.full(len(lengths), score, dtype=np.float32) for key in DIMENSIONS}
    return Batch(mask, np.array(["a"] * len(lengths), dtype=object), tokens, torch.full((len(lengths),), score), scores)


@pytest.mark.parametrize("name", NAMES)
def test_an_estimator_needs_groups_if_alone_a_sample_is_compared_with_nothing(name):
    """Others' scores move a lone sample, unless its estimator needs groups, has its own baseline or reads no reward."""
    batch = Batch.draw(4)
    batch = replace(batch, index=np.arange(len(batch.mask)))
    first = batch.mask.any(-1).nonzero()[0]
    scale = torch.full((len(batch.mask),), 3.0)
    scale[first] = 1
    rewards = {name: batch.tokens[name] * scale[:, None] for name in ("token_level_rewards", "token_level_scores")}
    tokens = {**batch.tokens, **rewards}
    dimensions = {key: scores * scale.numpy() for key, scores in batch.dimensions.items()}
    before = batch.estimate(name)[0]
    after = replace(batch, tokens=tokens, dimensions=dimensions).estimate(name)[0]
    own = batch.mask[first].bool()
    assert torch.equal(before[first][own], after[first][own]) == (name in NEEDS_GROUPS | {"remax"} | READ_NO_REWARD)
