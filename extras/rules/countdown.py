"""Countdown: an arithmetic expression that uses each of some numbers once and comes to a target.

The answer is what stands in the last <answer>…</answer>. scripts/countdown.py makes rows.
"""

import ast
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from extras.rules.search_r1_like_qa_em import last_answer

LONGEST = 200  # characters of an expression
OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def compute_score(
    solution_str: str, ground_truth: dict[str, Any], format_score: float = 0.1, score: float = 1.0
) -> float:
    """Returns `score` for a right answer, `format_score` for another in the tags, 0 for none.

    `ground_truth` is {"target": number, "numbers": list of whole numbers}.
    """
    answer = last_answer(solution_str)
    if answer is None:
        return 0.0
    try:
        value, used = evaluate(answer.split("=")[0])
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return format_score
    right = value == ground_truth["target"] and sorted(used) == sorted(ground_truth["numbers"])
    return score if right else format_score


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """Returns the exact value of + - * / over whole numbers, and the numbers in it; raises if it has none."""
    if len(expression) > LONGEST:
        raise ValueError(f"an expression of {len(expression)} characters")
    used: list[int] = []
    return value_of(ast.parse(expression.strip(), mode="eval").body, used), used


def value_of(node: ast.expr, used: list[int]) -> Fraction:
    match node:
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            used.append(number)
            return Fraction(number)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](value_of(left, used), value_of(right, used))
    raise ValueError(f"{type(node).__name__} is no sum, difference, product or quotient of whole numbers")
