"""Reads and writes the tensors of a model in a checkpoint, of any number of workers, without running code.

torch.distributed.checkpoint writes `model/` and `optim/` as safetensors: each file has one worker's shards, and their
offsets in the full tensors.
"""

import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from data.seqlen_balancing import fill_groups
from training.checkpoint import FILE_ERRORS, unreadable

MODEL, MOMENTS = "model", "optim"  # folders
FILE_BYTES = 2 << 30  # of a worker's shards in one file, which is built in memory
PRETRAINED_BYTES = 5 * 10**9  # of a file for from_pretrained
SHOWN = 3  # names in an error


def save_shards(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Writes `tensors`, of which each rank of `group` may have a part. Raises WRITE_ERRORS on all ranks."""
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    groups = fill_groups(tensors.items(), lambda item: item[1].nbytes, FILE_BYTES * ranks)
    files = {name: number for number, group in enumerate(groups, start=1) for name, _ in group}
    writer = HuggingFaceStorageWriter(str(folder), files, save_distributed=True)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    with plain_errors():
        dcp.save(contiguous, storage_writer=writer, process_group=group)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Has torch.distributed.checkpoint raise the error of the first rank that failed, as it was."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is as good
        try:
            yield
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from error


class Shards:
    """The tensors that `save_shards` wrote into `folder`; `saved` has each full tensor's metadata, `shapes` its shape.

    Raises ValueError if a file is unreadable or missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.reader = folder, HuggingFaceStorageReader(str(folder))
        path = folder
        try:
            for path in sorted(folder.iterdir()):
                safe_open(path, framework="pt")  # raises if it is damaged
            path = folder
            self.saved = self.reader.read_metadata().state_dict_metadata
            for name, tensor in self.saved.items():
                if sum(prod(chunk.sizes) for chunk in tensor.chunks) != prod(tensor.size):
                    raise ValueError(f"parts of {name} are missing: not all files of its shards are present")
        except FILE_ERRORS as error:
            raise unreadable(path, error) from error
        self.shapes = {name: tensor.size for name, tensor in self.saved.items()}

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets `tensors`, of which each rank may have a part, to what the files hold; each rank reads its own."""
        try:
            check_names(self.shapes.keys(), tensors.keys(), tensors.keys())
            for name, tensor in tensors.items():
                if (saved := tuple(self.shapes[name])) != (present := tuple(tensor.shape)):
                    raise ValueError(f"{name} has shape {saved} in the checkpoint, and {present} in this run")
            with plain_errors():
                dcp.load(dict(tensors), storage_reader=self.reader, no_dist=True)
        except FILE_ERRORS as error:
            raise unreadable(self.folder, error) from error

    def read_all(self) -> dict[str, Tensor]:
        """Reads all tensors in full."""
        tensors = {name: torch.empty(saved.size, dtype=saved.properties.dtype) for name, saved in self.saved.items()}
        self.fill(tensors)
        return tensors


def distinct_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Maps names to the weights and persistent buffers of a model, as this rank has them; tied ones once."""
    names = {name for name, _ in module.named_parameters()}
    tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - names
    return {name: value for name, value in module.state_dict().items() if name not in tied}


def check_names(saved: Iterable[str], needed: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError unless all `needed` names are saved, and all that are saved are known."""
    for names, problem in (({*needed} - {*saved}, "it lacks"), ({*saved} - {*known}, "the run's model has no")):
        if names:
            rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise ValueError(f"{problem} {', '.join(sorted(names)[:SHOWN])}{rest}")


def write_pretrained(folder: Path, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Writes `weights` into files that from_pretrained reads, holding a file's or two at a time.

    `weights` is read to its end even if a file cannot be written: other ranks may wait for this one in its gathers.
    """
    part_numbers: dict[str, int] = {}
    count = total = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        in_main_memory = ((name, weight.detach().cpu().contiguous()) for name, weight in weights)
        parts = fill_groups(in_main_memory, lambda item: item[1].nbytes, PRETRAINED_BYTES)
        for count, part in enumerate(map(dict, parts), start=1):
            save_tensors(part, folder / part_name(count))
            part_numbers |= dict.fromkeys(part, count)
            total += sum(weight.nbytes for weight in part.values())
    finally:
        for _ in weights:
            pass
    for number in range(1, count + 1):
        (folder / part_name(number)).rename(folder / part_name(number, count))
    if count > 1:
        files = {name: part_name(number, count) for name, number in sorted(part_numbers.items())}
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file with the permissions of the umask."""
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, metadata={"format": "pt"})  # readable by this user alone
    path.chmod(mode)


def part_name(number: int, count: int = 0) -> str:
    """Names a file of weights as transformers does; `count` 0: it is not known yet."""
    if count == 1:
        return "model.safetensors"
    return f"model-{number:05}-of-{count:05}.safetensors"
