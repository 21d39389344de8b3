"""Adds LoRA's small matrices beside a model's frozen ones, by the library peft.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel, __version__
from transformers.integrations.peft import MIN_PEFT_VERSION, check_peft_version

from configs.errors import ConfigError
from configs.paths import find_path
from configs.schema import ModelConfig, RolloutConfig
from data.seeding import torch_generator
from extras.lora.settings import check_settings
from training.model_shards import save_tensors
from workers.adapter import NoAdapter
from workers.collectives import largest
from workers.upstream import has_adapter, without_adapter

if TYPE_CHECKING:
    from peft import LoraConfig

ADAPTER = "default"  # peft's name for the only one
BEYOND = (  # settings of an adapter with which it is more than pairs of matrices beside others
    *("modules_to_save", "bias", "lora_bias", "use_dora", "use_qalora", "use_bdlora"),
    *("trainable_token_indices", "layer_replication", "alora_invocation_tokens", "arrow_config"),
)


def add_lora(model: PreTrainedModel, settings: ModelConfig) -> None:
    """Freezes `model` and puts LoRA's matrices beside its own, by `settings` or as the adapter in `lora_adapter_path`
    has them; raises ValueError, naming the key, if it has no such modules."""
    check_takes_peft()
    from peft.tuners.lora import LoraLayer  # two seconds, and only needed here

    tables = model.get_input_embeddings(), model.get_output_embeddings()
    tied = {name for name, part in model.named_modules() if any(part is table for table in tables)}
    chosen = adapter_config(settings)
    try:
        model.add_adapter(chosen, ADAPTER)
    except ValueError as error:
        raise unfit(model, settings, str(error)) from error
    layers = [name for name, part in model.named_modules() if isinstance(part, LoraLayer)]
    named = [] if settings.lora_adapter_path or isinstance(settings.target_modules, str) else settings.target_modules
    if idle := [name for name in named if not any(f".{layer}".endswith(f".{name}") for layer in layers)]:
        raise unfit(model, settings, f"it has no {', '.join(idle)}")
    if model.config.get_text_config().tie_word_embeddings and (parted := sorted(tied.intersection(layers))):
        raise unfit(model, settings, f"its embedding is its head, and LoRA beside {parted[0]} would part them")


def check_takes_peft() -> None:
    """Raises ConfigError if the installed transformers refuses the installed PEFT, whatever its settings."""
    try:
        check_peft_version(MIN_PEFT_VERSION)
    except ValueError as error:
        raise ConfigError(
            f"model.lora_rank: transformers {__version__} refuses PEFT as it is installed ({error}): "
            "no LoRA until they fit. Install both as constraints.txt has them."
        ) from None


def adapter_config(settings: ModelConfig) -> "LoraConfig":
    """Returns peft's config of the matrices to add; raises ValueError if the saved adapter is not plain LoRA, or has
    another rank than `lora_rank`."""
    from peft import LoraConfig, PeftConfig

    if settings.lora_adapter_path is None:
        return LoraConfig(
            r=settings.lora_rank,
            lora_alpha=settings.lora_alpha,
            target_modules=settings.target_modules,
            exclude_modules=settings.exclude_modules,
            task_type="CAUSAL_LM",
        )
    path, plain = find_path(settings.lora_adapter_path), LoraConfig()
    key, saved = f"model.lora_adapter_path={path}", PeftConfig.from_pretrained(str(path))
    if not isinstance(saved, LoraConfig):
        raise ValueError(f"{key} is an adapter of the kind {saved.peft_type.value}: only LoRA is trained here.")
    if settings.lora_rank not in (0, saved.r):
        raise ValueError(
            f"{key} is of rank {saved.r}, and model.lora_rank={settings.lora_rank}: set it to {saved.r}, or leave it 0."
        )
    if beyond := [name for name in BEYOND if getattr(saved, name) != getattr(plain, name)]:
        raise ValueError(
            f"{key} was made with {', '.join(beyond)}: merge it into the model (peft's merge_and_unload), and set "
            "model.path to that."
        )
    saved.inference_mode = False
    return saved


def unfit(model: PreTrainedModel, settings: ModelConfig, problem: str) -> ConfigError:
    path, targets, excluded = settings.lora_adapter_path, settings.target_modules, settings.exclude_modules
    if path is not None:
        return ConfigError(f"model.lora_adapter_path={path} does not fit {type(model).__name__}: {problem}.")
    names = {name.removesuffix(".base_layer").rpartition(".")[2]: part for name, part in model.named_modules()}
    linear = sorted(name for name, part in names.items() if isinstance(part, nn.Linear) and name != ADAPTER)
    target = f"model.target_modules={targets}" + (f" without model.exclude_modules={excluded}" if excluded else "")
    return ConfigError(
        f"{target} does not fit {type(model).__name__} ({problem}). Take all-linear, or a list of names of its layers: "
        f"{', '.join(linear)}."
    )


@torch.no_grad()
def reset_adapters(model: PreTrainedModel) -> None:
    """Draws LoRA's matrices as peft does, so that they have no effect yet, by the global generator's seed and their
    names: the same values for any number of workers."""
    for name, weight in model.named_parameters():
        if is_lora(name):
            start, generator = torch.zeros(weight.shape), torch_generator(torch.initial_seed(), name)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(start, a=math.sqrt(5), generator=generator)
            elif ".lora_embedding_B." in name:
                nn.init.normal_(start, generator=generator)
            weight.copy_(model.parallel.part(start, weight))


@torch.no_grad()
def load_adapter(model: PreTrainedModel, settings: ModelConfig) -> None:
    """Loads LoRA's matrices from `lora_adapter_path`; raises ValueError if they do not fit."""
    from peft.utils import load_peft_weights

    path = find_path(settings.lora_adapter_path)
    try:
        saved = load_peft_weights(str(path), device="cpu")
    except (ValueError, OSError) as error:
        raise unfit(model, settings, str(error)) from error
    saved = {
        re.sub(r"(\.lora_[A-Za-z_]+)", rf"\1.{ADAPTER}", name.removeprefix("base_model.model.")): value
        for name, value in saved.items()
    }
    matrices = {name: weight for name, weight in model.named_parameters() if is_lora(name)}
    if lonely := sorted(matrices.keys() ^ saved.keys()):
        raise unfit(model, settings, f"only one of the two has {lonely[0]}")
    for name, weight in matrices.items():
        if weight.shape != saved[name].shape:
            raise unfit(model, settings, f"{name} is {list(saved[name].shape)}, and would be {list(weight.shape)}")
        weight.copy_(model.parallel.part(saved[name], weight))


