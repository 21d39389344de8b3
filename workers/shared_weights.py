"""Weights that go from the trainer's process to an engine's on the same node, through files in shared memory.

The trainer writes (`write_weights`), then has the engine read. vLLM's server reads where it was started with
--worker-extension-cls workers.shared_weights.SharedWeights: this module is loaded there too.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor


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


class SharedWeights:
    """What vLLM adds to its workers; `/collective_rpc` calls its method in each of them."""

    def load_shared_weights(self, folder: str) -> dict[str, str]:
        """Samples from the weights in `folder` from now on. What is wrong with them is returned, under "problem"."""
        try:
            self.model_runner.reload_weights(weights_iterator=read_weights(folder), is_checkpoint_format=True)
        except (ValueError, OSError) as error:
            return {"problem": f"{type(error).__name__}: {error}"}
        return {}
