"""GSM8K's rule: the number after #### is the reference's, letter by letter (reward.custom_reward_function.path)."""

import re

from extras.rules.math_reward import as_text

LOOKED_AT = 300  # characters at the end of a response
STRICT = re.compile(r"#### (-?[\d.,]+)")
NUMBER = re.compile(r"-?[\d.,]+")


def compute_score(
    solution_str: str, ground_truth: str | float, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Returns `score` if the answer is `ground_truth`, `format_score` if it is another, 0 if there is none.

    Answers are compared as texts, as in verl: "18.0" is not "18", and a full stop after the number is part of it.
    `method`: strict (the last number after "#### ") or flexible (the last number at all).
    """
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    return score if answer == as_text(ground_truth) else format_score


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Returns the answer at the end of a response, without commas if `method` is strict; None: there is none."""
    text = solution_str[-LOOKED_AT:]
    if method == "strict":
        numbers = STRICT.findall(text)
        return numbers[-1].replace(",", "") if numbers else None
    if method == "flexible":
        numbers = NUMBER.findall(text)
        return next((number for number in reversed(numbers) if number != "."), numbers[0] if numbers else None)
    raise ValueError(f"method={method!r} of the GSM8K reward must be strict or flexible.")
