"""What makes a model compute the same of a row in training as in generation, and in whatever batch.

Log-probs of rows that were sampled one way and scored another are wrong, and nobody sees it.
"""

from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from configs.loader import notice


def compute_as_in_eval(model: PreTrainedModel) -> None:
    """Has every layer of `model` compute as in eval mode, in training too: without dropout, and without the noise of
    routers (PhiMoE, Mixtral). Gradient checkpointing asks a layer for its mode, so those that do it are left alone."""
    for module in model.modules():
        if module is not model:
            module.train = MethodType(train_as_eval, module)
    model.train(model.training)


def train_as_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    """nn.Module.train, after which `module` itself is in training mode only if it is checkpointed."""
    nn.Module.train(module, mode)
    module.training = mode and bool(vars(module).get("gradient_checkpointing"))
    return module


def fix_rope(model: PreTrainedModel, longest: int) -> None:
    """Has rotary embeddings whose parameters depend on the longest position in a batch (longrope, dynamic) use those of
    `longest` tokens, in every batch, if the run goes past the length at which they change. A notice says so."""
    changes = [length for length in rope_changes(model.config) if length < longest]
    if not changes:
        return
    for module in model.modules():
        if changes_by_length(vars(module).get("rope_type")):
            module.register_forward_pre_hook(partial(add_position, last=longest - 1), with_kwargs=True)
            module.register_forward_hook(drop_position)
    notice(
        f"{type(model).__name__} turns positions otherwise in batches of more than {min(changes)} tokens: as the run's "
        f"longest sequence has {longest}, all sequences are taken as such, short ones too. So must whoever serves the "
        "model. To keep to the shorter form, lower data.max_prompt_length or data.max_response_length."
    )


def rope_changes(config: PretrainedConfig) -> list[int]:
    """The lengths behind which a rotary embedding of `config` has other parameters for the whole batch."""
    text = config.get_text_config().to_dict()
    parameters = text.get("rope_parameters") or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]  # one, or by layer type
    return [
        kind.get("original_max_position_embeddings") or text["max_position_embeddings"]
        for kind in kinds
        if changes_by_length(kind.get("rope_type"))
    ]


def changes_by_length(rope_type: Any) -> bool:
    """Whether rotary embeddings of this type, or of one of these by layer type, look at the longest position."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(kind == "longrope" or "dynamic" in (kind or "") for kind in kinds)


def add_position(module: nn.Module, args: tuple, kwargs: dict[str, Any], last: int) -> tuple[tuple, dict[str, Any]]:
    """Another column of position_ids [b, q], `last`; before the forward of a rotary embedding."""

    def longer(positions: Tensor) -> Tensor:
        return torch.cat([positions, torch.full_like(positions[:, :1], last)], dim=1)

    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": longer(kwargs["position_ids"])}
    values, positions, *others = args
    return (values, longer(positions), *others), kwargs


def drop_position(module: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Cosines and sines without that column, [b, q, d] each."""
    cosines, sines = output
    return cosines[:, :-1], sines[:, :-1]
