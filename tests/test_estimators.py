"""Every advantage estimator: verl's numbers, a loop-written twin that sees only policy tokens, and what holds for all.

A twin gets the rows that did not fail, cut down to the tokens of the policy. So agreeing with it on ragged batches
shows, too, that failed rows, observations and NaN under the mask do not matter.
"""

import inspect
import math
from dataclasses import asdict, dataclass, replace
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import AlgorithmConfig
from data.protocol import DataProto
from tests.batches import close
from training.advantage import Estimator
from training.core_algos import ADV_ESTIMATOR_REGISTRY, NEEDS_GROUPS, AdvantageEstimator, Groups

NAN = math.nan
SEEDS = range(20)
NAMES = [member.value for member in AdvantageEstimator]
OUTCOME = {
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg",
    "gdpo", "reinforce_plus_plus_baseline",
}  # fmt: skip
TOKENWISE = [name for name in NAMES if name not in OUTCOME]  # they read rewards token by token, under the mask only
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
        index = np.array([f"prompt-{g}" for g in torch.randint(4, (rows,)).tolist()], dtype=object)
        return cls(mask, index, tokens, torch.where(failed, NAN, torch.randn(rows).double()), dimensions)

    def estimate(self, name, **settings):
        """(advantages, returns) of a registered estimator, which gets just the arguments that it names."""
        offered = {
            **self.tokens,
            "response_mask": self.mask,
            "index": self.index,
            "reward_baselines": self.baselines,
            "gamma": GAMMA,
            "lam": LAM,
            "config": CONFIG,
            "non_tensor_batch": self.dimensions,
        }
        estimator = ADV_ESTIMATOR_REGISTRY[name]
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

    def rows(self):
        """What the twins see: a `Row` of policy tokens for each row that did not fail."""
        for i, mask in enumerate(self.mask.bool()):
            if mask.any():
                others = self.mask[(self.index == self.index[i]) & (np.arange(len(self.mask)) != i)]
                survives = len(others) > 0 and not others.any()
                numbers = {name: values[i][mask].tolist() for name, values in self.tokens.items()}
                scores = {key: values[i].item() for key, values in self.dimensions.items()}
                yield Row(self.index[i], self.baselines[i].item(), scores, survives, **numbers)


@dataclass
class Row:
    group: str
    baseline: float
    dimensions: dict[str, float]
    survives: bool  # as the only one of its group
    token_level_rewards: list[float]
    values: list[float]
    old_log_probs: list[float]
    sum_pi_squared: list[float]
    rollout_is_weights: list[float]
    turn_ids: list[int]

    @property
    def score(self):
        return sum(self.token_level_rewards)

    def __len__(self):
        return len(self.token_level_rewards)

    def to_go(self, t, discount=1.0):
        return sum(discount**k * reward for k, reward in enumerate(self.token_level_rewards[t:]))

    def energy(self, t):
        steps = zip(self.old_log_probs, self.sum_pi_squared, self.rollout_is_weights, strict=True)
        return sum((1 - 2 * math.exp(log_prob) + squares) * w**2 for log_prob, squares, w in [*steps][: t + 1])


# The twins: rows -> advantages, a list of numbers for each row. Formulas as the specification writes them.


def peers(rows, row):
    return [other for other in rows if other.group == row.group]


def each_token(rows, per_row):
    return [[0.0 if row.survives else per_row(row)] * len(row) for row in rows]


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


def gae(rows):
    advantages = []
    for row in rows:
        values = [*row.values, 0.0]
        deltas = [r + GAMMA * values[t + 1] - values[t] for t, r in enumerate(row.token_level_rewards)]
        advantages.append([sum((GAMMA * LAM) ** k * d for k, d in enumerate(deltas[t:])) for t in range(len(row))])
    return advantages


def turn_gae(rows):
    """[(advantage, value) of its turn for each token of a row], for each row: gae's twin is asked about turns."""
    as_turns = []
    for row in rows:
        turns = [[t for t in range(len(row)) if row.turn_ids[t] == turn] for turn in sorted({*row.turn_ids})]
        earned = [sum(row.token_level_rewards[t] for t in turn) for turn in turns]
        worth = [row.values[turn[0]] for turn in turns]
        [advantages] = gae([replace(row, token_level_rewards=earned, values=worth)])
        numbers = zip(advantages, worth, turns, strict=True)
        as_turns.append([(advantage, value) for advantage, value, turn in numbers for _ in turn])
    return as_turns


