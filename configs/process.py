"""The process: how many cores it may use, and environment variables that have to be set before torch is loaded.

A thread that waits for work spins a while before it sleeps. A small model has work for it every few microseconds, and
waking it takes longer: without spinning it generates at 0.6 of the speed (1 M parameters, 2 cores). Spinning for
milliseconds, as libgomp does if not told otherwise, makes it up to 5 times slower beside one other busy process. Some
tens of microseconds are nearly the best of both. A value of the user's own stays.
"""

import os
import sys

VARIABLES = {
    "OMP_WAIT_POLICY": "PASSIVE",  # for other OpenMP runtimes
    "GOMP_SPINCOUNT": "4000",  # libgomp's, which comes with torch on Linux; it goes before the policy
    "THP_MEM_ALLOC_ENABLE": "1",  # torch asks for large pages: 512 times fewer of them to bring
    "TOKENIZERS_PARALLELISM": "false",
}


def available_cores() -> int:
    """Cores this process may use: what a container or taskset leaves of the machine's."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def set_environment() -> None:
    """Sets the variables that the user has not set. For commands, whose process it is, before they load torch."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
