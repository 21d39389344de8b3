"""The process: environment variables that have to be set before torch is loaded, and how it ends when it is stopped.

A thread that waits for work spins a while before it sleeps. A small model has work for it every few microseconds, and
waking it takes longer: without spinning it generates at 0.6 of the speed (1 M parameters, 2 cores). Spinning for
milliseconds, as libgomp does if not told otherwise, makes it up to 5 times slower beside one other busy process. Some
tens of microseconds are nearly the best of both. A value of the user's own stays.
"""

import atexit
import os
import signal
import sys
from types import TracebackType

VARIABLES = {
    "OMP_WAIT_POLICY": "PASSIVE",  # for other OpenMP runtimes
    "GOMP_SPINCOUNT": "4000",  # libgomp's, which comes with torch on Linux; it goes before the policy
    "THP_MEM_ALLOC_ENABLE": "1",  # torch asks for large pages: 512 times fewer of them to bring
    "TOKENIZERS_PARALLELISM": "false",
}
STOPPED = b"\nstopped by Ctrl-C; once more kills the process. HYDRA_FULL_ERROR=1 shows where it was.\n"


def prepare_process() -> None:
    """Prepares the process of a command, before its slow imports: Ctrl-C, and the variables that torch reads."""
    end_on_interrupt()
    set_environment()


def set_environment() -> None:
    """Sets the variables that the user has not set. For commands, whose process it is, before they load torch."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


def shows_tracebacks() -> bool:
    """Whether a command ends with the traceback of what ended it: Hydra's switch, HYDRA_FULL_ERROR=1."""
    return os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")


def end_on_interrupt() -> None:
    """Has Ctrl-C end this process with one line, said at once. For commands, before their slow imports.

    Whatever is open is closed first, unless there is a second Ctrl-C. The process then ends by the signal itself, so
    that a shell's loop ends too.
    """
    if shows_tracebacks() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return  # the second: a shell has it ignored, in the background
    print_traceback = sys.excepthook

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.write(2, STOPPED)  # print may be what it interrupts
        raise KeyboardInterrupt

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            print_traceback(kind, error, trace)

    def end() -> None:
        # Interrupted: Python's own way to end by the signal is lost where C runs Python.
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    sys.excepthook = hook
    atexit.register(end)  # before all others, so that it is called after them