def twin_grpo(rows, **settings):
    return each_token(rows, lambda row: standard_score(row.score, [p.score for p in peers(rows, row)], **settings))


def twin_passk(rows, divide=True, epsilon=1e-6):
    def lead(row):
        scores = sorted((p.score for p in peers(rows, row)), reverse=True)
        if len(scores) < 2 or row.score < scores[0]:
            return 0.0
        return (scores[0] - scores[1]) / (np.std(scores, ddof=1) + epsilon if divide else 1.0)

    return each_token(rows, lead)


def twin_rloo(rows, alone=lambda score: score):
    def minus_others(row):
        others = [p.score for p in peers(rows, row) if p is not row]
        return row.score - np.mean(others) if others else alone(row.score)

    return each_token(rows, minus_others)


def twin_opo(rows):
    def minus_weighted(row):
        group = peers(rows, row)
        if len(group) == 1:
            return row.score
        return row.score - sum(len(p) * p.score for p in group) / sum(len(p) for p in group)

    return each_token(rows, minus_weighted)


def twin_dr_grpo(rows):
    return twin_grpo(rows, divide=False)


def twin_gpg(rows, factor=1.0):
    alpha = len(rows) / max(sum(row.score != 0 for row in rows), 1)
    return [[factor * alpha * number for number in row] for row in twin_dr_grpo(rows)]


def twin_gdpo(rows, weights=DIMENSIONS, **settings):
    def weighted(row):
        return sum(
            weight * standard_score(row.dimensions[key], [p.dimensions[key] for p in peers(rows, row)], **settings)
            for key, weight in weights.items()
        )

    return whitened(each_token(rows, weighted))


def twin_optimal(rows, zero_tail=True):
    def advantage(row, t):
        group = peers(rows, row)
        if row.survives:
            return 0.0
        reached = [p for p in group if len(p) > t]
        if len(group) == 1 or (zero_tail and len(reached) == 1):
            return row.to_go(t)
        energy = sum(p.energy(t) for p in reached) + 1e-8
        return row.to_go(t) - sum(p.to_go(t) * p.energy(t) for p in reached) / energy

    return [[advantage(row, t) for t in range(len(row))] for row in rows]


TWINS = {
    "gae": lambda rows: whitened(gae(rows)),
    "turn_gae": lambda rows: whitened([[advantage for advantage, _ in row] for row in turn_gae(rows)]),
    "grpo": twin_grpo,
    "grpo_vectorized": twin_grpo,
    "grpo_passk": twin_passk,
    "rloo": twin_rloo,
    "rloo_vectorized": lambda rows: twin_rloo(rows, alone=lambda score: 0.0),
    "opo": twin_opo,
    "gpg": twin_gpg,
    "gdpo": twin_gdpo,
    "reinforce_plus_plus": lambda rows: whitened([[r.to_go(t, GAMMA) for t in range(len(r))] for r in rows]),
    "reinforce_plus_plus_baseline": lambda rows: whitened(twin_dr_grpo(rows)),
    "remax": lambda rows: [[row.to_go(t) - row.baseline for t in range(len(row))] for row in rows],
    "optimal_token_baseline": twin_optimal,
    "tir_optimal_token_baseline": twin_optimal,
}


