"""Loads the policy and the critic from Hugging Face folders."""

import copy
import logging
import os
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from configs.checks import plural
from configs.errors import ConfigError, first_line, notice
from configs.paths import find_path
from configs.schema import ModelConfig, PretrainedModelConfig
from data.pretrained import load_model_config, vision_of
from data.seeding import derive_seed
from workers.adapter import NoAdapter, adapter_of
from workers.collectives import common_notice
from workers.forward_check import score_equally
from workers.parallel import Replicas
from workers.scoring_model import scoring_model, with_hooks

CPU = torch.device("cpu")
Report = dict[str, Collection[str]]  # transformers' of a load: names by missing_keys, unexpected_keys
MODEL_KEY = "actor_rollout_ref.model"
WHOLE = Replicas()
LONGEST = 1 << 20  # tokens, the default: no sequence of any run is longer

transformers_logging.disable_progress_bar()


def without_load_report(record: logging.LogRecord) -> bool:
    """Keeps `record` unless it is transformers' table of weights that a folder lacks or has beside, which
    `report_weights` puts in a line. Where loading fails, the error refers to the table, and it is shown."""
    text = record.getMessage()
    return "LOAD REPORT" not in text or any(word in text for word in ("MISMATCH", "CONVERSION"))


logging.getLogger("transformers.modeling_utils").addFilter(without_load_report)


def training_device(n_gpus: int | None) -> torch.device:
    """Chooses the GPU if there is one and it is not declined with 0, else the CPU."""
    return torch.device("cuda" if n_gpus != 0 and torch.cuda.is_available() else "cpu")


def gpu_trouble(devices: Path = Path("/dev")) -> str | None:
    """Says why the GPU of this machine is not used: a Mac's, or one whose driver is listed in `devices`, or is in the
    path, and which torch cannot use; None: torch finds one, or there is none, or CUDA_VISIBLE_DEVICES hides it."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or torch.cuda.is_available():
        return None
    if torch.backends.mps.is_available():
        return "A Mac's GPU (mps) is not used: nothing was tried on one."
    command = shutil.which("nvidia-smi") if torch.version.cuda is None else None  # WSL lists no device
    present = sorted(map(str, devices.glob("nvidia[0-9]*"))) or [command]
    if present == [None]:
        return None
    gpu = f"NVIDIA's driver is here ({present[0]}), but torch {torch.__version__}"
    if torch.version.cuda is None:
        return f"{gpu} is a build without CUDA: install one with it (https://pytorch.org/get-started)."
    try:
        torch.cuda.init()
        reason = "it finds no GPU."
    except RuntimeError as error:
        reason = first_line(error)
    return f"{gpu} cannot use it: {reason} It needs a driver for CUDA {torch.version.cuda}, or install an older torch."


def rocm_notice() -> str | None:
    """Says that the GPU is AMD's, if torch uses one: all that is chosen for CUDA is chosen for it, untried."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    return (
        "The GPU is AMD's (ROCm), on which nothing was tried: the run uses it as it would NVIDIA's, and what it "
        "compiles (FlexAttention, vLLM) may fail. trainer.n_gpus_per_node=0 uses the CPU."
    )


def load_causal_lm(
    model: ModelConfig,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    longest: int = LONGEST,
    parallel: Replicas = WHOLE,
    sibling: PreTrainedModel | None = None,
    *,
    key: str = MODEL_KEY,
) -> PreTrainedModel:
    """Loads the policy at `model.path`: float32, dropout off, as `scoring_model` has it, with its adapter.

    Args:
        parallel: how it is spread over the workers.
        sibling: a model loaded from there before, whose forward is taken without another trial.
        key: the section that sets the path, for messages.
    """
    loaded = _load(AutoModelForCausalLM, model, f"{key}.path", device, parallel)
    return scoring_model(loaded, model, device, dtype, longest, sibling)


