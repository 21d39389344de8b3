"""How a policy loss is called, whoever wrote it, and what it may return."""

import inspect
from collections.abc import Callable, Sequence
from numbers import Real
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from configs.settings import Readable
from data.import_utils import callable_name, takes

Metrics = dict[str, float]

ROWS = ("old_log_probs", "log_probs", "advantages", "response_mask")  # by position: a loss may name them as it likes
OLDER_METRICS = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")  # verl's, before losses gave a dict


class LossConfig(Readable, SimpleNamespace):
    """What a loss is given as `config`: attributes, which can be read like a mapping as well."""


def loss_arguments(
    function: Callable, loss_agg_mode: Any, config: Any, others: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """What a loss is given beside `ROWS`: by position and by name.

    `loss_agg_mode` and `config` if it takes them, the mode also as a fifth argument of another name. `others`, which
    are rollout_is_weights and policy_loss.kwargs, in any case: what was set and is not taken is a mistake.
    """
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    offered = {"loss_agg_mode": loss_agg_mode, "config": config}
    if len(positional) > len(ROWS):
        fifth = positional[len(ROWS)]
        is_mode = fifth.default is fifth.empty or isinstance(fifth.default, str)
        if is_mode and fifth.name not in ("config", "rollout_is_weights", *others):
            return [offered.pop("loss_agg_mode")], others | taken(function, offered)
    return [], others | taken(function, offered)


def taken(function: Callable, offered: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in offered.items() if takes(function, name)}


def check_loss_signature(function: Callable, key: str, others: Sequence[str]) -> None:
    """Raises ValueError unless a loss can be called with what the actor has; `key` is the setting that chose it."""
    by_position, by_name = loss_arguments(function, None, None, dict.fromkeys(others))
    signature = inspect.signature(function)
    try:
        signature.bind(*ROWS, *by_position, **by_name)
    except TypeError as error:
        raise ValueError(
            f"{key}: {callable_name(function)}{signature} cannot be called: {error}. A policy loss is given "
            f"{', '.join(ROWS)} by position, loss_agg_mode and config if it takes them, and by name {list(others)}: "
            "rollout_is_weights where rollouts are corrected, and policy_loss.kwargs, for settings of your own."
        ) from error


def call_policy_loss(
    function: Callable, rows: Sequence[Tensor], loss_agg_mode: str, config: LossConfig, others: dict[str, Any]
) -> tuple[Tensor, Metrics]:
    """The loss of some `rows` (the tensors of `ROWS`, [B, R]), a tensor of shape (), and its metrics.

    Raises:
        ValueError: it returned anything but a loss that depends on the log-probs, and a dict of numbers, or verl's
            older four values: the loss, and the numbers that are called `OLDER_METRICS`.
    """
    by_position, by_name = loss_arguments(function, loss_agg_mode, config, others)
    result = function(*rows, *by_position, **by_name)
    parts = list(result) if isinstance(result, tuple | list) else [result]
    if len(parts) == 1 + len(OLDER_METRICS):
        parts = [parts[0], dict(zip(OLDER_METRICS, parts[1:], strict=True))]
    if problem := problem_of(parts, learns=rows[1].requires_grad):
        raise ValueError(
            f"the policy loss {callable_name(function)} returned {problem}; it must return the loss, a tensor of "
            "shape () as from agg_loss, and a dict of metrics, each a number (or verl's older four values: the loss, "
            "the clipped fraction, the KL, the lower clipped fraction)."
        )
    loss, metrics = parts
    return loss, {name: value.item() if isinstance(value, Tensor) else float(value) for name, value in metrics.items()}


def problem_of(parts: list[Any], learns: bool) -> str | None:
    """What is wrong with what a loss returned; `learns`: the log-probs that it was given carry a gradient."""
    match parts:
        case [Tensor(ndim=0) as loss, dict(metrics)]:
            if learns and not loss.requires_grad:
                return "a loss that does not depend on the log-probs, so that nothing is learnt from it"
            strange = [name for name, value in metrics.items() if not is_number(value)]
            return f"metrics of which {strange} are not numbers" if strange else None
    return str([tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts])


def is_number(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Tensor) and value.numel() == 1)
