"""The policy losses: the rules that hold for every one. extras/verl/tests holds each against verl's own."""

import copy
import math
import re
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.extras import present
from configs.schema import AGGREGATION_MODES, ActorConfig, PolicyLossConfig
from tests.batches import CUTS, close, ragged_batch, relative_distance, update_of
from training.core_algos import compute_policy_loss_reinforce, get_policy_loss_fn
from training.losses import ReadableNamespace, call_policy_loss, is_number
from workers.dp_actor import DataParallelPPOActor
from workers.engine import TrainEngine

NAN = math.nan
SEEDS = range(8)
# Those that compare the answers to a prompt have rules of their own: extras/algorithms/tests/test_group_losses.py.
OF_STAGES = ("flowrl", "gvpo", "pair", "spin", "bypass_mode")  # they read what stages make or set
LOSSES = [name for name in present("policy_loss") if name not in OF_STAGES]
CLIPFRAC, KL, LOWER = "actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"
# Where a loss decides for itself how tokens become one number: the mode of its first gradient.
OWN_MODE = dict.fromkeys(("sapo", "geo_mean"), "seq-mean-token-mean") | {"sppo": "seq-mean-token-sum"}
CORRECTIONS = {}  # by the name of a loss of an extra, the settings that it reads
EVERY = [*LOSSES, "reinforce"]
# Settings under which the two losses that compare the tokens of a call choose none: their choice depends on the cut.
NO_CHOICE = {"clip_cov": {"clip_cov_lb": 1e9, "clip_cov_ub": 2e9}, "kl_cov": {"ppo_kl_coef": 0.0}}


def those_of(section, settings):
    """Makes a section from those `settings` that it has: an extra that was removed took its own away."""
    return section(**{item.name: settings[item.name] for item in fields(section) if item.name in settings})


def actor_config(policy_loss=None, **actor):
    policy_loss = those_of(PolicyLossConfig, {"dro_beta": 0.4, **(policy_loss or {})})
    return those_of(ActorConfig, {"policy_loss": policy_loss, **actor})


def as_losses_get_it(config, counts=None, rollout_correction=None):
    policy_loss = SimpleNamespace(**vars(config.policy_loss), rollout_correction=rollout_correction)
    return SimpleNamespace(**{**vars(config), "policy_loss": policy_loss}, global_batch_info=counts or {})


class Batch(NamedTuple):
    """Arguments of a loss; [B, R] each."""

    old: torch.Tensor
    new: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor
    weights: torch.Tensor | None = None

    @classmethod
    def draw(cls, seed, rows=6, width=5):
        """Log-ratios around 0.4, masks with holes, an empty row, positive weights; float64, NaN under the mask."""
        generator = torch.Generator().manual_seed(seed)
        mask = (torch.rand(rows, width, generator=generator) < 0.6).long()
        mask[seed % rows] = 0
        mask[(seed + 1) % rows, 1:3] = 1
        noise = torch.randn(4, rows, width, generator=generator, dtype=torch.float64)
        old = (-1.5 + 0.5 * noise[0]).clamp(max=-0.1)
        new = (old + 0.4 * noise[1]).clamp(max=-0.05)
        columns = (old, new, noise[2], mask, (0.3 * noise[3]).exp())
        return cls(*(c if c is mask else c.masked_fill(mask == 0, NAN) for c in columns))

    def rows(self, rows, width=None):
        return Batch(*(None if column is None else column[rows, :width] for column in self))

    def packed(self):
        """The rows that did not fail, with the policy's tokens moved together, and zeros behind them."""
        batch = self.rows(self.mask.any(-1))
        order = batch.mask.argsort(dim=-1, descending=True, stable=True)
        return Batch(*(column.gather(1, order).nan_to_num(0) for column in batch))

    def run(self, name, mode="token-mean", config=None, counts=None):
        """(loss, metrics, gradient with respect to `new`)."""
        log_prob = self.new.detach().clone().requires_grad_()
        config = as_losses_get_it(config or actor_config(), counts, CORRECTIONS.get(name))
        weights = {} if self.weights is None else {"rollout_is_weights": self.weights}
        fn = compute_policy_loss_reinforce if name == "reinforce" else get_policy_loss_fn(name.split()[0])
        torch.manual_seed(0)  # clip_cov draws
        loss, metrics = fn(self.old, log_prob, self.advantages, self.mask, mode, config, **weights)
        loss.backward()
        return loss.detach(), metrics, log_prob.grad


