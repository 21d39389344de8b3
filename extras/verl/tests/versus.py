"""Calls a function of ours and verl's own with the same random arguments, and says where their results differ.

`CASES` makes the calls for each function of verl that is compared; `sides` has the two functions. verl's wheel lies in
`FOLDER`, where `make test` puts it: beside the environment and not in it, so that nothing but `verl_itself` finds it.
"""

import importlib
import inspect
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from omegaconf import OmegaConf
from torch import Tensor

from configs.schema import AGGREGATION_MODES, ActorConfig, PolicyLossConfig
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto, object_array
from extras.pf_ppo.settings import PFPPOConfig
from extras.pf_ppo.stage import draw_rows
from extras.rollout_correction.settings import PRESETS, REJECTION_OPTIONS, RolloutCorrectionConfig
from extras.rules.tests.reward_cases import OUTPUTS
from extras.verl.imports import names_of_verl
from training.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from workers.engine import scheduled_multiplier

FOLDER = Path(sys.prefix, "verl-0.9.1")
SEEDS = range(10)
TOKENIZER = build_tokenizer()

# Names of verl's registries
ESTIMATORS = (
    "gae", "grpo", "grpo_vectorized", "gdpo", "grpo_passk", "reinforce_plus_plus_baseline", "rloo", "opo",
    "reinforce_plus_plus", "remax", "gpg", "rloo_vectorized", "optimal_token_baseline", "tir_optimal_token_baseline",
)  # fmt: skip
LOSSES = (
    "vanilla", "dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dro", "cispo",
    "bypass_mode",
)  # fmt: skip
ALGOS, CORRECTION = "trainer.ppo.core_algos", "trainer.ppo.rollout_corr_helper"
REGISTRIES = {
    "estimator": (ALGOS, "ADV_ESTIMATOR_REGISTRY", ESTIMATORS),
    "loss": (ALGOS, "POLICY_LOSS_REGISTRY", LOSSES),
}


@contextmanager
def verl_itself() -> Iterator[None]:
    """Lets `import verl` find verl's wheel, and forgets all of it afterwards, so that the product never meets it."""

    def forget() -> dict[str, Any]:
        return {name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "verl"}

    stand_ins, environment, handlers = forget(), dict(os.environ), [*logging.getLogger().handlers]
    random_state = np.random.get_state()
    sys.path.append(str(FOLDER))  # last: the wheel has folders `tests` and `scripts` too
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        forget()
        sys.modules.update(stand_ins)
        os.environ.clear()
        os.environ.update(environment)
        logging.getLogger().handlers[:] = handlers
        np.random.set_state(random_state)


def of_verl(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"verl.{module}"), name)


class Both(NamedTuple):
    """An argument that each side builds for itself."""

    ours: Callable[[], Any]
    verls: Callable[[], Any]


class Call(NamedTuple):
    """Arguments of both functions; `kind` says what is special about them."""

    kind: str
    args: tuple = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012 - never changed


def outcome(function: Callable, call: Call, ours: bool) -> dict[str, Any]:
    """Returns the result, and the gradients of its first number by the arguments that have one; or what it raised."""

    def own(value: Any) -> Any:
        if isinstance(value, Both):
            return value.ours() if ours else value.verls()
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    args, kwargs = [*map(own, call.args)], {name: own(value) for name, value in call.kwargs.items()}
    torch.manual_seed(0)
    try:
        result = function(*args, **kwargs)
    except Exception as error:  # whatever it refuses, the other is to refuse it too
        return {"raises": type(error).__name__}
    learning = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
    first = result[0] if isinstance(result, tuple) else result
    gradients = torch.autograd.grad(first.sum(), learning, allow_unused=True) if learning else ()
    return {"result": result, "gradient": gradients}