def twin_returns(name, rows, advantages):
    """An outcome estimator returns its advantages; the others what each token still earns."""
    if name in OUTCOME:
        return advantages
    if name == "gae":
        return [np.add(advantage, row.values).tolist() for advantage, row in zip(gae(rows), rows, strict=True)]
    if name == "turn_gae":
        return [[advantage + value for advantage, value in row] for row in turn_gae(rows)]
    discount = GAMMA if name == "reinforce_plus_plus" else 1.0
    return [[row.to_go(t, discount) for t in range(len(row))] for row in rows]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_each_estimator_equals_its_twin(name, seed):
    batch = Batch.draw(seed)
    if name in TOKENWISE:  # to the others a reward is no token
        batch.tokens["token_level_rewards"][batch.mask == 0] = (NAN, 1e3)[seed % 2]
    rows = list(batch.rows())
    expected = TWINS[name](rows)
    advantages, returns = batch.estimate(name)
    valid = batch.mask.bool()
    close(advantages[valid], flat(expected))
    close(returns[valid], flat(twin_returns(name, rows, expected)))
    if name in OUTCOME:
        assert returns is advantages and not advantages[~valid].any()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "settings", "twin"),
    [
        ("grpo_passk", {"norm_adv_by_std_in_grpo": False}, lambda rows: twin_passk(rows, divide=False)),
        ("optimal_token_baseline", {"handle_zero_tail": False}, lambda rows: twin_optimal(rows, zero_tail=False)),
        (
            "optimal_token_baseline",
            {"rollout_is_weights": None},
            lambda rows: twin_optimal([replace(row, rollout_is_weights=[1.0] * len(row)) for row in rows]),
        ),
        ("gpg", {"alpha": 3.0, "f_norm": 2.0}, lambda rows: twin_gpg(rows, factor=1.5)),
        ("gdpo", {"non_tensor_batch": None}, lambda rows: whitened(twin_grpo(rows))),
        ("grpo_vectorized", {"norm_adv_by_std_in_grpo": False}, twin_dr_grpo),
        ("gdpo", {"norm_adv_by_std_in_grpo": False}, lambda rows: twin_gdpo(rows, divide=False)),
        (
            "gdpo",
            {"config": SimpleNamespace(gdpo_reward_keys=[*DIMENSIONS], gdpo_reward_weights=None)},
            lambda rows: twin_gdpo(rows, weights=dict.fromkeys(DIMENSIONS, 1.0)),
        ),
        ("grpo", {"epsilon": 0.5}, lambda rows: twin_grpo(rows, epsilon=0.5)),
        ("grpo_passk", {"epsilon": 0.5}, lambda rows: twin_passk(rows, epsilon=0.5)),
        ("gdpo", {"epsilon": 0.5}, lambda rows: twin_gdpo(rows, epsilon=0.5)),
    ],
    ids=[
        "passk without std",
        "zero tail off",
        "without importance weights",
        "gpg's factors",
        "gdpo of the score",
        "dr. grpo",
        "gdpo without std",
        "gdpo of equal weights",
        "grpo's epsilon",
        "passk's epsilon",
        "gdpo's epsilon",
    ],
)
def test_each_option_equals_its_twin(name, settings, twin, seed):
    batch = Batch.draw(seed)
    close(batch.estimate(name, **settings)[0][batch.mask.bool()], flat(twin(list(batch.rows()))))


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
TO_GO = [[1, 1, 1, 0], [0.5, 0.5, 0, 0], [2, 2, 2, 2], [1, 0, 0, 0]]
ZERO_TAIL = [[0.25, 0.190476, 1, 0], [-0.25, -0.309524, 0, 0], [0.307692, 0, 2, 2], [-0.692308, 0, 0, 0]]
NO_TAIL = [[0.25, 0.190476, 0, 0], [-0.25, -0.309524, 0, 0], [0.307692, 0, 0, 0], [-0.692308, 0, 0, 0]]
GAE = [
    [-0.289842, -0.155334, 0.054627, -1.111822],
    [-1.225134, -0.945186, -1.111822, -1.111822],
    [0.740632, 1.044442, 1.044442, 1.720982],
    [-0.945186, -1.111822, -1.111822, -1.111822],
]
GAE_RETURNS = [[0.59328, 0.774, 1, 0.4], [0.432, 0.5, 0.3, 0.2], [1.11168, 1.394, 1.494, 2], [1, 0.8, 0.7, 0.6]]
PLUS_PLUS = [
    [-0.555278, -0.394069, -0.214946, 0],
    [-1.200118, -1.110557, 0, 0],
    [0.89561, 0, 1.21803, 1.576274],
    [-0.214946, 0, 0, 0],
]
PLUS_PLUS_RETURNS = [[0.81, 0.9, 1, 0], [0.45, 0.5, 0, 0], [1.62, 0, 1.8, 2], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "per_row"),
    [
        ("grpo", [0.707105, -0.707105, 0.707106, -0.707106]),
        ("grpo_passk", [1.414209, 0, 1.414212, 0]),
        ("reinforce_plus_plus_baseline", [0.294484, -1.030694, 0.957073, -1.693283]),
        ("rloo", [0.5, -0.5, 1, -1]),
        ("rloo_vectorized", [0.5, -0.5, 1, -1]),
        ("opo", [0.2, -0.3, 0.25, -0.75]),
        ("gpg", [0.25, -0.25, 0.5, -0.5]),
    ],
)
def test_outcome_estimators_give_verls_numbers(name, per_row):
    close(ANCHOR.estimate(name)[0], torch.tensor(per_row)[:, None] * MASK)