ANCHOR = Batch(
    old=torch.tensor([[0.5, 0.4, 0.3, 0.2], [0.6, 0.2, 0.1, 0.9]]).log(),
    new=torch.tensor([[0.6, 0.2, 0.9, 0.2], [0.3, 0.25, 0.1, 0.9]]).log(),
    advantages=torch.tensor([[1.0, -1.0, -2.0, 1.0], [0.5, 0.5, -0.5, 1.0]]),
    mask=torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
)


def assert_gives(name, loss, metrics, gradient):
    """Compares loss, metrics and gradient of `ANCHOR` with verl's numbers."""
    found_loss, found_metrics, found_gradient = ANCHOR.run(name)
    close(found_loss, loss)
    assert list(found_metrics) == list(metrics) and all(map(is_number, found_metrics.values()))
    close([*found_metrics.values()], [*metrics.values()])
    close(found_gradient, gradient)


def test_vanilla_gives_verls_numbers():
    gradient = [[-0.171429, 0, 0.428571, 0], [-0.035714, 0, 0.071429, -0.142857]]
    assert_gives("vanilla", 0.607143, {CLIPFRAC: 0.285714, KL: -0.016826, LOWER: 0.0}, gradient)


TIGHT = actor_config(
    {"clip_cov_ratio": 0.2, "clip_cov_lb": -0.2, "clip_cov_ub": 0.3, "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5},
    clip_ratio_low=0.07,
    clip_ratio_high=0.03,
    clip_ratio_c=1.3,
    tau_neg=2.0,
)


# Rules for every loss


def config_of(name):
    """Returns a config in which all that clips, clips, and losses that choose tokens by comparing choose none."""
    return replace(TIGHT, policy_loss=replace(TIGHT.policy_loss, **NO_CHOICE.get(name, {})))


def global_counts(batch, dp_size=1):
    """Counts of the whole mini-batch, which each piece of it is told by the trainer."""
    return {
        "dp_size": dp_size,
        "batch_num_tokens": int(batch.mask.sum()),
        "global_batch_size": int(batch.mask.any(-1).sum()),
        "loss_scale_factor": batch.mask.shape[1],
    }


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", EVERY)
def test_failed_rows_observations_and_what_lies_under_the_mask_are_nothing(name, seed):
    batch, mode = Batch.draw(seed), AGGREGATION_MODES[seed % len(AGGREGATION_MODES)]
    counts = {"loss_scale_factor": 5}  # else the width
    loss, metrics, gradient = batch.run(name, mode, TIGHT, counts)
    packed = batch.packed()
    expected = packed.run(name, mode, TIGHT, counts)
    close(loss, expected[0], 1e-9)
    close([*metrics.values()], [expected[1][key] for key in metrics])
    close(gradient[batch.mask.bool()], expected[2][packed.mask.bool()], 1e-9)
    assert not gradient[batch.mask == 0].any()


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@example(piece_of_row=[0, 1, 0, 2, 3, 3], dp_size=2)
@given(piece_of_row=st.lists(st.integers(0, 3), min_size=6, max_size=6), dp_size=st.integers(1, 4))
@settings(max_examples=6, deadline=None)
def test_any_cut_into_micro_batches_on_any_ranks_gives_the_whole(name, mode, piece_of_row, dp_size):
    """Micro-batches add up on their rank, and `dp_size` ranks average: it does not matter which rank has which."""
    batch, config = Batch.draw(3), config_of(name)
    loss, metrics, gradient = batch.run(name, mode, config, global_counts(batch))
    pieces = [[row for row in range(6) if piece_of_row[row] == piece] for piece in set(piece_of_row)]
    # A worker trims the padding of each micro-batch.
    widths = [5 - int(batch.mask[rows].any(0).flip(0).long().argmax()) for rows in pieces]
    counts = global_counts(batch, dp_size)
    parts = [
        batch.rows(rows, width).run(name, mode, config, counts) for rows, width in zip(pieces, widths, strict=True)
    ]
    close(sum(part[0] for part in parts) / dp_size, loss, 1e-9)
    pasted = torch.zeros_like(gradient)
    for rows, width, part in zip(pieces, widths, parts, strict=True):
        pasted[rows, :width] = part[2]
    close(pasted / dp_size, gradient, 1e-9)
    tokens = [int(batch.mask[rows].sum()) for rows in pieces]
    for key, value in metrics.items() if name not in CORRECTIONS else ():  # its metrics are no means over tokens
        pooled = sum(n * part[1][key] for n, part in zip(tokens, parts, strict=True)) / sum(tokens)
        close(pooled, value)


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("name", EVERY)
def test_a_failed_batch_is_zero(name, mode):
    batch = Batch.draw(0)
    loss, metrics, gradient = batch._replace(mask=torch.zeros_like(batch.mask)).run(name, mode, TIGHT)
    assert loss == 0 and not any(metrics.values()) and not gradient.any()


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_on_the_first_update_the_gradient_is_that_of_reinforce(name, mode):
    batch = Batch.draw(1)._replace(weights=None)
    # One advantage a row, as outcome estimators give: geo_mean only knows the row's mean.
    batch = batch._replace(old=batch.new, advantages=batch.advantages.nan_to_num(1)[:, :1].expand(-1, 5).contiguous())
    _, metrics, gradient = batch.run(name, mode, config_of(name))
    close(
        gradient, batch.run("reinforce", OWN_MODE.get(name, mode))[2] * (2 if name == "sppo" else 1), 1e-7
    )  # which is a square
    assert gradient.any() and not any(metrics.values())


@pytest.mark.parametrize("distance", [-30.0, 30.0, -500.0, 500.0])
@pytest.mark.parametrize("name", [name for name in [*LOSSES, "reinforce"] if name != "gpg"])  # which has no metric
def test_only_losses_of_token_ratios_that_verl_bounds_are_bounded(name, distance):
    far = ANCHOR._replace(new=ANCHOR.old + distance)
    loss, metrics, gradient = far.run(name, config=actor_config({"dro_beta": 0.4}, clip_ratio_c=1e30))
    bounded = name in ("vanilla", "dppo_tv", "dppo_kl", "sapo", "cispo")
    if bounded or name == "gspo":
        assert loss.isfinite() and gradient.isfinite().all()
    size = 20 if bounded else abs(distance)
    close(metrics[KL], size if name == "kl_cov" else -math.copysign(size, distance))


# Config


def test_a_dual_clip_at_or_below_one_is_refused():
    with pytest.raises(AssertionError, match=r"clip_ratio_c is 1\.0, but must be above 1"):
        ANCHOR.run("vanilla", config=actor_config(clip_ratio_c=1.0))


# A user's loss

ROWS = [torch.full((2, 3), -1.0), torch.full((2, 3), -1.5, requires_grad=True), torch.ones(2, 3), torch.ones(2, 3)]


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda ratio: ratio.mean(), r"returned \[\(\)\]; it must return the loss, a tensor of shape \(\)"),
        (lambda ratio: (ratio, {}), r"returned \[\(2, 3\), 'dict'\]"),
        (lambda ratio: (ratio.mean(), 0.5), r"returned \[\(\), 'float'\]"),
        (lambda ratio: (ratio.mean(), 0.5, 0.25), r"returned \[\(\), 'float', 'float'\]"),
        (lambda ratio: (ratio.mean(), {"own/ratio": ratio}), r"metrics of which \['own/ratio'\] are not numbers"),
        (lambda ratio: (ratio.mean(), ratio, 0.1, 0.2), r"metrics of which \['actor/pg_clipfrac'\] are not numbers"),
        (lambda ratio: (ratio.detach().mean(), {}), "a loss that does not depend on the log-probs"),
    ],
)
def test_what_a_loss_gets_wrong_is_named_with_its_file(result, words):
    def mine(old, new, advantages, mask):
        return result((new - old).exp())

    with pytest.raises(ValueError, match=rf"the policy loss .*mine \({re.escape(__file__)}\) returned .*") as caught:
        call_policy_loss(mine, ROWS, "token-mean", ReadableNamespace(), {})
    assert re.search(words, str(caught.value))