def differing(ours: Any, verls: Any, path: str = "") -> set[str]:
    """Names the parts of two results that are not equal but for rounding: {"/result/1", "/result/acc", …}."""
    if isinstance(ours, DataProto):
        ours, verls = ours.tensors | ours.non_tensor_batch, dict(verls.batch) | verls.non_tensor_batch
    ours, verls = (value.tolist() if isinstance(value, np.ndarray) else value for value in (ours, verls))
    if isinstance(ours, Mapping) and isinstance(verls, Mapping):
        apart = {f"{path}/{key}" for key in ours.keys() ^ verls.keys()}
        return apart.union(*(differing(ours[key], verls[key], f"{path}/{key}") for key in ours.keys() & verls.keys()))
    if isinstance(ours, list | tuple) and isinstance(verls, list | tuple) and len(ours) == len(verls):
        parts = enumerate(zip(ours, verls, strict=True))
        return set().union(*(differing(*pair, f"{path}/{place}") for place, pair in parts))
    if not all(isinstance(value, Tensor | np.generic | float | int) for value in (ours, verls)):
        return set() if ours == verls else {path}
    one, other = (torch.as_tensor(value).detach().double() for value in (ours, verls))
    equal = one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    return set() if equal else {path}


# The calls of each function for a seed, by its module and name in verl. `Case.wrap` makes of either function, given
# whether it is ours, what is called.


class Case(NamedTuple):
    calls: Callable[[int], Iterable[Call]]
    wrap: Callable[[Callable, bool], Callable] | None = None


CASES: dict[str, Case] = {}


def case(module: str, names: str, wrap: Callable[[Callable, bool], Callable] | None = None) -> Callable:
    def add(calls: Callable[[int], Iterable[Call]]) -> Callable:
        CASES.update({f"{module}.{name}": Case(calls, wrap) for name in names.split()})
        return calls

    return add


def sides(name: str) -> tuple[Callable, Callable, Callable[[int], Iterable[Call]]]:
    """Returns our function and verl's under a name of `CASES` or "registry.name" of `REGISTRIES`, and its calls."""
    module, _, attribute = name.rpartition(".")
    match module:
        case "estimator":
            return get_adv_estimator_fn(attribute), of_registry(name), partial(estimator_calls, attribute)
        case "loss":
            importlib.import_module("extras.rollout_correction.correction")  # registers bypass_mode
            return get_policy_loss_fn(attribute), of_registry(name), partial(loss_calls, attribute)
    calls, wrap = CASES[name]
    home, _, ours = names_of_verl()[f"verl.{module}"].get(attribute, "").partition(":")
    functions = (attrgetter(ours)(importlib.import_module(home)) if home else None), of_verl(module, attribute)
    return (wrap(functions[0], True), wrap(functions[1], False), calls) if wrap else (*functions, calls)


def of_registry(name: str) -> Any:
    registry, _, key = name.partition(".")
    return of_verl(*REGISTRIES[registry][:2])[key]


# Batches


class Rows:
    """Random rows [B, R] in float64, of groups of two to four, shuffled; each has a token, and some score 0.

    "prefixes": without observations between the policy's tokens, which the others have; "lone": also samples alone in
    their groups; "failed": also a row without a token, in some the only other one of its group; "equal": float32, in
    which the mean of seven scores of 0.3 is not 0.3.
    """

    def __init__(self, seed: int, kind: str) -> None:
        self.random, self.dtype = torch.Generator().manual_seed(seed), torch.float64
        sizes = [2 + (seed + group) % 3 for group in range(3)] + [1] * 2 * (kind == "lone")
        if kind == "equal":
            self.dtype, sizes = torch.float32, [7]
        self.rows, self.width = sum(sizes), 4 + seed % 4
        self.mask = (self.uniform() < 0.7).long()
        self.mask[:, 0] = 1
        if kind == "prefixes":
            self.mask = self.mask.cumprod(-1)
        if kind == "failed":
            self.mask[sizes[0]] = 0
        order = torch.randperm(self.rows, generator=self.random)
        self.mask = self.mask[order]
        labels = [f"prompt-{group}" for group, size in enumerate(sizes) for _ in range(size)]
        self.index = np.array(labels, dtype=object)[order.numpy()]
        self.rewards = self.normal() * (self.uniform(1) < 0.8)
        if kind == "equal":
            self.rewards = 0.3 * (torch.arange(self.width) == 0) * torch.ones(self.rows, 1)

    def normal(self, width: int | None = None) -> Tensor:
        return torch.randn(self.rows, width or self.width, generator=self.random, dtype=self.dtype)

    def uniform(self, width: int | None = None, low: float = 0.0, high: float = 1.0) -> Tensor:
        numbers = torch.rand(self.rows, width or self.width, generator=self.random, dtype=self.dtype)
        return low + (high - low) * numbers

    def log_probs(self, spread: float = 0.4) -> tuple[Tensor, Tensor]:
        """Returns old and new ones, whose log-ratios are of the size of `spread`."""
        old = (-1.5 + 0.5 * self.normal()).clamp(max=-0.1)
        return old, (old + spread * self.normal()).clamp(max=-0.05)


