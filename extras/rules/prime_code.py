"""PRIME's rule for programs: the share of test cases that they pass, in a sandbox of our own."""

import json
import math
import numbers
import re
import secrets
import time
from dataclasses import dataclass
from itertools import chain, starmap
from textwrap import dedent
from typing import Any

from extras.sandbox.child import COMPILE_ERROR
from extras.sandbox.run import run_python

CPU_SECONDS, CPU_SECONDS_ALONE = 5.0, 10.0  # of computing, of a case among all, and of each of the first ten
BUDGET = 45.0  # seconds on the clock for all cases of a response, where the caller has no limit of its own
FIRST = 10
FILES_MB = 16
MEMORY_MB = 1024
FAILED, NO_PROGRAM, TOO_SLOW = -1, -2, -3
MOST_SHOWN = 1000  # characters of what a case wrote, in the metadata
MOST_COMPARED = 1 << 20  # characters, beyond which outputs are equal if they are the same text
INTEGER = re.compile(r"[+-]?\d+")
FENCE = "```"

# What verl's judge puts before every program: whatever is copied from a site with tasks leans on such names.
MODULES = ("string", "re", "datetime", "collections", "heapq", "bisect", "copy", "math", "random", "statistics",
           "itertools", "functools", "operator", "io", "sys", "json")  # fmt: skip
STARS = "; ".join(f"from {name} import *" for name in (*MODULES, "builtins", "typing"))
PRELUDE = f"{STARS}; import {', '.join(MODULES)}; sys.setrecursionlimit(6 * 10**5)"


@dataclass(frozen=True)
class TestCases:
    """Inputs and expected outputs, a pair for each case.

    `function`: the name of a function, or of a method of a class Solution, to call; None: the program reads standard
    input. `asserts`: for each case what is run after the program; empty: nothing.
    """

    __test__ = False  # no test of pytest's

    inputs: list[Any]
    outputs: list[Any]
    function: str | None = None
    asserts: tuple[str, ...] = ()

    @property
    def prelude(self) -> str:
        """Imports that run before the program, but not of the function that it is to define."""
        return f"{PRELUDE}; globals().pop({self.function!r}, None)"

    def stdin_of(self, index: int) -> str:
        value = self.inputs[index]
        if self.function is None or isinstance(value, str):
            return as_lines(value)
        return as_lines(map(json.dumps, [value] if isinstance(value, numbers.Real) else value))

    def checks_of(self, index: int, secret: str) -> tuple[str, ...]:
        """Returns the programs that run after the response's in a case: its assert, and one that prints `secret`, by
        which a program that left before is told from one that held."""
        return (self.asserts[index], f"print({secret!r})") if self.asserts else ()


def compute_score(
    completion: str,
    test_cases: str | dict[str, Any],
    continuous: bool = False,
    memory_mb: int = MEMORY_MB,
    budget: float = BUDGET,
    anyway: bool = False,
) -> tuple[bool | float, list[dict[str, Any]] | None]:
    """Returns whether the program passes every case, and the results of the cases that were run (None: no test cases).

    The program is the last python block, or the whole text. With `continuous` a program that fails gets the share of
    the first ten cases that it passes. Nothing is run after a case that takes too long, nor after `budget` seconds:
    what was not run is not passed. `anyway`: also where the sandbox is open.
    """
    block = python_block(completion)
    code = completion if block is None else block
    try:
        cases = parse_test_cases(test_cases)
        program = program_of(code, cases.function, always_json=True)
    except ValueError:
        return False, None
    results: list[dict[str, Any]] = []
    end, count = time.monotonic() + budget, len(cases.inputs)
    first = min(count, FIRST if continuous else 0)
    for index in range(count):
        if time.monotonic() > end:
            break
        cpu_seconds = CPU_SECONDS_ALONE if index < first else CPU_SECONDS
        results.append(run_case(program, cases, index, cpu_seconds, end, memory_mb=memory_mb, anyway=anyway))
        failed = any(result["result"] is not True for result in results)
        if results[-1]["result"] == TOO_SLOW or (failed and index + 1 >= first):
            break
    passed = sum(result["result"] is True for result in results)
    is_right = passed == count > 0
    return (min(passed, first) / first if first and not is_right else is_right), results


def run_case(
    program: str, cases: TestCases, index: int, cpu_seconds: float, end: float, **limits: Any
) -> dict[str, Any]:
    """Returns {case, result: True, False, -1 (an error), -2 (no program) or -3 (too slow), output, error}.

    It ends at `end`, of time.monotonic(); `limits` are run_python's others."""
    secret, left = secrets.token_hex(16), max(0.0, end - time.monotonic())
    stdin, checks = cases.stdin_of(index), cases.checks_of(index, secret)
    limits |= {"seconds": left, "cpu_seconds": min(cpu_seconds, left), "files_mb": FILES_MB}
    done = run_python(cases.prelude, stdin, then=(program, *checks), **limits)
    output = without_secret(done.output, secret) if checks else done.output
    result = judge(done.status, output, cases.outputs[index], by_value=cases.function is not None)
    error = "took too long" if done.status is None else done.errors[-MOST_SHOWN:]
    return {"case": index, "result": result, "output": done.output[:MOST_SHOWN], "error": error}