def test_a_loss_is_given_what_it_takes_in_every_form():
    given = {}

    def note(old, new, advantages, mask, **rest):
        given.update(rest)
        return (new * mask).sum(), {"own/tensor": new.mean(), "own/flag": True}

    def by_place(old, new, advantages, mask, mode, *, config, scale):
        return note(old, new, advantages, mask, by_place=mode, config=config, scale=scale)

    def by_text(old, new, advantages, mask, mode="?", scale=1.0):
        return note(old, new, advantages, mask, by_text=mode, scale=scale)

    def no_mode(old, new, advantages, mask, scale=1.0):
        return note(old, new, advantages, mask, scale=scale)

    def rest_by_name(old, new, advantages, **rest):
        return note(old, new, advantages, rest.pop("response_mask"), **rest)

    def mask_by_name(old, new, advantages, *, response_mask, scale):
        return note(old, new, advantages, response_mask, scale=scale)

    config = ReadableNamespace(clip_ratio=0.2)
    whole = {"loss_agg_mode": "token-sum", "config": config, "scale": 3}
    for function, wanted in (
        (by_place, {"by_place": "token-sum", "config": config, "scale": 3}),
        (by_text, {"by_text": "token-sum", "scale": 3}),
        (no_mode, {"scale": 3}),
        (note, whole),
        (rest_by_name, whole),
        (mask_by_name, {"scale": 3}),
    ):
        given.clear()
        _, metrics = call_policy_loss(function, ROWS, "token-sum", config, {"scale": 3})
        assert given == wanted and metrics == {"own/tensor": -1.5, "own/flag": 1.0}
    given.clear()
    with pytest.raises(ValueError, match=r"too many positional arguments.* response_mask by position"):
        call_policy_loss(lambda old, new, advantages: None, ROWS, "token-sum", config, {})
    call_policy_loss(no_mode, ROWS, "token-sum", config, {})
    assert given == {"scale": 1.0}, "a fifth argument with a number for a default is no mode"
    assert config.get("clip_ratio") == config["clip_ratio"] == 0.2 and config.get("none", 1) == 1


# The actor


@pytest.mark.parametrize("mode", AGGREGATION_MODES)
@pytest.mark.parametrize("name", LOSSES)
def test_the_actor_makes_the_same_step_however_it_cuts_the_batch(policy, name, mode):
    """Losses that choose tokens by comparing them agree as well: the actor shows them the whole mini-batch."""
    config = replace(TIGHT, policy_loss=replace(TIGHT.policy_loss, loss_mode=name.split()[0]), loss_agg_mode=mode)
    gradients = []
    for cut in ("all rows", "24 tokens"):
        engine = TrainEngine(copy.deepcopy(policy), config.optim, 10, torch.device("cpu"), torch.float32)
        loss = ReadableNamespace(**vars(config.policy_loss), rollout_correction=CORRECTIONS.get(name))
        actor = DataParallelPPOActor(config, engine, CUTS[cut], CUTS[cut], loss)
        parameters = list(engine.module.parameters())
        engine.optimizer.register_step_pre_hook(lambda *_, p=parameters: gradients.append([x.grad.clone() for x in p]))
        batch = ragged_batch()
        actor.update_policy(batch, update_of(batch, config))
    assert relative_distance(*gradients) < 1e-5
