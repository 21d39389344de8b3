"""Sets up the process: its threads, and the memory that it keeps from step to step."""

import ctypes
import os
import platform
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
MAX_INT = 2**31 - 1
KEPT_SHARE, KEPT_BYTES = 1 / 2, 1 << 30  # of what a step needs, or so much: the larger may be kept beyond the need
SETTLING_STEPS = 3  # the first makes the optimiser's moments, and the next two find places for everything beside them
IS_GLIBC = platform.libc_ver()[0] == "glibc"  # other C libraries have no such settings


def start_process() -> None:
    """Keeps freed memory in the process.

    A step asks for the same large tensors as the one before. By default malloc gives each back to the kernel and has
    it zeroed again page by page, which took longer than the arithmetic on them for tensors of 100 MB (183 against 18
    ms, in a virtual machine). The price: the process keeps what it needed at its peak, and more (`KeptMemory`, which is
    asked after every step of any optimiser). For processes that are ours alone: all of this is the whole process's.
    """
    if IS_GLIBC:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, MAX_INT)
        register_optimizer_step_post_hook(KeptMemory())


class KeptMemory:
    """Bounds the memory that `start_process` has the process keep.

    Sizes that differ from step to step break up what is free, so that the process grows where the steps do not. When
    it has grown too far beyond what the first steps needed, all that is free goes back to the kernel, and the next
    steps say anew.
    """

    def __init__(self) -> None:
        self.needed = 0  # bytes of the process
        self.steps = 0  # since it began, or gave back
        self.optimisers: WeakSet[Optimizer] = WeakSet()

    def __call__(self, optimiser: Optimizer, *_: Any) -> None:
        self.optimisers.add(optimiser)
        self.steps += 1
        resident = resident_bytes()
        if self.steps <= SETTLING_STEPS * len(self.optimisers):
            self.needed = max(self.needed, resident)
        elif resident - self.needed > max(KEPT_SHARE * self.needed, KEPT_BYTES):
            give_back_memory()
            self.steps = 0


def give_back_memory() -> None:
    """Gives all memory that is free in this process back to the kernel: that in which a model was loaded, before it
    went to a GPU, which `start_process` would keep for good."""
    if IS_GLIBC:
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Reads the bytes of memory resident in this process, on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