def load_value_model(
    model: ModelConfig,
    seed: int,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    longest: int = LONGEST,
    parallel: Replicas = WHOLE,
) -> PreTrainedModel:
    """Loads the model at `model.path` with a head of one output per token, whose start is derived from `seed`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "value_head"))
        loaded = _load(AutoModelForTokenClassification, model, "critic.model.path", device, parallel, num_labels=1)
    return scoring_model(loaded, model, device, dtype, longest)


def _load(
    auto_class: type, model: ModelConfig, key: str, device: torch.device, parallel: Replicas, **overrides: Any
) -> PreTrainedModel:
    config = load_model_config(model, model.path, key)
    config.update({**no_dropout(config), **model.override_config, **overrides})
    adapter = adapter_of(model) if auto_class is AutoModelForCausalLM else NoAdapter()

    def prepare(built: PreTrainedModel) -> None:
        if device.type != "cpu" if model.enable_gradient_checkpointing is None else model.enable_gradient_checkpointing:
            built.gradient_checkpointing_enable()
        adapter.add(with_hooks(built, parallel, adapter))

    loaded = load_pretrained(auto_class, model, config, report_weights, parallel, prepare)
    adapter.start(loaded)
    if vision := vision_of(config):
        loaded.vision = vision(loaded)
    if loaded.can_generate():
        loaded.generation_config = savable(loaded.generation_config, model.path)
    return loaded


def load_pretrained(
    auto_class: type,
    model: PretrainedModelConfig,
    config: PretrainedConfig,
    check: Callable[[PreTrainedModel, Report, str], None],
    parallel: Replicas,
    prepare: Callable[[PreTrainedModel], None] = lambda built: None,
) -> PreTrainedModel:
    """Loads what `auto_class` makes of the folder `model.path`, in float32 and in eval mode. `check` is called with the
    model where it was read whole, with transformers' report and the path; `prepare` changes layers before they are
    spread."""
    folder, trust = find_path(model.path), model.trust_remote_code

    def read() -> PreTrainedModel:
        try:
            loaded, report = auto_class.from_pretrained(
                str(folder), config=config, dtype=torch.float32, trust_remote_code=trust, output_loading_info=True
            )
        except (OSError, SafetensorError) as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(
                f"model.path={model.path}: its weights cannot be read ({problem}). Download the model again."
            ) from error
        check(loaded, report, model.path)
        return loaded

    return parallel.build(read, partial(empty_model, auto_class, config, folder, trust), prepare, folder)


def empty_model(auto_class: type, config: PretrainedConfig, folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    """Makes what from_pretrained returns, but for its weights, which are nowhere."""
    from accelerate import init_empty_weights  # takes a second, and only needed here

    with init_empty_weights(include_buffers=False):
        model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    model.tie_weights()  # again, as tied weights were moved apart
    model.name_or_path = str(folder)
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(str(folder))
    return model.eval()


def frozen_copy(module: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Copies a policy for scoring alone: `plain_matrices` in the compute `dtype`, to which autocast would cast them
    at every use; where that changes a score, as it is, and a notice says so."""
    if dtype == torch.float32:
        return copy.deepcopy(module)
    cast = {id(matrix): nn.Parameter(matrix.detach().to(dtype), False) for matrix in plain_matrices(module)}
    copied = copy.deepcopy(module, cast)
    if score_equally([module, copied], dtype):
        return copied
    notice(f"{type(module).__name__} scores otherwise by weights in {dtype}: the reference keeps float32.")
    return copy.deepcopy(module)


def plain_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Lists the weights that only linear layers multiply by: no embedding, which is read in float32, nor a head that is
    one."""
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    linear = (part.weight for part in module.modules() if isinstance(part, nn.Linear))
    return [weight for weight in linear if id(weight) not in embeddings]


def report_weights(model: PreTrainedModel, report: Report, path: str) -> None:
    """Prints a notice of weights that `path` lacks, or has and `model` does not; a critic's head is its own and new."""
    is_critic = model.get_output_embeddings() is None
    prefix = f"{model.base_model_prefix}." if is_critic else ""
    for kind, template in (
        ("missing_keys", "lacks {} of {}, at random now"),
        ("unexpected_keys", "has {} that {} has no place for"),
    ):
        names = sorted(name for name in report[kind] if name.startswith(prefix))
        if names:
            listed = ", ".join(names[:3]) + ", …" * (len(names) > 3)
            weights = template.format(plural(len(names), "weight"), type(model).__name__)
            notice(f"{path} {weights}: {listed}.")


def savable(generation: GenerationConfig, path: str) -> GenerationConfig:
    """Returns `generation`, or, where it has settings of sampling but does not sample, a copy that does.

    transformers loads the one and refuses to save it. What else it refuses is left as it is.
    """
    sampling = copy.deepcopy(generation)
    sampling.do_sample = True
    if is_savable(generation) or not is_savable(sampling):
        return generation
    common_notice(f"{path}: its generation_config has settings of sampling without do_sample=true; checkpoints set it.")
    return sampling


def is_savable(generation: GenerationConfig) -> bool:
    try:
        generation.validate(strict=True)
    except ValueError:
        return False
    return True


def no_dropout(config: PretrainedConfig) -> dict[str, float]:
    """Sets every dropout rate of a config to 0: dropout would make the ratio of the first update differ from 1."""
    rates = {name: 0.0 for name in config.to_dict() if name.endswith(("dropout", "drop", "dropout_prob"))}
    return {"classifier_dropout": 0.0, **rates}
