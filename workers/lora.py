"""Adds LoRA's small matrices beside a model's frozen ones, by the library peft.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

import copy
import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.schema import SFTModelConfig
from workers.collectives import rank
from workers.sharding import whole, write

ADAPTER = "default"  # peft's name for the only one


def add_lora(model: PreTrainedModel, settings: SFTModelConfig) -> None:
    """Freezes `model` and puts matrices of rank `lora_rank` beside those of `target_modules`, which start at no effect.

    Raises:
        ValueError: the model has no such modules; names the key.
    """
    from peft import LoraConfig  # two seconds, and only needed here

    targets = settings.target_modules
    chosen = LoraConfig(
        r=settings.lora_rank, lora_alpha=settings.lora_alpha, target_modules=targets, task_type="CAUSAL_LM"
    )
    try:
        model.add_adapter(chosen, ADAPTER)
    except ValueError as error:
        linear = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Linear)}
        raise ValueError(
            f"model.target_modules={targets} does not fit {type(model).__name__} ({error}). Take all-linear, or names "
            f"of its layers: {', '.join(sorted(linear))}."
        ) from error


@torch.no_grad()
def reset_adapters(model: PreTrainedModel) -> None:
    """Draws the matrices of a sharded model's adapters, as peft draws those of a whole one: they have no effect yet."""
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            start = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                torch.nn.init.kaiming_uniform_(start, a=math.sqrt(5))
            write(parameter.detach(), start)


def save_pretrained(model: PreTrainedModel, folder: Path, with_weights: bool) -> None:
    """Writes `folder`/huggingface, for from_pretrained: the configs, and the weights if asked for, with LoRA's added.
    Those are then by themselves in `folder`/lora_adapter, for peft. All ranks have to ask for it; the first writes."""
    if not model._hf_peft_config_loaded:  # transformers' word for "has adapters"
        weights = {name: whole(weight) for name, weight in model.state_dict().items()} if with_weights else {}
        if rank() == 0:
            model.save_pretrained(folder / "huggingface", state_dict=weights)
        return
    plain = copy.copy(model)  # the same weights, in an object that saves whole models
    plain._hf_peft_config_loaded = False
    plain.save_pretrained(folder / "huggingface", state_dict=merged_weights(model) if with_weights else {})
    if with_weights:
        model.save_pretrained(folder / "lora_adapter")


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Merges the adapters: returns the weights of the plain model that computes the same, under its names."""
    from peft.tuners.lora import LoraLayer

    weights = {name: value for name, value in model.state_dict().items() if ".lora_" not in name}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer):
            weights[f"{name}.base_layer.weight"] = layer.base_layer.weight + layer.get_delta_weight(ADAPTER)
    return {name.replace(".base_layer.", "."): value for name, value in weights.items()}
