"""Weights that go from the trainer's process to an engine's on the same node, through files in shared memory.

The trainer writes (weight_transfer.py), then has vLLM's server read (vllm_weights.py): this module is loaded there too.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

BACKEND = "shared_memory_or_nccl"  # what vLLM's weight_transfer_config calls the server's way to take weights


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path) -> int:
    """Writes (name, tensor) pairs into `folder`, and says how many there were.

    Each is a file of its own: no more than one is in this process's memory beside the model, and weights that are tied
    can be written under each of their names.
    """
    count = 0
    for count, (name, tensor) in enumerate(weights, start=1):
        save_file({name: tensor.detach().cpu().contiguous()}, folder / f"{count:08}.safetensors")
    return count


def read_weights(folder: str) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) as they were written; the tensors are the files' own memory, nothing is copied.

    Raises:
        FileNotFoundError: there are none.
    """
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there are no weights in {folder}, as this process sees it")
    for file in files:
        yield from load_file(file).items()
