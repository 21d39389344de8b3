"""Computes PPO's policy loss, the value loss and KL penalties: pure functions over padded tensors.

A new policy loss is a short function under `@register_policy_loss("name")`; extras/algorithms has more.

Shapes: B sequences, R the padded response width. `response_mask` [B, R] is 1 on tokens the policy produced and 0 on
padding, observations and tool text; a row whose mask is all zero is a failed episode. What lies under the zeros does
not matter.
A policy loss returns metrics as means of a per-token quantity over `response_mask`, so weighting micro-batches by their
number of valid tokens pools them into the exact mean of the whole.
"""

import inspect
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache, update_wrapper
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from configs.import_utils import REGISTRIES, accepts, bind, callable_name
from configs.schema import AGGREGATION_MODES
from configs.settings import Readable

EPSILON = 1e-8  # verl's, in every masked denominator: part of the numerics to agree with
MAX_LOG_RATIO = 20.0  # keeps exp() finite; a token further off policy than this gets no gradient through its ratio

Pair = tuple[Tensor, Tensor]
PolicyLossFn = Callable[..., tuple[Tensor, dict[str, float | Tensor]]]
TokenLosses = tuple[Tensor, dict[str, Tensor]]  # losses and, by name, metrics; [B, R] each
LossConfig = Any  # the settings of actor_rollout_ref.actor, and `global_batch_info`, keyword arguments of `agg_loss`
Metrics = dict[str, float | Tensor]  # tensors of one element: reading them would wait for the device

POLICY_LOSS_REGISTRY = REGISTRIES["policy_loss"]  # of `PolicyLoss`
LOSSES: dict[str, "PolicyLoss"] = {}  # of this file; configs/extras.py names them


@dataclass(frozen=True)
class PolicyLoss:
    """A policy loss, with what its callers have to know.

    Attributes:
        over_mini_batch: what a token contributes depends on the others of its mini-batch, so the actor calls the loss
            once for all of them, not for each micro-batch; that costs a forward pass more.
        silent_at_zero: a row whose advantages are all 0 adds nothing to loss or gradient, so it may be left out.
    """

    function: PolicyLossFn
    over_mini_batch: bool = False
    silent_at_zero: bool = False


def key_of(name_or_enum: str | Enum, decorator: str = "") -> str:
    name = name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum
    if decorator and not isinstance(name, str):
        raise TypeError(f"@{decorator} needs the name by which the config finds the function: @{decorator}('mine')")
    return name


def register_policy_loss(name: str, *, registry: MutableMapping = POLICY_LOSS_REGISTRY, **marks: bool) -> Callable:
    """Adds a policy loss, replacing any of the same name; `PolicyLoss` has the marks. TypeError without a name."""
    key_of(name, "register_policy_loss")

    def register(fn: PolicyLossFn) -> PolicyLossFn:
        registry[name] = PolicyLoss(fn, **marks)
        return fn

    return register


def get_policy_loss(name: str) -> PolicyLoss:
    """Returns the policy loss registered under this exact name; raises ValueError if there is none."""
    if name not in POLICY_LOSS_REGISTRY:
        raise ValueError(f"Unsupported loss mode: {name}. Supported modes are: {list(POLICY_LOSS_REGISTRY)}")
    return POLICY_LOSS_REGISTRY[name]


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    return get_policy_loss(name).function


# A mask is bool, int or float; what lies under its zeros never matters, not even a NaN.


def zero_masked(values: Tensor, mask: Tensor) -> Tensor:
    """Keeps `values` where the mask is set, else 0, broadcasting; NaN and Inf leak neither forward nor backward."""
    return torch.where(mask.bool(), values, 0)


