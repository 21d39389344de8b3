"""Calls a policy loss, shipped or of the user's, and checks what it returns."""

import inspect
from collections.abc import Callable, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from configs.import_utils import bind, callable_name
from configs.settings import Readable
from training.core_algos import LossConfig

Metrics = dict[str, float | Tensor]  # tensors of one element: reading them would wait for the device

TENSOR_ARGS = ("old_log_probs", "log_probs", "advantages", "response_mask")  # by position, named at will
OLDER_METRICS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")  # verl's, before losses gave a dict


class ReadableNamespace(Readable, SimpleNamespace):
    """Settings as attributes, which can be read like a mapping as well: the `config` that a loss is given."""


def bind_policy_loss(
    function: Callable,
    tensors: Sequence[Any],
    loss_agg_mode: Any,
    config: Any,
    extra_kwargs: dict[str, Any],
    key: str = "the policy loss",
) -> Callable[[], Any]:
    """Binds a loss to the `tensors` of `TENSOR_ARGS` by position and to the rest of its arguments.

    It is given `loss_agg_mode` and `config` if it accepts them, the mode also as a fifth argument of another name, and
    `extra_kwargs`, which are rollout_is_weights and policy_loss.kwargs, in any case.

    Raises:
        ValueError: it needs another argument, or does not accept what was set; names `key`, which chose it.
    """
    positional = dict(zip(TENSOR_ARGS, tensors, strict=True))
    parameters = inspect.signature(function).parameters.values()
    own = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][len(TENSOR_ARGS) :]
    has_mode = own and (own[0].default is own[0].empty or isinstance(own[0].default, str))
    if has_mode and own[0].name not in ("config", "rollout_is_weights", *extra_kwargs):
        positional["loss_agg_mode"] = loss_agg_mode
    offered = {"loss_agg_mode": loss_agg_mode, "config": config}
    settings = "rollout_is_weights and policy_loss.kwargs"
    return bind(function, offered, extra_kwargs, key, positional=positional, settings=settings)


def call_policy_loss(
    function: Callable, tensors: Sequence[Tensor], loss_agg_mode: str, config: LossConfig, extra_kwargs: dict[str, Any]
) -> tuple[Tensor, Metrics]:
    """The loss of some rows, by the `tensors` of `TENSOR_ARGS` ([B, R]), a tensor of shape (), and its metrics.

    Raises:
        ValueError: it returned anything but a loss that depends on the log-probs, and a dict of numbers, or verl's
            older four values: the loss, and the numbers that are called `OLDER_METRICS`.
    """
    result = bind_policy_loss(function, tensors, loss_agg_mode, config, extra_kwargs)()
    parts = list(result) if isinstance(result, tuple | list) else [result]
    if len(parts) == 1 + len(OLDER_METRICS):
        parts = [parts[0], dict(zip(OLDER_METRICS, parts[1:], strict=True))]
    if problem := problem_of(parts, learns=tensors[1].requires_grad):
        raise ValueError(
            f"the policy loss {callable_name(function)} returned {problem}; it must return the loss, a tensor of "
            "shape () as from agg_loss, and a dict of metrics, each a number (or verl's older four values: the loss, "
            "the clipped fraction, the KL, the lower clipped fraction)."
        )
    loss, metrics = parts
    return loss, {
        name: value.detach() if isinstance(value, Tensor) else float(value) for name, value in metrics.items()
    }


def problem_of(parts: list[Any], learns: bool) -> str | None:
    """Says what is wrong with the result of a loss, or None; `learns`: its log-probs carry a gradient."""
    match parts:
        case [Tensor(ndim=0) as loss, dict(metrics)]:
            if learns and not loss.requires_grad:
                return "a loss that does not depend on the log-probs, so that nothing is learnt from it"
            strange = [name for name, value in metrics.items() if not is_number(value)]
            return f"metrics of which {strange} are not numbers" if strange else None
    return str([tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts])


def is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
