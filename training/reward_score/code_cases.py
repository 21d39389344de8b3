"""Helpers of the rules for code: the program in a response, test cases, and calls of a function by lines of JSON."""

import json
import re
from dataclasses import dataclass
from typing import Any

FENCE = "```"


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

    def run_of(self, program: str, place: int) -> tuple[str, str]:
        """Returns the program of the case at `place`, and its standard input."""
        if self.asserts:
            program = f"{program}\n\n{self.asserts[place]}"
        given = self.inputs[place]
        lines = given if isinstance(given, str) else "\n".join(map(json.dumps, given) if self.function else given)
        return program, lines


def parse_test_cases(given: str | dict[str, Any]) -> TestCases:
    """The cases of a row: {inputs, outputs[, fn_name]}, or {assert_case[, inputs, outputs]}, or JSON of one.

    Raises:
        ValueError: it is none of these.
    """
    cases = json.loads(given) if isinstance(given, str) else given
    if not isinstance(cases, dict) or not ("assert_case" in cases or {"inputs", "outputs"} <= cases.keys()):
        raise ValueError("test cases are a dict with inputs and outputs, each a list, or with assert_case.")
    asserts = tuple(cases.get("assert_case") or ())
    inputs, outputs = cases.get("inputs"), cases.get("outputs")
    inputs = [""] * len(asserts) if inputs is None else list(inputs)
    outputs = [None] * len(asserts) if outputs is None else list(outputs)
    if len(inputs) != len(outputs) or (asserts and len(asserts) != len(inputs)):
        raise ValueError(f"test cases have {len(inputs)} inputs and {len(outputs)} outputs: one each.")
    return TestCases(inputs, outputs, cases.get("fn_name"), asserts)


def python_block(text: str) -> str | None:
    """The content of the last fence opened with "python", to its end or the text's; None: there is no such fence."""
    _, opened, after = text.rpartition(f"{FENCE}python")
    return after.split(FENCE)[0] if opened else None


def first_block(text: str) -> str | None:
    """The content of the first fence, without the name of a language; None: there is none."""
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


def calling(code: str, function: str, always_json: bool) -> str:
    """`code`, and after it a call of `function` that prints what it returns: as JSON, or a number or text as it is."""
    if not function.isidentifier():
        raise ValueError(f"fn_name {function!r} of the test cases is no name of a function.")
    return code + CALL.format(name=function, always=always_json)