def without_secret(output: str, secret: str) -> str | None:
    """Returns the output before `secret`; None if it is missing, so that the last assert did not hold."""
    before, printed, _ = output.rpartition(secret)
    return before if printed else None


def judge(status: int | None, output: str | None, expected: Any, by_value: bool) -> bool | int:
    if status != 0 or output is None:
        return TOO_SLOW if status is None else NO_PROGRAM if status == COMPILE_ERROR else FAILED
    if expected is None:
        return True
    if by_value:
        return same_value(output, expected)
    return same_output(output, as_lines(expected))


def as_lines(value: Any) -> str:
    """Returns a text as it is, a number as a text, the elements of anything else a line each."""
    return str(value) if isinstance(value, str | numbers.Real) else "\n".join(map(str, value))


def same_value(output: str, expected: Any) -> bool:
    """Returns whether the last line of `output` is the JSON of `expected`, or of its only element."""
    last = output.rstrip().rpartition("\n")[2].strip()
    if not last:  # the function did not return, not even None
        return False
    try:
        result = json.loads(last)
        truth = json.loads(expected) if isinstance(expected, str) else expected
    except (ValueError, RecursionError):
        return last == json.dumps(expected)
    return result == truth or (isinstance(truth, list) and len(truth) == 1 and result == truth[0])


def same_output(output: str, expected: str) -> bool:
    """Compares the words of each line, without empty lines; if one of the expected is no integer, numbers as numbers.
    Long texts: without outer spaces only."""
    if output.strip() == expected.strip():
        return True
    if max(len(output), len(expected)) > MOST_COMPARED:
        return False
    lines, expected_lines = words_of_lines(output), words_of_lines(expected)
    if [*map(len, lines)] != [*map(len, expected_lines)]:
        return False
    pairs = [*zip(chain(*lines), chain(*expected_lines), strict=True)]
    if all(INTEGER.fullmatch(word) for _, word in pairs):
        return lines == expected_lines
    return all(starmap(same_number, pairs))


def words_of_lines(text: str) -> list[list[str]]:
    return [words for line in text.splitlines() if (words := line.split())]


def same_number(word: str, expected: str) -> bool:
    """Says whether two words are the same, or numbers within 1e-5 of which one at least is no integer."""
    if word == expected or (INTEGER.fullmatch(word) and INTEGER.fullmatch(expected)):
        return word == expected
    try:
        return math.isclose(float(word), float(expected), rel_tol=1e-5, abs_tol=1e-8)
    except ValueError:
        return False


def parse_test_cases(value: str | dict[str, Any]) -> TestCases:
    """Reads the cases of a row: {inputs, outputs[, fn_name]}, or {assert_case[, inputs, outputs]}, or JSON of one.

    Raises ValueError for anything else."""
    cases = json.loads(value) if isinstance(value, str) else value
    if not isinstance(cases, dict) or not ("assert_case" in cases or {"inputs", "outputs"} <= cases.keys()):
        raise ValueError("test cases are a dict with inputs and outputs, each a list, or with assert_case.")
    function, inputs, outputs = (cases.get(name) for name in ("fn_name", "inputs", "outputs"))
    try:
        asserts = tuple(cases.get("assert_case") or ())
        inputs = [""] * len(asserts) if inputs is None else list(inputs)
        outputs = [None] * len(asserts) if outputs is None else list(outputs)
    except TypeError as error:
        raise ValueError(f"inputs, outputs and assert_case of test cases are lists: {error}.") from error
    if function:
        outputs = ["null" if output is None else output for output in outputs]
    if len(inputs) != len(outputs) or (asserts and len(asserts) != len(inputs)):
        raise ValueError(f"test cases have {len(inputs)} inputs and {len(outputs)} outputs: one each.")
    return TestCases(inputs, outputs, function, asserts)


def python_block(text: str) -> str | None:
    """Returns the content of the last fence opened with "python", to its end or the text's; None: there is none."""
    _, opened, after = text.rpartition(f"{FENCE}python")
    return after.split(FENCE)[0] if opened else None


def first_block(text: str) -> str | None:
    """Returns the content of the first fence, without the name of a language; None: there is none."""
    _, opened, after = text.partition(FENCE)
    if not opened:
        return None
    first, newline, rest = after.split(FENCE)[0].partition("\n")
    return rest if newline and re.fullmatch("[A-Za-z]*", first.strip()) else first + newline + rest


# The call of a function of the program above it: an argument a line of standard input, its result the last line.
CALL = """

import json as _json, sys as _sys
_arguments = [_json.loads(line) for line in _sys.stdin.read().splitlines() if line.strip()]
_function = Solution().{name} if "Solution" in globals() else {name}
_result = _function(*_arguments)
_is_json = {always} or _result is None or isinstance(_result, (bool, list, tuple, dict))
print(_json.dumps(_result) if _is_json else _result)
"""


def program_of(code: str, function: str | None, always_json: bool) -> str:
    """Returns `code`, without the indent of a fence in a list, and with a call of `function`, if there is one, that
    prints the result: as JSON, or a number or text as it is."""
    code = dedent(code) if code.lstrip("\r\n")[:1] in (" ", "\t") else code
    if not function:
        return code
    if not str(function).isidentifier():
        raise ValueError(f"fn_name {function!r} of the test cases is no name of a function.")
    return code + CALL.format(name=function, always=always_json)