def masked_sum(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Sums `values · mask` over `axis` (all axes if None)."""
    return (zero_masked(values, mask) * mask).sum(axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | None = None) -> Tensor:
    """Averages over the mask; 0 where the mask is empty."""
    return masked_sum(values, mask, axis) / (mask.sum(axis) + EPSILON)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Computes the variance over the mask, a scalar, with Bessel's correction n / (n - 1) if `unbiased`.

    Raises ValueError if `unbiased` and the mask holds fewer than two elements.
    """
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    if not unbiased:
        return variance
    count = mask.sum()
    if count <= 1:
        raise ValueError(f"the mask selects {int(count)} elements, but an unbiased variance needs at least 2")
    return variance * count / (count - 1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scales to unit variance over the mask and, if `shift_mean`, to mean 0; positions outside the mask move along."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + EPSILON)
    return whitened if shift_mean else whitened + mean


def bound_log_ratio(log_ratio: Tensor) -> Tensor:
    """Clamps `log_ratio` to ±20, so that its exp() is finite."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip_by_value(x: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Clamps between tensors; where the bounds cross, `lo` wins."""
    return torch.maximum(torch.minimum(x, hi), lo)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: int | Tensor | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Aggregates per-token losses [B, R] to a scalar.

    | mode | value |
    |---|---|
    | token-mean | sum over tokens / tokens |
    | token-sum | sum over tokens |
    | seq-mean-token-sum | sum over tokens / sequences |
    | seq-mean-token-mean | sum over sequences of their token means / sequences |
    | seq-mean-token-sum-norm | sum over tokens / sequences / `loss_scale_factor` (default R) |

    With the counts of the whole (`batch_num_tokens` valid tokens, `global_batch_size` sequences with at least one, and
    `loss_scale_factor` where widths may differ) any cut into micro-batches adds up to the whole; else they are this
    tensor's own. `dp_size` cancels a gradient all-reduce that averages over that many ranks.
    Differs from verl: no mode lets NaN out from under the mask, and an empty mask gives 0 with zero gradient, not NaN.

    Raises ValueError on an unknown mode, or if dp_size > 1 and the mode's global count is missing.
    """
    if loss_agg_mode not in AGGREGATION_MODES:
        raise ValueError(f"Invalid loss_agg_mode: {loss_agg_mode}. Choose one of {', '.join(AGGREGATION_MODES)}")
    total = dp_size * masked_sum(loss_mat, loss_mask)
    if loss_agg_mode == "token-sum":
        return total
    if loss_agg_mode == "token-mean":
        return total / _global_count("batch_num_tokens", batch_num_tokens, loss_mask.sum(), dp_size)
    if loss_agg_mode == "seq-mean-token-mean":
        total = dp_size * masked_mean(loss_mat, loss_mask, axis=-1).sum()
    if loss_agg_mode == "seq-mean-token-sum-norm":
        total = total / (loss_mask.shape[-1] if loss_scale_factor is None else loss_scale_factor)
    return total / _global_count("global_batch_size", global_batch_size, loss_mask.bool().any(-1).sum(), dp_size)


def _global_count(name: str, count: int | Tensor | None, local_count: Tensor, dp_size: int) -> Tensor:
    if count is None and dp_size > 1:
        raise ValueError(f"dp_size is {dp_size} but {name} is None: pass {name} summed over all ranks")
    count = local_count if count is None else torch.as_tensor(count)
    return torch.where(count > 0, count, 1)  # nothing to average: the numerator is 0 already


def clip_bounds(config: LossConfig) -> tuple[float, float]:
    """Returns (low, high), each `clip_ratio` where unset, so that, unlike in verl, it can be set alone."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return config.clip_ratio if low is None else low, config.clip_ratio if high is None else high


def masked_means(per_token: dict[str, Tensor], response_mask: Tensor) -> dict[str, Tensor]:
    """Averages a policy loss's [B, R] metrics over the mask: tensors of shape (), as to read them is to wait."""
    return {name: masked_mean(values.detach().float(), response_mask) for name, values in per_token.items()}


class Tokens(NamedTuple):
    """The tensors of a loss, [B, R] each; `log_prob` and `log_ratio` are 0 under the mask, so that not even a NaN there
    reaches the gradient."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    mask: Tensor
    log_ratio: Tensor


def token_loss(mode: str | None = None, default: str = "token-mean") -> Callable[[Callable], PolicyLossFn]:
    """Makes a policy loss of a function of `Tokens` and the config.

    The losses are multiplied by the importance weights and aggregated by `agg_loss`, in the `mode` given here or else
    in the config's; a call by hand in `default`.
    """

    def decorate(token_losses: Callable[[Tokens, LossConfig], TokenLosses]) -> PolicyLossFn:
        def policy_loss(
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str = default,
            config: LossConfig | None = None,
            *,
            rollout_is_weights: Tensor | None = None,
        ) -> tuple[Tensor, dict[str, float | Tensor]]:
            log_ratio = zero_masked(log_prob - old_log_prob, response_mask)
            log_prob = zero_masked(log_prob, response_mask)
            tokens = Tokens(old_log_prob, log_prob, advantages, response_mask, log_ratio)
            losses, metrics = token_losses(tokens, config)
            if rollout_is_weights is not None:
                losses = losses * rollout_is_weights
            loss = agg_loss(losses, response_mask, mode or loss_agg_mode, **config.global_batch_info)
            return loss, masked_means(metrics, response_mask)

        update_wrapper(policy_loss, token_losses)
        del policy_loss.__wrapped__  # so that inspect.signature sees the arguments of policy_loss
        return policy_loss

    return decorate


CLIP_METRICS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")  # in the order of verl's older losses
CLIPPED = CLIP_METRICS[::2]  # 0 where the advantage is, so exact without such rows


def clip_metrics(log_ratio: Tensor, clipped: Tensor | None = None, lower: Tensor | None = None) -> dict[str, Tensor]:
    zeros = torch.zeros_like(log_ratio)
    values = zeros if clipped is None else clipped, -log_ratio, zeros if lower is None else lower
    return dict(zip(CLIP_METRICS, values, strict=True))


def clip_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Pair:
    """PPO's clipped objective (arXiv:1707.06347), elementwise: max(-A · ratio, -A · clamp(ratio, 1 - low, 1 + high)),
    and where the clip lowered the objective (bool)."""
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(unclipped, clipped), clipped > unclipped


# In their formulas A is the advantage, ratio is exp(log_prob - old_log_prob), and sg() stops the gradient.


@register_policy_loss("vanilla", registry=LOSSES, silent_at_zero=True)
@token_loss()
def compute_policy_loss_vanilla(t: Tokens, config: LossConfig) -> TokenLosses:
    """PPO's clipped loss, with the dual clip (arXiv:1912.09729): where A < 0, at most -A · clip_ratio_c.

    Raises AssertionError unless clip_ratio_c > 1."""
    assert config.clip_ratio_c > 1, f"clip_ratio_c is {config.clip_ratio_c}, but must be above 1 (verl's default is 3)"
    log_ratio = bound_log_ratio(t.log_ratio)
    pessimistic, clipped = clip_loss(log_ratio.exp(), t.advantages, *clip_bounds(config))
    cap, negative = -t.advantages * config.clip_ratio_c, t.advantages < 0
    # minimum, not where alone: it splits the gradient at exact ties, as verl's does.
    losses = torch.where(negative, torch.minimum(pessimistic, cap), pessimistic)
    return losses, clip_metrics(log_ratio, clipped, (pessimistic > cap) & negative)


@token_loss(default="seq-mean-token-sum")
def compute_policy_loss_reinforce(t: Tokens, config: LossConfig) -> TokenLosses:
    """REINFORCE, off policy if the importance weights say so: -A · log_prob · weight; `old_log_prob`, the rollout's,
    only feeds the metric."""
    return -t.advantages * t.log_prob, {"actor/ppo_kl": -t.log_ratio}


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **global_batch_info: Any,
) -> Pair:
    """Half the squared error to the returns, or that of predictions clipped to `values` ± `cliprange_value` if larger.

    All tensors [B, R]; `values` are the predictions before the update. `global_batch_info` goes to `agg_loss`.
    Returns (loss, clip_fraction), both scalar tensors, the second without gradient.
    """
    vpreds = zero_masked(vpreds, response_mask)
    clipped_vpreds = clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)
    errors, clipped_errors = (vpreds - returns) ** 2, (clipped_vpreds - returns) ** 2
    losses = torch.maximum(errors, clipped_errors)
    loss = 0.5 * agg_loss(losses, response_mask, loss_agg_mode, **global_batch_info)
    return loss, masked_mean((clipped_errors > errors).float(), response_mask)


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimates KL(policy || reference) per token from samples of the policy (http://joschu.net/blog/kl-approx.html).

    With k = logprob - ref_logprob: "kl", "k1" is k; "abs" |k|; "mse", "k2" k² / 2; "low_var_kl", "k3"
    exp(-k) + k - 1 with -k clamped to ±20 and the result to ±10. Raises NotImplementedError for other names.
    """
    log_ratio = logprob - ref_logprob
    match kl_penalty:
        case "kl" | "k1":
            return log_ratio
        case "abs":
            return log_ratio.abs()
        case "mse" | "k2":
            return 0.5 * log_ratio**2
        case "low_var_kl" | "k3":
            inverse = bound_log_ratio(-log_ratio)
            return (inverse.exp() - inverse - 1).clamp(-10, 10)
    raise NotImplementedError(
        f"kl_penalty is {kl_penalty!r}, but must be kl, k1, abs, mse, k2, low_var_kl or k3, perhaps with a trailing '+'"
    )


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """`kl_penalty_forward`; a trailing "+" keeps its value but takes the gradient of k2.

    The expected gradient of k2 over the policy's samples is that of the KL divergence; of k1 it is zero.
    """
    value = kl_penalty_forward(logprob, ref_logprob, kl_penalty.removesuffix("+"))
    if not kl_penalty.endswith("+"):
        return value
    surrogate = kl_penalty_forward(logprob, ref_logprob, "k2")
    return value.detach() + (surrogate - surrogate.detach())


class FixedKLController:
    """A KL coefficient that stays what it is."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Does nothing."""


class AdaptiveKLController:
    """A KL coefficient that follows the measured KL towards a target (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        self.value, self.target_kl, self.horizon = init_kl_coef, target_kl, horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Moves by at most 20 % per `horizon` samples, given the mean KL of the last `n_steps` samples."""
        error = min(max(current_kl / self.target_kl - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(kl_ctrl: Any) -> FixedKLController | AdaptiveKLController:
    """Makes the controller for `algorithm.kl_ctrl` (type, kl_coef, target_kl, horizon in samples).

    Raises NotImplementedError on another type than "fixed" or "adaptive", AssertionError on a horizon <= 0.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        assert kl_ctrl.horizon > 0, f"kl_ctrl.horizon is {kl_ctrl.horizon}, but must be a positive number of samples"
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise NotImplementedError(f"kl_ctrl.type is {kl_ctrl.type!r}, but must be 'fixed' or 'adaptive'")


# How a loss is called

TENSOR_ARGS = ("old_log_probs", "log_probs", "advantages", "response_mask")  # by position, so any names will do


class ReadableNamespace(Readable, SimpleNamespace):
    """Settings as attributes, which can be read like a mapping as well: the `config` that a loss is given."""


def bind_policy_loss(
    function: Callable, tensors: Sequence[Any], loss_agg_mode: Any, config: Any, extra_kwargs: dict[str, Any], key: str
) -> Callable[[], Any]:
    """Binds a loss to the `tensors` of `TENSOR_ARGS` by position, or by name where it has no position for one, as with
    **kwargs; to `loss_agg_mode` (also as a fifth argument of any name) and `config` if it accepts them, and to
    `extra_kwargs`: rollout_is_weights and policy_loss.kwargs."""
    positional = dict(zip(TENSOR_ARGS, tensors, strict=True))
    parameters = inspect.signature(function).parameters.values()
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_name, optional = TENSOR_ARGS[len(by_position) :], by_position[len(TENSOR_ARGS) :]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) or not all(accepts(function, name) for name in by_name):
        by_name = ()
    offered = {name: positional.pop(name) for name in by_name} | {"loss_agg_mode": loss_agg_mode, "config": config}
    has_mode = optional and (optional[0].default is optional[0].empty or isinstance(optional[0].default, str))
    if has_mode and optional[0].name not in ("config", "rollout_is_weights", *extra_kwargs):
        positional["loss_agg_mode"] = loss_agg_mode
    settings = "rollout_is_weights and policy_loss.kwargs"
    return bind(function, offered, extra_kwargs, key, positional=positional, settings=settings)


@cache
def arguments_of(function: Callable, extra: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Returns how many arguments `bind_policy_loss` gives a loss by position, and which by name."""
    bound = bind_policy_loss(function, TENSOR_ARGS, None, None, dict.fromkeys(extra), "the policy loss")
    return len(bound.args), tuple(bound.keywords)


def call_policy_loss(
    function: Callable, tensors: Sequence[Tensor], loss_agg_mode: str, config: LossConfig, extra_kwargs: dict[str, Any]
) -> tuple[Tensor, Metrics]:
    """Returns the loss of some rows, by the `tensors` of `TENSOR_ARGS` ([B, R]), a tensor of shape (), and its metrics.

    Raises:
        ValueError: it returned anything but a loss that depends on the log-probs, and a dict of numbers, or verl's
            older four values: the loss, and `CLIP_METRICS`.
    """
    n_positional, names = arguments_of(function, (*extra_kwargs,))
    keywords = dict(zip(TENSOR_ARGS, tensors, strict=True), loss_agg_mode=loss_agg_mode, config=config) | extra_kwargs
    result = function(*(*tensors, loss_agg_mode)[:n_positional], **{name: keywords[name] for name in names})
    parts = list(result) if isinstance(result, tuple | list) else [result]
    if len(parts) == 1 + len(CLIP_METRICS):
        parts = [parts[0], dict(zip(CLIP_METRICS, parts[1:], strict=True))]
    if problem := problem_of(parts, learns=tensors[1].requires_grad):
        raise ValueError(
            f"the policy loss {callable_name(function)} returned {problem}; it must return the loss, a tensor of "
            "shape () as from agg_loss, and a dict of metrics, each a number."
        )
    loss, metrics = parts
    return loss, {name: each.detach() if isinstance(each, Tensor) else float(each) for name, each in metrics.items()}


def problem_of(parts: list[Any], learns: bool) -> str | None:
    """Says what is wrong with the result of a loss, or None; `learns`: its log-probs carry a gradient."""
    match parts:
        case [Tensor(ndim=0) as loss, dict(metrics)]:
            if learns and not loss.requires_grad:
                return "a loss that does not depend on the log-probs, so that nothing is learnt from it"
            non_numbers = [name for name, value in metrics.items() if not is_number(value)]
            return f"metrics of which {non_numbers} are not numbers" if non_numbers else None
    return str([tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts])


def is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
