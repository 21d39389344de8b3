"""A process in which vLLM runs: the variables that vLLM finds there, and what it changes there, put back."""

import gc
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from data.seeding import forked_rng

VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are the worker's (configs/threads.py)
    "VLLM_LOGGING_LEVEL": "ERROR",  # of its warnings, ten come at every start, and some for every tensor of a sync
    "VLLM_NO_USAGE_STATS": "1",
}
ON_CPU = {"TORCHDYNAMO_DISABLE": "1"}  # the first generation compiles nothing: 17 to 37 s less


def vllm_environment(device_type: str) -> dict[str, str]:
    """The environment, with the variables that vLLM is to find; those that the user has set stay."""
    return VARIABLES | ({} if device_type == "cuda" else ON_CPU) | os.environ


@contextmanager
def vllm_process(device_type: str) -> Iterator[None]:
    """The process as vLLM is to find it when it is imported or starts, and, after the block, as it was."""
    with process_as_it_is():
        os.environ |= vllm_environment(device_type)
        yield


@contextmanager
def process_as_it_is() -> Iterator[None]:
    """Puts back, after the block, what vLLM changes in the process when it starts and ends: the environment, the number
    of threads and the very function that sets it, the global generators, the precision of float32 products, what the
    garbage collector holds frozen, how uncaught errors and warnings are shown, and how processes are started."""
    environment, frozen = dict(os.environ), gc.get_freeze_count()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision, show_error = torch.get_float32_matmul_precision(), sys.excepthook
    start_method = multiprocessing.get_start_method(allow_none=True)
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # that there is none, on a CPU
    try:
        with forked_rng(0), unbound_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about vLLM
            yield
    finally:
        sys.excepthook = show_error
        multiprocessing.set_start_method(start_method, force=True)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        os.environ.clear()
        os.environ.update(environment)
        if not frozen:
            gc.unfreeze()
        elif not gc.get_freeze_count():
            gc.freeze()


@contextmanager
def unbound_memory() -> Iterator[None]:
    """Without vLLM's binding of this whole process's memory to one NUMA node: a trainer may need that of all."""
    torch.ops._C.init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        del torch.ops._C.init_cpu_memory_env
