"""Sets up the memory of a process that is ours alone."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
MAX_INT = 2**31 - 1
IS_GLIBC = platform.libc_ver()[0] == "glibc"  # other C libraries have no such settings


def start_process() -> None:
    """Keeps freed memory in the process, for the next step, which asks for the same large tensors.

    By default malloc gives each back to the kernel and has it zeroed again page by page, which took longer than the
    arithmetic on them for tensors of 100 MB (183 against 18 ms). The price: the process keeps what it needed at its
    peak, and more where sizes differ from step to step.
    """
    if IS_GLIBC:
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, MAX_INT)


def give_back_memory() -> None:
    """Gives all memory that is free in this process back to the kernel: that in which a model was loaded, before it
    went to a GPU, which `start_process` would keep for good."""
    if IS_GLIBC:
        ctypes.CDLL(None).malloc_trim(0)
