"""Whether two formulas are equal by algebra: the package math-verify, in a process of its own.

Algebra may take for ever, inside C too. So the process ends itself, by a timer that nothing can catch, once a question
has taken SECONDS of computing; the next question starts another. Questions and answers are lines of JSON.
"""

import atexit
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from importlib.util import find_spec

from configs.paths import ROOT

SECONDS = 10.0  # of computing, for one question
MEMORY_MB = 4096
LONGEST = 1000  # characters of a formula
WORDS = re.compile(r"[A-Za-z\s]*")


def symbolically_equal(answer: str, truth: str) -> bool:
    """Whether two LaTeX formulas are equal by algebra; False for words, very long ones, and what takes too long.

    Raises:
        ModuleNotFoundError: math-verify is not installed.
    """
    if WORDS.fullmatch(answer) or WORDS.fullmatch(truth) or max(len(answer), len(truth)) > LONGEST:
        return False
    return algebra.ask(answer, truth)


class Algebra:
    """The process, started when it is first asked, and again after it has ended."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.process: subprocess.Popen | None = None
        self.owner = 0  # id of the process that started it: a fork of it has to start its own

    def ask(self, answer: str, truth: str) -> bool:
        question = json.dumps([answer, truth, SECONDS]).encode()
        with self.lock:
            if self.process is None or self.owner != os.getpid() or self.process.poll() is not None:
                self._start()
            self.process.stdin.write(question + b"\n")
            said = self.process.stdout.readline()
            if not said:  # it has ended
                self.process.wait()
            return said == b"true\n"

    def close(self) -> None:
        if self.process is not None and self.owner == os.getpid():
            self.process.kill()
            self.process.wait()

    def _start(self) -> None:
        if find_spec("math_verify") is None:
            raise ModuleNotFoundError(
                "answers of this data source are compared by algebra, which takes a package: "
                "pip install 'math-verify[antlr4_9_3]'."
            )
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "training.reward_score.symbolic"],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL},
            cwd=ROOT,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the run
        )


algebra = Algebra()
atexit.register(algebra.close)


def serve() -> None:
    """Answers questions until there are no more, or one takes too long."""
    from math_verify import LatexExtractionConfig, parse, verify

    allowed = resource.getrlimit(resource.RLIMIT_AS)[1]  # of whoever started this; it cannot be raised
    memory = MEMORY_MB << 20 if allowed == resource.RLIM_INFINITY else min(MEMORY_MB << 20, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for question in sys.stdin:
        *formulas, seconds = json.loads(question)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal, unhandled, ends the process
        answer, truth = (
            parse(f"${formula}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
            for formula in formulas
        )
        equal = verify(truth, answer, timeout_seconds=None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(equal) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
