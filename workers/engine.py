"""Trains one model: its weights, precision, optimiser and schedule, and its part of a checkpoint.

Actor, critic and supervised training all stand on `TrainEngine`. It knows nothing of losses: whoever owns one hands
`update()` its value on each micro-batch, and the optimiser steps once. Of several workers each has a share of the
micro-batches, the gradients are summed over all (workers/parallel.py), and each steps its part of the weights.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from configs.schema import OptimConfig
from workers.collectives import gather
from workers.model_checkpoint import ModelCheckpoint

WORTH_BFLOAT16 = 50_000_000  # parameters; on a CPU, smaller models lose by casts what they gain by products


def learning_rate_multiplier(optim: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Makes the function from step k (from 0) to the factor on `optim.lr`; resuming needs no other state."""
    warmup = optim.lr_warmup_steps if optim.lr_warmup_steps >= 0 else int(optim.lr_warmup_steps_ratio * total_steps)
    return partial(
        scheduled_multiplier,
        kind=optim.lr_scheduler_type,
        warmup_steps=warmup,
        total_steps=total_steps,
        min_lr_ratio=optim.min_lr_ratio,
        num_cycles=optim.num_cycles,
        init_lr_ratio=optim.init_lr_ratio,
        zero_indexed_step=optim.zero_indexed_step,
    )


def scheduled_multiplier(
    step: int,
    kind: str,
    warmup_steps: int,
    total_steps: int,
    *,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    stable_ratio: float = 0.9,
    init_lr_ratio: float = 0.0,
    zero_indexed_step: bool = True,
) -> float:
    """Returns the factor of `step` (from 0): a linear warm-up from `init_lr_ratio` to 1, and then as `kind` says.

    constant: 1; linear: down to `min_lr_ratio`; cosine: down to it in half a cycle; wsd: 1 for `stable_ratio` of the
    rest, and then a cosine. Without `zero_indexed_step` each step has the factor of the one after it.
    """
    step += not zero_indexed_step
    if step < warmup_steps:
        return init_lr_ratio + (1 - init_lr_ratio) * step / warmup_steps
    if kind == "constant":
        return 1.0
    start, length = warmup_steps, total_steps - warmup_steps
    if kind == "wsd":
        stable_steps = int(length * stable_ratio)
        start, length = start + stable_steps, length - stable_steps
        if step < start or step >= total_steps:
            return 1.0 if step < start else min_lr_ratio
    progress = (step - start) / max(1, length)
    if kind == "linear":
        return 1 - (1 - min_lr_ratio) * min(1.0, progress)
    return min_lr_ratio + (1 - min_lr_ratio) * 0.5 * (1 + math.cos(2 * math.pi * num_cycles * progress))