@contextmanager
def without_lora(model: PreTrainedModel) -> Iterator[None]:
    """Makes `model` compute, within the block, as it did before LoRA's matrices were added."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


@torch.no_grad()
def plain_weights(model: PreTrainedModel, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yields name and value of every weight of the plain model that computes the same (not `merged`: of the frozen
    one): LoRA's matrices are added one at a time. Tied weights come under each of their names; of several workers each
    yields its parts, and all go through them."""
    added: dict[int, list[Any]] = {}  # LoRA's layers, by the id of the weight that they add to
    for layer, weight in lora_layers(model).values():
        added.setdefault(id(weight), []).append(layer)
    for name, value in model.state_dict(keep_vars=True).items():
        layers = added.pop(id(value), ())
        for layer in layers if merged else ():
            value = value + product_of(layer, value, model.parallel)
        if not is_lora(name):
            yield name.replace(".base_layer", ""), value.detach()
    assert not added, f"{len(added)} of LoRA's layers add to no weight that has a name"


def product_of(layer: Any, weight: Tensor, parallel: Any) -> Tensor:
    """Computes what one of LoRA's layers adds to the `weight` beside it, the same part of it. By whole matrices, which
    are small: of shards DTensor would compute other parts, and of experts none."""
    matrices = {
        f"layer.{name}": parallel.full(matrix) for name, matrix in layer.named_parameters() if name.startswith("lora_")
    }
    return parallel.part(functional_call(Product(layer), matrices), weight)


