"""Defines the hook `parallel`: how a model is spread over workers. The core's: each has it all, and sums gradients."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from configs.errors import ConfigError
from configs.extras import absence, has
from configs.import_utils import find
from configs.schema import Config, OptimConfig
from data.seqlen_balancing import fill_groups
from workers.collectives import group_size

BUCKET = 64 << 20  # numbers that are summed at once


class Replicas:
    """Has every worker hold whole models; the base of what spreads them. A model carries its own as `model.parallel`.

    Args:
        role: policy (the critic's too), ref or rm; a layout may differ by it.

    Attributes:
        lockstep: whether weights are in parts, so that all workers have to run as many forwards, and a frozen model is
            loaded and not copied.
    """

    lockstep = False

    def __init__(self, config: Config | None = None, device: Any = None, dtype: Any = None, role: str = "") -> None:
        pass

    @classmethod
    def check(cls, config: Config, workers: int) -> None:
        """Raises ConfigError where `config` cannot be spread over so many workers; before any is started."""

    def bytes_held(self, numbers: int, optim: OptimConfig | None) -> int:
        """Counts the bytes that a worker's device holds of a model of so many `numbers`: weights; of one that is
        trained by `optim`, gradients and moments, too."""
        return (4 if optim is None else 16) * numbers

    # A model is built.

    def build(
        self, read: Callable[[], PreTrainedModel], empty: Callable[[], PreTrainedModel], prepare: Callable, folder: Path
    ) -> PreTrainedModel:
        """Makes a model. `read` loads all of it, `empty` makes one whose weights are nowhere, and `prepare` changes its
        layers, which it wants before they are spread; `folder` has the weights."""
        model = read()
        prepare(model)
        return model

    def set_method(self, model: nn.Module, name: str, method: Callable[..., Any]) -> None:
        """Gives `model` a method that computes by its weights."""
        setattr(model, name, method)

    def set_gather_dtype(self, model: PreTrainedModel, problem: Callable[[], str | None], sibling: Any = None) -> None:
        """Chooses, once `model` computes, what depends on a trial of it: `problem` says what is wrong now; without a
        trial as `sibling`, a model of the same weights, has chosen."""

    # It computes.

    def on_device(self, model: PreTrainedModel) -> Callable[[], AbstractContextManager]:
        """Returns the block in which `model` computes, and its weights are read and written; blocks may nest."""
        return nullcontext

    def reshard(self, model: nn.Module) -> None:
        """Drops what a forward without a backward has left of other workers' weights."""

    def keeps_weights(self, model: nn.Module) -> bool:
        """Says whether weights that a forward has used are the same tensors in the next."""
        return True

    def full_weights(self, model: nn.Module) -> AbstractContextManager:
        """Holds all of `model` in every worker for the block, in which their numbers of forwards may differ."""
        return nullcontext()

    def without_sums(self, model: nn.Module) -> AbstractContextManager:
        """Keeps backwards within the block from summing gradients over workers."""
        return nullcontext()

    # It learns.

    def optimizer(self, weights: Iterable[nn.Parameter], optim: OptimConfig) -> Optimizer:
        """Makes AdamW by its settings."""
        settings = {"lr": optim.lr, "betas": tuple(optim.betas), "weight_decay": optim.weight_decay, "fused": True}
        return torch.optim.AdamW(weights, **settings)

    @torch.no_grad()
    def sum_gradients(self, model: nn.Module) -> None:
        """Adds up the gradients of all workers, after each has added up its own. A weight that no worker's rows have
        reached keeps none, as with one worker."""
        if group_size() == 1:
            return
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        reached = torch.tensor([weight.grad is not None for weight in weights], device=weights[0].device).int()
        dist.all_reduce(reached)
        trained = [weight for weight, count in zip(weights, reached.tolist(), strict=True) if count]
        for weight in trained:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        for _, alike in groupby([weight.grad for weight in trained], key=lambda gradient: gradient.dtype):
            for bucket in fill_groups(alike, Tensor.numel, BUCKET):
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                dist.all_reduce(flat)
                for gradient, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                    gradient.copy_(part.view_as(gradient))

    def clip(self, model: nn.Module, limit: float) -> float:
        """Scales the gradients down to the norm `limit`. Returns their norm before."""
        weights = [weight for weight in model.parameters() if weight.grad is not None]
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in weights])
        if (size := norm.item()) > limit:  # clip_grad_norm_ would multiply by 1 where it is not
            torch.nn.utils.clip_grads_with_norm_(weights, limit, norm)
        return size

    # Its weights are read.

    def full(self, tensor: Tensor) -> Tensor:
        """Returns all of a tensor of which this worker may have a part; then every worker has to ask for it."""
        return tensor

    def part(self, tensor: Tensor, like: Tensor | None) -> Tensor:
        """Returns this worker's part of a `tensor` that each has whole, cut as `like` is."""
        return tensor


def layout_of(config: Config, workers: int) -> type[Replicas]:
    """Finds the hook that actor.strategy names; one worker alone does without it, as nothing is shared out."""
    name, key = config.actor_rollout_ref.actor.strategy, "actor_rollout_ref.actor.strategy"
    if not has("parallel", name):
        if workers > 1:
            raise ConfigError(f"{key}={name}: {absence('sharding')} Set it to replicas.", key)
        name = "replicas"
    return find("parallel", name, key)