class TrainEngine:
    """Trains a module by AdamW.

    Args:
        module: float32 weights; it carries its hooks (`with_hooks`), and is moved to `device`.
        optim: optimiser settings.
        total_steps: length of the run, in calls of a new `step` (for the schedule).
        dtype: compute precision; weights stay float32.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        optim: OptimConfig,
        total_steps: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.module = module.to(device).train()
        self.parallel, self.adapter = module.parallel, module.adapter
        self.optim = optim
        self.device = device
        self.dtype = dtype
        self.multiplier = learning_rate_multiplier(optim, total_steps)
        trained = (weight for weight in self.module.parameters() if weight.requires_grad)
        self.optimizer = self.parallel.optimizer(trained, optim)
        self.on_device = self.parallel.on_device(self.module)
        self.checkpoint = ModelCheckpoint(self.module, self.optimizer, self.weights)

    @contextmanager
    def on_device_without_adapter(self) -> Iterator[None]:
        """Has the module compute, where it works, what it did before training, by its adapter."""
        with self.on_device(), self.adapter.off(self.module):
            yield

    def autocast(self, updates: bool = False) -> AbstractContextManager:
        """Computes the block in the run's precision; `updates`: a backward follows. What it casts of the weights is
        kept for their next use, unless checkpointing or shards gathered anew leave none."""
        if self.dtype == torch.float32:
            return nullcontext()
        keeps_casts = self.parallel.keeps_weights(self.module)
        keeps_casts &= not (updates and self.module.is_gradient_checkpointing)
        return torch.autocast(self.device.type, self.dtype, cache_enabled=keeps_casts)

    def update(self, losses: Iterable[Tensor], step: int) -> dict[str, float]:
        """Takes one optimiser step on the sum of `losses`, one a micro-batch, each after the backward of the last; see
        `optimizer_step`. After a loss that is not finite, on any rank, nothing changes: {"skipped_updates": 1.0}."""
        if not all(gather(self.accumulate(losses))):
            self.optimizer.zero_grad(set_to_none=True)
            return {"skipped_updates": 1.0}
        self.parallel.sum_gradients(self.module)
        return self.optimizer_step(step)

    def accumulate(self, losses: Iterable[Tensor]) -> bool:
        """Adds up the gradients of `losses`. Returns whether all are finite, asked once so that the host waits once."""
        finite = []
        with torch.autocast(self.device.type, enabled=False):  # outermost, so that it keeps casts of weights
            for loss in losses:
                finite.append(loss.detach().isfinite())
                loss.backward()
        return not finite or bool(torch.stack(finite).all())

    def optimizer_step(self, step: int) -> dict[str, float]:
        """Clips the accumulated gradient and applies it, at the learning rate of `step` (from 0).

        A gradient that is not finite never reaches weights or moments: it is dropped and `skipped_updates` is 1.

        Returns:
            {"grad_norm": before clipping, "lr", "skipped_updates": 0.0 or 1.0}
        """
        lr = self.optim.lr * self.multiplier(step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        grad_norm = self.parallel.clip(self.module, self.optim.clip_grad)
        finite = math.isfinite(grad_norm)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": grad_norm, "lr": lr, "skipped_updates": float(not finite)}

    def weights(self, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields name and value of every weight for a rollout engine, as a checkpoint has them; tied ones under each of
        their names. Of several workers all have to go through them. `merged`: with LoRA's matrices added."""
        weights = self.adapter.weights(self.module, merged)  # one at a time: added ones are copies
        if self.converts:
            weights = revert_weight_conversion(self.module, dict(weights)).items()
        for name, weight in weights:
            yield name, self.parallel.full(weight)

    @cached_property
    def converts(self) -> bool:
        """Says whether a checkpoint has other weights than the module, such as those of experts one by one."""
        weights = empty_weights(self.module)
        saved = revert_weight_conversion(self.module, weights)
        return any(saved.get(name) is not weight for name, weight in weights.items())

    def save(self, folder: Path, contents: Sequence[str], background: bool = False) -> None:
        """Saves as `ModelCheckpoint.save`; the caller saves the tokenizer."""
        with self.on_device():
            self.checkpoint.save(folder, contents, background)

    def load(self, folder: Path) -> None:
        """Loads as `ModelCheckpoint.load`."""
        with self.on_device():  # moments go where the weights are
            self.checkpoint.load(folder)


def empty_weights(module: PreTrainedModel) -> dict[str, Tensor]:
    """Maps the names of the plain model's weights to tensors of their shapes that hold no numbers."""
    return {
        name: torch.empty(weight.shape, device="meta") for name, weight in module.adapter.weights(module, merged=False)
    }


class TrainedModel:
    """Base of what trains by an `engine`, which saves and loads the model's part of a checkpoint."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        self.save, self.is_saved, self.load = engine.save, engine.checkpoint.is_saved, engine.load


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Chooses the compute precision; auto is bfloat16 where the GPU multiplies it, and float32 on all CPUs."""
    if name == "auto":
        on_gpu = device.type == "cuda" and gpu_has_bfloat16()
        return torch.bfloat16 if on_gpu else torch.float32
    return getattr(torch, name)


def gpu_has_bfloat16() -> bool:
    return torch.cuda.is_bf16_supported(including_emulation=False)


def precision_notice(name: str, device: torch.device, parameters: int) -> str | None:
    """Says where `fsdp_config.dtype=name` computes a model of so many `parameters` slower than this machine could."""
    key = "actor_rollout_ref.actor.fsdp_config.dtype"
    if device.type == "cuda":
        if name == "float32" or gpu_has_bfloat16():
            return None
        card = f"{torch.cuda.get_device_name(device)} has no bfloat16"
        if name == "auto":
            return f"{card}: {key}=auto computes in float32, in twice the memory."
        return f"{card}: {key}=bfloat16 is emulated, and vLLM refuses it. Set it to auto."
    multiplies = any(torch.cpu.get_capabilities().get(feature) for feature in ("amx_bf16", "avx512_bf16"))
    if name != "auto" or not multiplies or parameters < WORTH_BFLOAT16:
        return None
    return f"{key}=bfloat16 takes two thirds of the time on this CPU; auto is float32 on all, so that they agree."