@pytest.mark.parametrize(
    ("name", "settings", "advantages", "returns"),
    [
        ("gae", {}, GAE, GAE_RETURNS),
        ("reinforce_plus_plus", {}, PLUS_PLUS, PLUS_PLUS_RETURNS),
        ("remax", {}, [[0.5, 0.5, 0.5, 0], [0.25, 0.25, 0, 0], [1, 2, 1, 1], [1, 0, 0, 0]], TO_GO),
        ("optimal_token_baseline", {}, ZERO_TAIL, TO_GO),
        ("optimal_token_baseline", {"handle_zero_tail": False}, NO_TAIL, TO_GO),
    ],
)
def test_tokenwise_estimators_give_verls_numbers(name, settings, advantages, returns):
    found = ANCHOR.estimate(name, **settings)
    close(found[0], advantages)
    close(found[1], returns)


def test_the_sample_alone_in_its_group_and_two_nearly_equal_ones():
    alone = ANCHOR.take([0])
    for name, score in [("grpo", 0.999999), ("rloo", 1), ("rloo_vectorized", 0), ("opo", 1), ("grpo_passk", 0)]:
        close(alone.estimate(name)[0], [[score] * 3 + [0]])
    rewards, mask = torch.tensor([[1.0], [1.0001]]), torch.ones(2, 1)
    close(ADV_ESTIMATOR_REGISTRY["grpo"](rewards, mask, ["a", "a"])[0], [[-0.698078], [0.696416]])


@pytest.mark.parametrize("name", sorted(NEEDS_GROUPS))
def test_a_sample_whose_whole_group_else_failed_teaches_nothing(name):
    """A constant reward of 10 must have no gradient; alone from the start, a sample keeps its raw score."""
    batch = replace(equal_scores(10.0, [3, 3, 2, 2]), index=np.array(list("aabc"), dtype=object))
    before = batch.estimate(name)[0]
    batch.mask[1] = 0
    found = batch.estimate(name)[0]
    assert not before[0].any() and not found[:2].any()
    assert torch.equal(found[2:], before[2:])


# The statistics that estimators share.


@pytest.mark.parametrize("seed", SEEDS)
def test_group_statistics_equal_loops(seed):
    """Numbers of a failed row, and those that weigh nothing, are NaN."""
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


@pytest.mark.parametrize("name", sorted(OUTCOME))
def test_an_outcome_estimator_scores_a_row_by_its_rewards_wherever_they_lie(name):
    """A reward is no token: an environment may give it for, and so on, an observation."""
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
@pytest.mark.parametrize("name", sorted(OUTCOME | {"reinforce_plus_plus", "optimal_token_baseline"}))
def test_the_scores_whose_mean_float32_rounds_give_exactly_zero_too(name, score, size):
    batch = equal_scores(score, [3] * size)
    config = SimpleNamespace(**{**vars(CONFIG), "gamma": 1.0})
    settings = {"config": config} if name in ("reinforce_plus_plus", "gdpo") else {}
    assert not batch.estimate(name, **settings)[0].any()


def equal_scores(score, lengths):
    """One group of samples that all earn `score`, on the last of their 1 to 4 tokens."""
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).long()
    rewards = torch.zeros(len(lengths), 4)
    rewards[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = score
    tokens = {
        "token_level_rewards": rewards,
        "old_log_probs": torch.rand(len(lengths), 4).log(),
        "sum_pi_squared": torch.rand(len(lengths), 4),
    }
    scores = {key: np.full(len(lengths), score, dtype=np.float32) for key in DIMENSIONS}
    return Batch(mask, np.array(["a"] * len(lengths), dtype=object), tokens, torch.full((len(lengths),), score), scores)


@pytest.mark.parametrize("name", NAMES)
def test_an_estimator_needs_groups_if_alone_a_sample_is_compared_with_nothing(name):
    """Alone in its group, the others' scores are nothing to it: unless it whitens, or brings a baseline of its own."""
    batch = Batch.draw(4)
    batch = replace(batch, index=np.arange(len(batch.mask)))
    first = batch.mask.any(-1).nonzero()[0]
    scale = torch.full((len(batch.mask),), 3.0)
    scale[first] = 1
    tokens = {**batch.tokens, "token_level_rewards": batch.tokens["token_level_rewards"] * scale[:, None]}
    dimensions = {key: scores * scale.numpy() for key, scores in batch.dimensions.items()}
    before = batch.estimate(name)[0]
    after = replace(batch, tokens=tokens, dimensions=dimensions).estimate(name)[0]
    own = batch.mask[first].bool()
    assert torch.equal(before[first][own], after[first][own]) == (name in NEEDS_GROUPS | {"remax"})


# What is peculiar to one.


def test_turn_gae_by_hand():
    """Turns of 2, 1 and 1 tokens with an observation after the first; the first earns 1, and the last 2."""
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 0]])
    turn_ids = torch.tensor([[0, 0, 0, 1, 2], [5, 5, 5, 5, 5]])
    rewards = torch.tensor([[0.25, 0.75, NAN, 0, 2], [3, 0, 0, 0, 0]])
    values = torch.tensor([[1, 9, NAN, 2, 4], [1, 0, 0, 0, 0]])
    settings = {"values": values, "response_mask": mask, "gamma": 0.5, "lam": 0.5}
    advantages, returns = ADV_ESTIMATOR_REGISTRY["turn_gae"](rewards, turn_ids=turn_ids, **settings)
    # 2 - 4 = -2; 0 + .5 · 4 - 2 - .25 · 2 = -.5; 1 + .5 · 2 - 1 - .25 · .5 = .875; the other row 3 - 1 = 2
    found = [0.875, 0.875, -0.5, -2, 2]
    close(returns, [[1.875, 1.875, 0, 1.5, 2], [3, 0, 0, 0, 0]])
    close(advantages[mask.bool()], flat(whitened([found])))
    without, _ = ADV_ESTIMATOR_REGISTRY["turn_gae"](rewards, **settings)  # a response is one turn: 3 - 1 and 3 - 1
    assert not without.any()


