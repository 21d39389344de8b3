"""PRIME's rule for programs: the share of test cases that they pass, in a sandbox of our own."""

import json
import math
import re
from typing import Any

from training.reward_score.code_cases import TestCases, calling, parse_test_cases, python_block
from training.sandbox import Finished, run_python

SECONDS, SECONDS_ALONE = 5.0, 10.0  # of a case among all, and of each of the first ten
FIRST = 10
FILES_MB = 16
MEMORY_MB = 1024
FAILED, NO_PROGRAM = -1, -2
MOST_SHOWN = 1000  # characters of what a case wrote, in the metadata
INTEGER = re.compile(r"[+-]?\d+")


def compute_score(
    completion: str, test_cases: str | dict[str, Any], continuous: bool = False, memory_mb: int = MEMORY_MB
) -> tuple[bool | float, list[dict[str, Any]] | None]:
    """(whether the program passes every case, what became of those that were run).

    The program is the last python block, or the whole text. With `continuous` a program that fails gets the share of
    the first ten cases that it passes. Test cases that are none: (False, None).
    """
    block = python_block(completion)
    code = completion if block is None else block
    try:
        cases = parse_test_cases(test_cases)
        program = calling(code, cases.function, always_json=True) if cases.function else code
    except ValueError:
        return False, None
    places = range(len(cases.inputs))
    first = places[: FIRST if continuous else 0]
    results = [run_case(program, cases, place, SECONDS_ALONE, memory_mb) for place in first]
    passed = sum(result["result"] is True for result in results)
    for place in places[len(first) :] if passed == len(first) else ():  # up to the first that fails
        results.append(run_case(program, cases, place, SECONDS, memory_mb))
        if results[-1]["result"] is not True:
            break
    is_right = bool(results) and len(results) == len(places) and all(result["result"] is True for result in results)
    return (passed / len(first) if first and not is_right else is_right), results


def run_case(program: str, cases: TestCases, place: int, seconds: float, memory_mb: int) -> dict[str, Any]:
    """{case, result: True, False, -1 (an error or too slow) or -2 (no program), output, error}."""
    done = run_python(*cases.run_of(program, place), seconds=seconds, memory_mb=memory_mb, files_mb=FILES_MB)
    result = judge(done, cases.outputs[place], by_value=cases.function is not None)
    error = "took too long" if done.status is None else done.errors[-MOST_SHOWN:]
    return {"case": place, "result": result, "output": done.output[:MOST_SHOWN], "error": error}


def judge(done: Finished, expected: Any, by_value: bool) -> bool | int:
    if done.status != 0:
        return NO_PROGRAM if done.is_no_program else FAILED
    if expected is None:
        return True
    if by_value:
        return same_value(done.output, expected)
    return same_output(done.output, expected if isinstance(expected, str) else "\n".join(map(str, expected)))


def same_value(output: str, expected: Any) -> bool:
    """Whether the last line of `output` is the JSON of `expected`, or of the one element that it holds."""
    lines = output.strip().splitlines()
    try:
        result = json.loads(lines[-1]) if lines else None
        wanted = json.loads(expected) if isinstance(expected, str) else expected
    except json.JSONDecodeError:
        return bool(lines) and lines[-1] == json.dumps(expected)
    return result == wanted or (isinstance(wanted, list) and len(wanted) == 1 and result == wanted[0])


def same_output(output: str, expected: str) -> bool:
    """Equal but for spaces at the ends and empty lines; or as numbers, unless all are integers; or, line by line, as
    sets of words, so that order and repetition within a line do not count."""
    if output.strip() == expected.strip():
        return True
    ours, theirs = lines_of(output), lines_of(expected)
    if ours == theirs:
        return True
    if not all(INTEGER.fullmatch(word) for line in theirs for word in line.split()) and same_numbers(ours, theirs):
        return True
    return {frozenset(line.split()) for line in ours} == {frozenset(line.split()) for line in theirs}


def lines_of(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def same_numbers(ours: list[str], theirs: list[str]) -> bool:
    """Whether both are lines of as many numbers each, within 1e-5 of theirs."""
    if [len(line.split()) for line in ours] != [len(line.split()) for line in theirs]:
        return False
    try:
        columns = ([float(word) for line in lines for word in line.split()] for lines in (ours, theirs))
        pairs = [*zip(*columns, strict=True)]
    except ValueError:
        return False
    return all(math.isfinite(a) and abs(a - b) <= 1e-8 + 1e-5 * abs(b) for a, b in pairs)
