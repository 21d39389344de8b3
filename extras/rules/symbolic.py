"""Compares two formulas by algebra: the package math-verify, in a process of its own.

Algebra may take for ever, inside C too. So the process ends itself, by a timer that nothing can catch, after SECONDS of
computing; the next question starts another.
"""

import json
import re
import resource
import signal
import subprocess
import threading
from importlib.util import find_spec

from data.concurrency import run_in_background
from extras.processes.child import Channel, Child, ProcessEnded

SECONDS = 10.0  # of computing, for one question
MEMORY_MB = 4096
LONGEST = 1000  # characters of a formula
WORDS = re.compile(r"[A-Za-z\s]*")


def symbolically_equal(answer: str, truth: str) -> bool:
    """Says whether two LaTeX formulas are equal by algebra; False for words, long ones, and what takes too long."""
    if unread(answer) != unread(truth):
        return False
    if WORDS.fullmatch(answer) or WORDS.fullmatch(truth) or max(len(answer), len(truth)) > LONGEST:
        return False
    with one_question:
        try:
            if not algebra.is_running():
                run_in_background(algebra.start())
            return json.loads(run_in_background(algebra.ask(json.dumps([answer, truth, SECONDS]).encode(), None)))
        except ProcessEnded:
            return False


def unread(formula: str) -> tuple[int, list[str]]:
    """Returns what math-verify passes over, and equal formulas share: how many primes, and the bases of numbers."""
    return formula.count("'"), re.findall(r"(?<=\d)_\{?(\w+)", formula)


def first_request() -> bytes:
    if find_spec("math_verify") is None:
        raise ModuleNotFoundError("answers are compared by algebra: pip install 'math-verify[antlr4_9_3]'.")
    return b""


def serve(channel: Channel) -> None:
    """Answers questions until there are no more, or one takes too long."""
    from math_verify import LatexExtractionConfig, parse, verify

    allowed = resource.getrlimit(resource.RLIMIT_DATA)[1]  # of whoever started this; it cannot be raised
    memory = MEMORY_MB << 20 if allowed == resource.RLIM_INFINITY else min(MEMORY_MB << 20, allowed)
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    first, _ = channel.read()
    channel.write(first, b"")
    while (question := channel.read()) is not None:
        number, body = question
        *formulas, seconds = json.loads(body)
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal, unhandled, ends the process
        answer, truth = (
            parse(f"${formula}$", extraction_config=[LatexExtractionConfig()], parsing_timeout=None)
            for formula in formulas
        )
        equal = verify(truth, answer, timeout_seconds=None) and ("%" in "".join(formulas) or are_near(answer, truth))
        signal.setitimer(signal.ITIMER_PROF, 0)
        channel.write(number, json.dumps(equal).encode())


def are_near(*readings: list) -> bool:
    """Says whether the numbers of two readings that math-verify takes for equal are: it compares six decimals, by which
    1e-19 is 1e-34, and 0."""
    from sympy import Expr, FiniteSet, Interval, N, Tuple
    from sympy.core.evalf import PrecisionExhausted

    parts = [value.args if isinstance(value, Tuple | Interval | FiniteSet) else [value] for value, *_ in readings]
    numbers = [[part for part in some if isinstance(part, Expr) and part.is_number and part.is_real] for some in parts]
    pairs = zip(*(sorted(some, key=N) for some in numbers), strict=False)
    for pair in pairs if len(numbers[0]) == len(numbers[1]) else ():
        try:
            gap, *sizes = (abs(value.evalf(30, strict=True)) for value in (pair[0] - pair[1], *pair))
        except PrecisionExhausted:  # of what is 0
            continue
        if gap > 1e-6 * max(sizes):
            return False
    return True


algebra = Child(serve, first_request, output=subprocess.DEVNULL)
one_question = threading.Lock()  # at a time: one that ends the process is to end no other