def test_equal_rewards_to_go_are_exactly_their_optimal_baseline_wherever_the_tokens_stand():
    torch.manual_seed(0)
    mask = (torch.rand(40, 8) < 0.6).long()
    mask[:, 0] = 1
    rewards = torch.zeros(40, 8)
    rewards[torch.arange(40), 7 - mask.flip(1).argmax(1)] = -0.3  # on the last token of the policy
    tokens = {
        "token_level_rewards": rewards,
        "old_log_probs": torch.rand(40, 8).log(),
        "sum_pi_squared": torch.rand(40, 8),
    }
    batch = Batch(mask, np.array(["a"] * 40, dtype=object), tokens, torch.zeros(40), {})
    assert not batch.estimate("optimal_token_baseline", handle_zero_tail=False)[0].any()


@pytest.mark.parametrize(
    ("keys", "weights", "columns", "message"),
    [
        (None, None, {}, "gdpo_reward_keys is empty"),
        ([], None, {}, "gdpo_reward_keys is empty"),
        (["brief"], None, {"correct": np.ones(4)}, r"names \['brief'\], but the batch has the columns \['correct'\]"),
        (["correct"], [1.0, 2.0], {"correct": np.ones(4)}, "gdpo_reward_weights has 2 numbers for 1 gdpo_reward_keys"),
        (["correct"], None, {"correct": np.array([1, NAN, 0, 0], dtype=object)}, "'correct' is not finite"),
    ],
)
def test_gdpo_says_what_its_rewards_lack(keys, weights, columns, message):
    config = SimpleNamespace(gdpo_reward_keys=keys, gdpo_reward_weights=weights)
    with pytest.raises(AssertionError, match=message):
        ANCHOR.estimate("gdpo", config=config, non_tensor_batch=columns)


def test_a_row_takes_no_part_in_a_reward_that_is_none_there():
    config = SimpleNamespace(gdpo_reward_keys=["code", "maths"], gdpo_reward_weights=None)
    columns = {"code": np.array([0, 1, None, None]), "maths": np.array([None, None, 5.0, None])}
    found = ANCHOR.estimate("gdpo", config=config, non_tensor_batch=columns)[0]
    rest = {"code": np.array([0, 1, 0, 0]), "maths": np.zeros(4)}  # of maths alone in its group: no baseline
    close(found, ANCHOR.estimate("gdpo", config=config, non_tensor_batch=rest)[0])


@pytest.mark.parametrize("name", NAMES)
def test_the_driver_calls_every_estimator(name):
    batch = Batch.draw(1)
    proto = DataProto.from_single_dict(
        {
            **batch.tokens,
            "response_mask": batch.mask,
            "reward_baselines": batch.baselines,
            "uid": batch.index,
            **batch.dimensions,
        }
    )
    config = SimpleNamespace(**asdict(AlgorithmConfig(adv_estimator=name, lam=LAM)) | vars(CONFIG))
    found = Estimator(config)(proto)
    for column, expected in zip(("advantages", "returns"), batch.estimate(name), strict=True):
        torch.testing.assert_close(found[column], expected, rtol=0, atol=0, equal_nan=True)
