"""Saves and loads a model's part of a checkpoint: weights, AdamW's moments, its process's random generators, and a
folder for from_pretrained. Any number and layout of workers can read it."""

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.optim import Optimizer
from transformers import PreTrainedModel

from configs.errors import ConfigError
from data.seeding import rng_state, set_rng_state
from training.checkpoint import SUMS_FILE, check_sums, read_part
from training.model_shards import MODEL, MOMENTS, Shards, distinct_tensors, save_shards, write_pretrained
from workers.collectives import group_size, new_group, rank
from workers.deadlines import beat

GENERATORS = "extra_state"
IN_MEMORY = StagingOptions(*[False] * 4)  # a plain copy


class ModelCheckpoint:
    """Saves and loads a model in training.

    Args:
        module: the model, of which each rank may have a part.
        optimizer: steps its weights.
        weights: yields the name and full value of every weight as from_pretrained has it; all ranks iterate it.
    """

    def __init__(
        self, module: PreTrainedModel, optimizer: Optimizer, weights: Callable[[], Iterator[tuple[str, Tensor]]]
    ) -> None:
        self.module, self.optimizer, self.weights = module, optimizer, weights
        self.pending: Future | None = None  # what is being written in the background
        self.thread = ThreadPoolExecutor(1, "checkpoint")
        self.group: dist.ProcessGroup | None = None  # of all ranks, for saving in the background

    def save(self, folder: Path, contents: Sequence[str], background: bool) -> None:
        """Writes the parts named in `contents` into `folder`: model/, optim/, a file of generators per rank, and the
        weights of huggingface/, whose configs are always written. In the background: returns once all is copied;
        `is_saved` says when the copies are written.

        Raises:
            WRITE_ERRORS: the disk is full or unwritable; no rank is left waiting.
            ConfigError: this rank does not see the folder that the run has made.
        """
        if group_size() > 1 and not (folder.is_dir() or folder.parent.is_dir()):
            raise ConfigError(
                f"{folder.parent} is not there on {socket.gethostname()}: trainer.default_local_dir has to be on a "
                "disk that all machines share, as each worker writes its shards"
            )
        if self.pending:
            wait([self.pending])  # another rank may have given up that checkpoint
            self.pending = None
        parts = {}
        if "model" in contents:
            parts[MODEL] = weights_of(self.module)
        if "optimizer" in contents:
            parts[MOMENTS] = moments_of(self.module, self.optimizer)
        adapter = dict(self.module.adapter.adapter_weights(self.module))
        exported = self._exported() if "hf_model" in contents else iter(())
        if background and contents:
            if group_size() > 1 and self.group is None:
                self.group = new_group()
            stager = DefaultStager(IN_MEMORY)
            copies, weights = stager.stage(parts), [(name, weight.to("cpu", copy=True)) for name, weight in exported]
            stager.close()
            self.pending = self.thread.submit(write, folder, copies, iter(weights), self.group)
        else:
            write(folder, parts, exported)
        if rank() == 0:
            self.module.adapter.save(self.module, adapter, folder)
        if "extra" in contents:
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(rng_state(), folder / f"{GENERATORS}_world_size_{group_size()}_rank_{rank()}.pt")

    def is_saved(self) -> bool:
        """Says whether the last `save` is written; raises its error."""
        if self.pending is None:
            return True
        if not self.pending.done():
            return False
        pending, self.pending = self.pending, None
        pending.result()
        return True

    def _exported(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights of huggingface/, tied ones once, on rank 0; other ranks only help to gather them."""
        tied = {*self.module.state_dict()} - {*distinct_tensors(self.module)}
        for name, weight in self.weights():
            if rank() == 0 and name not in tied:
                yield name, weight
            beat()

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""
        root = folder if (folder / SUMS_FILE).exists() else folder.parent  # supervised training has no folder per model
        files = sorted([*folder.glob(f"{MODEL}/*"), *folder.glob(f"{MOMENTS}/*"), *folder.glob("*.pt")])
        check_sums(root, files[rank() :: group_size()])  # each file is checked by one rank
        Shards(folder / MODEL).fill(weights_of(self.module))
        moments = Shards(folder / MOMENTS)
        self._make_moments({name.rpartition(".")[0] for name in moments.shapes})
        moments.fill(moments_of(self.module, self.optimizer))
        writers = max(1, len([*folder.glob(f"{GENERATORS}_world_size_*.pt")]))
        file = folder / f"{GENERATORS}_world_size_{writers}_rank_{rank() % writers}.pt"
        read_part(file, set_rng_state)

    def _make_moments(self, names: set[str]) -> None:
        """Has the optimiser make moments of these weights only: by a step with zero gradients and learning rate 0."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.optimizer.state.clear()
        for name, weight in self.module.named_parameters():
            weight.grad = torch.zeros_like(weight) if name in names else None
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def write(
    folder: Path,
    parts: dict[str, dict[str, Tensor]],
    exported: Iterator[tuple[str, Tensor]],
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a model's `parts`, by folder, and the weights `exported` for from_pretrained; all ranks take part."""
    for name, tensors in parts.items():
        save_shards(folder / name, tensors, group)
        beat()
    first = next(exported, None)
    if first:
        write_pretrained(folder / "huggingface", chain([first], exported))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns the `distinct_tensors` of a model without frozen weights, which the model's own folder has."""
    frozen = {name for name, weight in module.named_parameters() if not weight.requires_grad}
    return {name: value for name, value in distinct_tensors(module).items() if name not in frozen}


def moments_of(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Maps WEIGHT.MOMENT to the optimiser's state, of weights that have one."""
    weights = [(name, weight) for name, weight in module.named_parameters() if weight in optimizer.state]
    return {f"{name}.{key}": value for name, weight in weights for key, value in optimizer.state[weight].items()}
