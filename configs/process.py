"""Sets the environment variables that torch reads when it is loaded, and ends a command at Ctrl-C with one line.

A thread that waits for work spins for a while before it sleeps. A small model has work for it every few microseconds,
less than waking it takes: without spinning it generates at 0.6 of the speed (1 M parameters, 2 cores). Spinning for
milliseconds, libgomp's default, makes it up to 5 times slower beside one other busy process. Some tens of microseconds
are nearly as good in both cases. Variables that the user has set are kept.
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
    """Prepares the process of a command before its slow imports: Ctrl-C, and the variables that torch reads."""
    end_on_interrupt()
    set_environment()


def set_environment() -> None:
    """Sets the variables that the user has not set; for commands, before they load torch."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)


def shows_tracebacks() -> bool:
    """Whether a command that fails shows its traceback: Hydra's switch, HYDRA_FULL_ERROR=1."""
    return os.environ.get("HYDRA_FULL_ERROR", "0") not in ("", "0")


def end_on_interrupt() -> None:
    """Makes Ctrl-C end this process with one line, printed at once; for commands, before their slow imports.

    Open files and processes are closed first, unless there is a second Ctrl-C. The process then ends by the signal
    itself, so that a shell's loop ends too.
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
