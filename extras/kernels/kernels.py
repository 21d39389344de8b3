"""Makes a CPU or a GPU faster, and does nothing else: it may be left out (`actor_rollout_ref.model.kernels=off`).

Classes are exchanged, hooks set and functions registered with transformers in this folder alone, by `prepare`.
"""

import ctypes
import platform
from collections.abc import Callable

from transformers import PreTrainedModel

from configs.schema import RolloutConfig
from extras.kernels.decode import register_row_attention
from extras.kernels.packed_attention import is_packed, packed_scores, use_packed_attention
from extras.kernels.products import use_onednn
from extras.kernels.trial import PackedTrial
from workers.forward import Forward
from workers.hf_rollout import NoCacheBatch
from workers.micro_batches import TokenScores

__all__ = ["Kernels"]
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
MAX_INT = 2**31 - 1
IS_GLIBC = platform.libc_ver()[0] == "glibc"  # other C libraries have no such settings


class Kernels(Forward):
    """The hook `forward`, with other layers, packed micro-batches, and rows that share their prompts."""

    trial = PackedTrial

    def start_process(self) -> None:
        start_process()

    def release_memory(self) -> None:
        """Gives all free memory of this process, in which models were loaded, back to the operating system."""
        if IS_GLIBC:
            ctypes.CDLL(None).malloc_trim(0)

    def prepare(self, model: PreTrainedModel) -> Callable[..., TokenScores]:
        """Makes `model`, on its device, faster: on a CPU by other layers in the place of its own, and everywhere by an
        attention that takes packed micro-batches and is SDPA for all others."""
        if model.device.type == "cpu":
            use_onednn(model)
        register_row_attention()
        use_packed_attention(model)
        return packed_scores

    def batches(self, model: PreTrainedModel, config: RolloutConfig) -> tuple[type, ...]:
        from extras.kernels.generation import LaidOutRows, SharedPrompts

        shared = (SharedPrompts,) if model.shares_prompts and is_packed(model) else ()
        return (*shared, LaidOutRows, NoCacheBatch)


def start_process() -> None:
    """Keeps freed memory in the process, for the next step, which asks for the same large tensors: malloc would have
    each zeroed again page by page (183 against 18 ms for 100 MB)."""
    if IS_GLIBC:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, MAX_INT)