KINDS = ("prefixes", "holes", "lone", "failed", "equal")


def batch_of(tensors: dict[str, Tensor], arrays: dict[str, Any], meta: dict[str, Any] | None = None) -> Both:
    arrays = {name: it if isinstance(it, np.ndarray) else object_array(it) for name, it in arrays.items()}

    def make(data_proto: Any) -> Any:
        copies = {name: values.copy() for name, values in arrays.items()}
        return data_proto.from_dict({name: it.clone() for name, it in tensors.items()}, copies, dict(meta or {}))

    return Both(lambda: make(DataProto), lambda: make(of_verl("protocol", "DataProto")))


def counts_of(seed: int) -> dict[str, Any]:
    """Counts of a mini-batch, of which this batch is a part, for every other seed."""
    counts = {"dp_size": 2, "batch_num_tokens": 37, "global_batch_size": 11, "loss_scale_factor": 9}
    return counts if seed % 2 else {}


# Estimators, with every option that verl's names

OPTIONS: tuple[dict[str, Any], ...] = (
    {}, {"norm_adv_by_std_in_grpo": False}, {"epsilon": 0.5}, {"f_norm": 2.0}, {"alpha": 3.0},
    {"handle_zero_tail": False}, {"rollout_is_weights": "random"}, {"non_tensor_batch": None},
)  # fmt: skip