class Product(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> Tensor:
        return self.layer.get_delta_weight(ADAPTER)


def lora_layers(model: PreTrainedModel) -> dict[str, tuple[Any, nn.Parameter]]:
    """Maps the names of LoRA's layers to (layer, the weight that it adds to); empty without LoRA."""
    if not has_adapter(model):
        return {}
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper  # of experts that are one tensor

    layers = {name: part for name, part in model.named_modules() if isinstance(part, LoraLayer)}
    return {
        name: (part, part.get_param() if isinstance(part, ParamWrapper) else part.get_base_layer().weight)
        for name, part in layers.items()
    }


def check_merges(model: PreTrainedModel, log_probs: Callable[[PreTrainedModel], Tensor], limit: float) -> None:
    """Checks that `plain_weights` compute the same as LoRA's matrices, with random numbers in them, and restores all.
    Of layers that differ only in the number of their decoder layer, the first is tried.

    Args:
        log_probs: scores a batch by the model as it is.
        limit: the largest difference of log-probs, in nats.

    Raises:
        ValueError: they do not; names layers and keys.
    """
    kinds: dict[str, Any] = {}
    for name, pair in lora_layers(model).items():
        kinds.setdefault(re.sub(r"\.\d+\.", ".", name, count=1), pair)
    if not kinds or merge_distance(model, kinds, log_probs) < limit:
        return
    alone = {name: merge_distance(model, {name: pair}, log_probs) for name, pair in kinds.items()}
    if wrong := {name.rpartition(".")[2]: distance for name, distance in alone.items() if not distance < limit}:
        names = ",".join(sorted(wrong))
        raise ValueError(
            f"LoRA's matrices beside {names} of {type(model).__name__} cannot be merged: log-probs then differ by "
            f"{max(wrong.values()):.1g}. Leave them out (model.exclude_modules=[{names}])."
        )


@torch.no_grad()
def merge_distance(
    model: PreTrainedModel, layers: dict[str, tuple[Any, nn.Parameter]], log_probs: Callable[[PreTrainedModel], Tensor]
) -> float:
    """Returns how far the log-probs of these LoRA layers, with random matrices, are from those of merged weights."""
    matrices, mode = {name: matrix for name, matrix, _ in matrices_of(layers)}, model.training
    saved = [(tensor, tensor.clone()) for tensor in (*matrices.values(), *(weight for _, weight in layers.values()))]
    try:
        for name, matrix in matrices.items():
            drawn = torch.randn(matrix.shape, generator=torch_generator(0, name)) * matrix.shape[-1] ** -0.5
            matrix.copy_(model.parallel.part(drawn, matrix))
        added = log_probs(model)
        for layer, weight in layers.values():
            weight.copy_(weight + product_of(layer, weight, model.parallel))
        for matrix in matrices.values():
            matrix.zero_()
        return largest((added - log_probs(model)).abs().max().item())
    finally:
        model.parallel.reshard(model)
        for tensor, value in saved:
            tensor.copy_(value)
        model.train(mode)


def matrices_of(layers: dict[str, tuple[Any, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter, float]]:
    """Yields name and value of the matrices in these of `lora_layers`, and the factor of each: for the second of a pair
    LoRA's scale."""
    for name, (layer, _) in layers.items():
        for suffix, matrix in layer.named_parameters():
            if suffix.startswith("lora_"):  # not those of a layer within
                yield f"{name}.{suffix}", matrix, layer.scaling[ADAPTER] if f"_B.{ADAPTER}" in suffix else 1.0


def largest_rank(model: PreTrainedModel) -> int:
    """Returns the rank of LoRA's matrices in `model`; the largest, if ranks differ."""
    settings = model.peft_config[ADAPTER]
    return max(settings.r, *settings.rank_pattern.values(), 0)


def is_lora(name: str) -> bool:
    """Returns whether a weight of this name is one of LoRA's matrices."""
    return ".lora_" in name


def adapter_weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yields name and value of LoRA's matrices, as peft's files have them. With several workers, all have to iterate
    over them."""
    for name, value in model.state_dict().items():
        if is_lora(name):
            yield saved_name(name), model.parallel.full(value)


def saved_name(name: str) -> str:
    """Returns the name that one of LoRA's matrices has in peft's files."""
    return f"base_model.model.{name.replace(f'.{ADAPTER}', '')}"


def save_adapter(model: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> None:
    """Writes `weights`, from `adapter_weights`, with the settings of LoRA in `model`, for peft: for use with the model,
    whose path works from any folder."""
    settings = copy(model.peft_config[ADAPTER])
    base = find_path(settings.base_model_name_or_path or "")
    if settings.base_model_name_or_path and base.is_dir():  # else it is a hub's name
        settings.base_model_name_or_path = str(base.resolve())
    settings.inference_mode = True
    settings.save_pretrained(folder)
    save_tensors({name: value.contiguous() for name, value in weights.items()}, folder / "adapter_model.safetensors")


def save_pretrained(model: PreTrainedModel, adapter: dict[str, Tensor], folder: Path) -> None:
    """Writes the configs of `folder`/huggingface and, of a model with LoRA, `adapter`, its `adapter_weights`, into
    `folder`/lora_adapter, for peft."""
    if has_adapter(model):
        save_adapter(model, adapter, folder / "lora_adapter")
    with without_adapter(model):
        model.save_pretrained(folder / "huggingface", state_dict={})


class Lora(NoAdapter):
    """The hook `adapter`: LoRA's matrices alone are trained."""

    name = "LoRA"
    hint = " Or LoRA's matrices do not fit beside some layer, like a router: name it in model.exclude_modules."
    check_settings = staticmethod(check_settings)
    off = staticmethod(without_lora)
    check = staticmethod(check_merges)
    weights = staticmethod(plain_weights)
    adapter_weights = staticmethod(adapter_weights)
    is_adapter_weight = staticmethod(is_lora)
    saved_name = staticmethod(saved_name)
    save = staticmethod(save_pretrained)
    save_alone = staticmethod(save_adapter)
    largest_rank = staticmethod(largest_rank)

    def is_sent_alone(self, rollout: RolloutConfig) -> bool:
        return rollout.load_lora == "adapter"

    def add(self, model: PreTrainedModel) -> None:
        add_lora(model, self.settings)

    def start(self, model: PreTrainedModel) -> None:
        load_adapter(model, self.settings) if self.settings.lora_adapter_path else reset_adapters(model)

    def scales(self, model: PreTrainedModel) -> dict[str, float]:
        return {name: scale for name, _, scale in matrices_of(lora_layers(model)) if scale != 1}

    def plain_name(self, name: str) -> str:
        return name.replace(".base_layer.", ".")