def estimator_calls(name: str, seed: int) -> Iterator[Call]:
    named = inspect.signature(of_registry(f"estimator.{name}")).parameters
    for kind in KINDS:
        rows = Rows(seed, kind)
        weights, one_each = rows.uniform(low=0.5, high=2), partial(rows.normal, 1)
        attention = torch.ones(rows.rows, 3 + rows.width, dtype=torch.int64)
        config = {"gamma": 0.9, "gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.5] if seed % 2 else None}
        arguments = {
            "token_level_rewards": rows.rewards,
            "response_mask": rows.mask,
            "index": rows.index,
            "values": rows.normal(),
            "gamma": 0.9,
            "lam": 0.8,
            "reward_baselines": one_each()[:, 0],
            "old_log_probs": rows.uniform(low=0.1, high=0.9).log(),
            "sum_pi_squared": rows.uniform(low=0.81),
            "non_tensor_batch": {key: one_each()[:, 0].numpy() for key in "ab"},
            "batch": {"prompts": attention[:, :3], "attention_mask": attention},
        }
        for option in OPTIONS:
            if option.keys() <= named.keys():
                given = {key: weights if value == "random" else value for key, value in option.items()}
                given["config"] = OmegaConf.create(config | {key: option[key] for key in option if "norm_adv" in key})
                given = {key: value for key, value in (arguments | given).items() if key in named}
                yield Call(", ".join([kind, *option]), (), given)


# Losses

TIGHT = {"clip_ratio_low": 0.07, "clip_ratio_high": 0.03, "clip_ratio_c": 1.3, "tau_neg": 2.0}
CHOICES = {"clip_cov_ratio": 0.2, "clip_cov_lb": -0.2, "clip_cov_ub": 0.3, "kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}
CORRECTIONS: tuple[dict[str, Any], ...] = (
    {"loss_type": "reinforce", "rollout_is": "token"},
    {"loss_type": "ppo_clip", "rollout_is": "sequence", "rollout_rs": "token_k1", "rollout_rs_threshold": "0.7_1.4"},
    {"loss_type": "reinforce", "rollout_is": "sequence", "rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.1},
)


def config_of_loss(counts: dict[str, Any], correction: dict[str, Any]) -> Both:
    def ours() -> Any:
        choices = vars(PolicyLossConfig(dro_beta=0.4, **CHOICES))
        policy_loss = SimpleNamespace(**choices, rollout_correction=RolloutCorrectionConfig(**correction))
        return SimpleNamespace(**vars(ActorConfig(**TIGHT)) | {"policy_loss": policy_loss, "global_batch_info": counts})

    def verls() -> Any:
        chosen = CHOICES | {"rollout_correction": of_verl("trainer.config", "RolloutCorrectionConfig")(**correction)}
        policy_loss = of_verl("workers.config", "PolicyLossConfig")(dro_beta=0.4, **chosen)
        given = TIGHT | {"policy_loss": policy_loss, "global_batch_info": counts}
        return of_verl("workers.config", "FSDPActorConfig")(**given, use_dynamic_bsz=True, rollout_n=1)

    return Both(ours, verls)


def loss_calls(name: str, seed: int) -> Iterator[Call]:
    for kind in ("holes", "failed", "no advantage", "far", "default mode"):
        rows = Rows(seed, kind)
        old, new = rows.log_probs(30 if kind == "far" else 0.4)
        advantages = rows.normal() * (rows.uniform(1) < (0.5 if kind == "no advantage" else 1))
        mode = () if kind == "default mode" else (AGGREGATION_MODES[seed % len(AGGREGATION_MODES)],)
        weights = {"rollout_is_weights": rows.uniform(low=0.5, high=2)} if seed % 3 else {}
        config = config_of_loss(counts_of(seed), CORRECTIONS[seed % len(CORRECTIONS)])
        arguments = (old, new.requires_grad_(), advantages, rows.mask, *mode)
        yield Call(kind + ", counts" * (seed % 2), arguments, {"config": config, **weights})


# The other functions: each lambda lists the arguments of some calls. `r` are rows, one of them failed if seed is even.

FUNCTIONAL, BALANCING, METRICS = "utils.torch_functional", "utils.seqlen_balancing", "trainer.ppo.metric_utils"
KL_KINDS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full", "k4")
TIMES = {"gen": 2.5, "adv": 0.1, "values": 0.2, "update_actor": 3.0, "other": 1.0, "step": 7.0}


def plain_calls(arguments: Callable[[int, Rows], list[tuple]], seed: int) -> Iterator[Call]:
    return (Call("plain", given) for given in arguments(seed, Rows(seed, ("failed", "holes")[seed % 2])))


def learnt(values: Tensor) -> Tensor:
    return values.requires_grad_()


def integers(seed: int, highest: int, *shape: int) -> Tensor:
    return torch.randint(highest, shape, generator=torch.Generator().manual_seed(seed))


def first_tokens(mask: Tensor, count: int) -> Tensor:
    return (torch.arange(mask.numel()) < count).view_as(mask)


def floats(seed: int, count: int) -> list[float]:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)).tolist()


# fmt: off
PLAIN: dict[str, dict[str, Callable[[int, Rows], list[tuple]]]] = {
    ALGOS: {
        "compute_value_loss": lambda seed, r: [
            (learnt(r.normal()), r.normal(), r.normal(), r.mask, 0.4, mode) for mode in AGGREGATION_MODES],
        "compute_entropy_loss": lambda seed, r: [
            (learnt(r.normal(5 * r.width).view(r.rows, -1, 5)), r.mask, mode) for mode in AGGREGATION_MODES],
        "kl_penalty kl_penalty_forward": lambda seed, r: [
            (learnt(r.log_probs(spread)[1]), r.log_probs()[0], kind + plus)
            for kind in KL_KINDS for plus in ("", "+") for spread in (0.4, 30)],
        "compute_rewards": lambda seed, r: [(r.rewards, *r.log_probs(), 0.1 * seed)],
        "compute_policy_loss": lambda seed, r: [
            (old, learnt(new), r.normal(), r.mask, 0.05) for old, new in (r.log_probs(), r.log_probs())],
    },
    FUNCTIONAL: {
        "masked_sum masked_mean": lambda seed, r: [
            *((learnt(r.normal()), r.mask, axis) for axis in (None, 0, 1, -1)), (r.normal(), 0 * r.mask)],
        "masked_var masked_whiten": lambda seed, r: [
            (r.normal(), mask, option) for mask in (r.mask, first_tokens(r.mask, seed % 3)) for option in (True, False)
        ],
        "clip_by_value": lambda seed, r: [(learnt(r.normal()), r.normal() - 1, r.normal() + 1)],
        "logprobs_from_logits logprobs_from_logits_naive logprobs_from_logits_v2": lambda seed, r: [
            (learnt(r.normal(7).float()), integers(seed, 7, r.rows))],
        "entropy_from_logits entropy_from_logits_with_chunking calculate_sum_pi_squared_from_logits":
            lambda seed, r: [(learnt(r.normal().float()),)],
        "get_response_mask": lambda seed, r: [(integers(seed, 6, 4, 9), eos, torch.float32) for eos in (2, [1, 2])],
        "pad_2d_list_to_length": lambda seed, r: [([[1] * (seed % 5), [2] * 3], -1, width) for width in (None, 1, 9)],
        "pad_sequence_to_length": lambda seed, r: [(r.mask, seed, 9, left) for left in (True, False)],
        "postprocess_data": lambda seed, r: [
            (integers(seed, 50, *r.mask.shape), r.mask, 1 + seed, 9, left, side)
            for left in (True, False) for side in ("left", "right", "middle", "error", "none")],
    },
    "utils.groupwise": {
        "as_torch_index": lambda seed, r: [(integers(seed, 5, 8), "cpu"), (r.index, "cpu")],
        "group_mean_std": lambda seed, r: [(r.rewards.sum(-1), integers(seed, 4, r.rows), 1e-6 * (seed % 2), "cpu")],
    },
    BALANCING: {
        "karmarkar_karp get_seqlen_balanced_partitions": lambda seed, r: [
            (integers(seed, 60, 4 + 4 * seed).tolist(), parts, parts in (2, 4)) for parts in (1, 2, 3, 4, 5, 99)],
        "calculate_workload": lambda seed, r: [(integers(seed, 4096, 9),)],
        "ceildiv": lambda seed, r: [(7 * seed, 1 + seed % 5)],
    },
    METRICS: {
        "compute_timing_metrics": lambda seed, r: [(step_batch(seed, "failed"), TIMES)],
        "compute_throughout_metrics": lambda seed, r: [(step_batch(seed, "failed"), TIMES, 1 + seed)],
        "reduce_metrics": lambda seed, r: [({name: floats(seed, 3) for name in ("a", "max", "b_min", "max/mean")},)],
        "bootstrap_metric": lambda seed, r: [(floats(seed, 5), 1 + seed % 5, [np.max, np.min, np.mean], 50, seed)],
        "calc_maj_val": lambda seed, r: [
            ([{"vote": vote, "val": row} for row, vote in enumerate(integers(seed, 3, 9).tolist())], "vote", "val")],
    },
}
# fmt: on
for module, table in PLAIN.items():
    for names, arguments in table.items():
        case(module, names)(partial(plain_calls, arguments))
case(ALGOS, "compute_policy_loss_reinforce")(partial(loss_calls, "reinforce"))


@case(ALGOS, "agg_loss")
def _(seed: int) -> Iterator[Call]:
    for rows in (Rows(seed, "failed"), Rows(seed, "holes")):
        for mode in (*AGGREGATION_MODES, "mean"):
            yield Call(mode, (learnt(rows.normal()), rows.mask, mode), counts_of(seed))


def values_after_updates(make: Callable, ours: bool) -> Callable:
    def values(seed: int, *settings: Any) -> list[float]:
        controller, draw = make(*settings), random.Random(seed)
        return [controller.update(draw.uniform(0, 12), draw.randint(1, 512)) or controller.value for _ in range(5)]

    return values


@case(ALGOS, "get_kl_controller", wrap=values_after_updates)
def _(seed: int) -> Iterator[Call]:
    for kind in ("fixed", "adaptive", "other"):
        yield Call(kind, (seed, SimpleNamespace(type=kind, kl_coef=0.2, target_kl=6, horizon=10_000 * (seed > 0))))


case(ALGOS, "AdaptiveKLController", values_after_updates)(lambda seed: [Call("settings", (seed, 0.2, 6, 10_000))])
case(ALGOS, "FixedKLController", values_after_updates)(lambda seed: [Call("settings", (seed, 0.2))])


def rows_drawn(function: Callable, ours: bool) -> Callable:
    """Makes of PF-PPO the names of the rows that it draws."""

    def drawn(data: Any, method: str, power: float) -> list[str]:
        if ours:
            return data.uid[draw_rows(data, PFPPOConfig(method, power), seed=0).numpy()].tolist()
        return function(data, method, power).non_tensor_batch["uid"].tolist()

    return drawn


@case(ALGOS, "compute_pf_ppo_reweight_data", wrap=rows_drawn)
def _(seed: int) -> Iterator[Call]:
    for kind in ("holes", "failed"):
        rows = Rows(seed, kind)
        tensors = {"token_level_scores": rows.rewards, "response_mask": rows.mask}
        data = batch_of(tensors, {"uid": [f"row-{row}" for row in range(rows.rows)]})
        yield from (Call(kind, (data, method, 1.0 + seed)) for method in ("pow", "max_min", "max_random", "other"))


def schedule(make: Callable, ours: bool) -> Callable:
    """Makes the factors of 24 updates, of which the first are warm-up."""

    def factors(kind: str, warmup: int, total: int, **settings: float) -> list[float]:
        if ours:
            return [scheduled_multiplier(step, kind, warmup, total, **settings) for step in range(24)]
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        steps = (warmup,) if kind == "constant" else (warmup, total)
        return [make(optimizer, *steps, **settings).lr_lambdas[0](step) for step in range(24)]

    return factors


def schedule_calls(kind: str, options: tuple[str, ...], seed: int) -> Iterator[Call]:
    yield Call(kind, (kind, seed % 4, 20), {name: seed / 10 for name in options})


SCHEDULES = {
    "constant": (),
    "cosine": ("min_lr_ratio", "num_cycles", "init_lr_ratio"),
    "wsd": ("min_lr_ratio", "stable_ratio"),
}
for kind, options in SCHEDULES.items():
    case(FUNCTIONAL, f"get_{kind}_schedule_with_warmup", schedule)(partial(schedule_calls, kind, options))


# Programs, of which the rule reads what they write


def score_alone(function: Callable, ours: bool) -> Callable:
    return lambda *args, **kwargs: float(function(*args, **kwargs)[0])


@case("utils.reward_score.prime_code", "compute_score", wrap=score_alone)
def _(seed: int) -> Iterator[Call]:
    for written, expected, _ in OUTPUTS if seed == 0 else []:
        cases = {"inputs": [""], "outputs": [expected]}
        yield Call(f"{written} for {expected}", (f"print({written!r})", cases), {"continuous": True})


# Metrics


def step_batch(seed: int, kind: str) -> Both:
    rows = Rows(seed, kind)
    columns = ("token_level_scores", "token_level_rewards", "advantages", "returns", "values")
    prompts = (torch.arange(3) >= torch.arange(rows.rows)[:, None] % 3).long()
    shown = rows.mask.flip(-1).cummax(-1).values.flip(-1)  # observations between the policy's tokens too
    tensors = {name: rows.normal() for name in columns} | {"prompts": prompts, "responses": rows.mask}
    tensors |= {"response_mask": rows.mask, "attention_mask": torch.cat([prompts, shown], 1)}
    places = np.arange(rows.rows)
    arrays = {"uid": rows.index, "__num_turns__": 2 + places % 3, "tool_call_counts": places}
    return batch_of(tensors, arrays, {"global_token_num": tensors["attention_mask"].sum(-1).tolist()})


@case(METRICS, "compute_data_metrics")
def _(seed: int) -> Iterator[Call]:
    yield from (Call(kind, (step_batch(seed, kind), bool(seed % 2))) for kind in KINDS)


@case(METRICS, "process_validation_metrics")
def _(seed: int) -> Iterator[Call]:
    draw = random.Random(seed)
    samples = [(f"source-{prompt % 2}", prompt) for prompt in range(3) for _ in range(1 + (seed + prompt) % 5)]
    draw.shuffle(samples)
    infos = {name: [draw.random() for _ in samples] for name in ("reward", "acc")}
    infos |= {"text": [draw.choice("xyz") for _ in samples]}
    answers = [draw.choice("abc") for _ in samples]
    kinds = {"no answers": {}, "answers": {"pred": answers}, "an answer is None": {"pred": [None, *answers[1:]]}}
    kinds |= {"a value is None": {"acc": [None, *infos["acc"][1:]]}}
    kind = [*kinds][seed % 4]  # one for each seed, as verl takes its time
    yield Call(kind, (*zip(*samples, strict=True), infos | kinds[kind]))


# Rollout correction


def drifts(seed: int) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    for kind in ("holes", "failed", "far"):
        rows = Rows(seed, kind)
        yield kind, *rows.log_probs(30 if kind == "far" else 0.4), rows.mask


@case(CORRECTION, "compute_rollout_correction_weights")
def _(seed: int) -> Iterator[Call]:
    for kind, rollout, train, mask in drifts(seed):
        for level in ("token", "sequence", "batch"):
            for threshold in (2.0, "1.3", "0.7_1.4"):
                yield Call(f"{kind}, {level}", (train - rollout, mask, level, threshold, bool(seed % 2)))


@case(CORRECTION, "compute_rollout_rejection_mask")
def _(seed: int) -> Iterator[Call]:
    for kind, rollout, train, mask in drifts(seed):
        for option in (*REJECTION_OPTIONS, "seq_max_k1"):
            threshold = ("0.8_1.3", 1.2, 0.1, None)[seed % 4]
            yield Call(f"{kind}, {option}", (train - rollout, mask, option, threshold))
        yield Call(f"{kind}, two", (train - rollout, mask, "token_k1,seq_mean_k2", "0.5_2.0, 0.1"))


@case(CORRECTION, "compute_offpolicy_metrics")
def _(seed: int) -> Iterator[Call]:
    for kind, rollout, train, mask in drifts(seed):
        yield from (Call(kind, (train, other, mask)) for other in (rollout, None))
        yield Call("no token", (train, rollout, mask * 0))


@case(CORRECTION, "compute_rollout_correction_and_rejection_mask")
def _(seed: int) -> Iterator[Call]:
    for kind, rollout, train, mask in drifts(seed):
        for correction in ({}, *CORRECTIONS):
            settings = {name: value for name, value in correction.items() if name != "loss_type"}
            yield Call(kind, (train, rollout, mask), settings)


def preset(config: type, ours: bool) -> Callable:
    return lambda name: {field: getattr(getattr(config, name)(), field) for field in vars(RolloutCorrectionConfig())}


@case("trainer.config", "RolloutCorrectionConfig", wrap=preset)
def _(seed: int) -> Iterator[Call]:
    yield from (Call("preset", (name,)) for name in PRESETS if seed == 0)
