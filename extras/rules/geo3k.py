r"""Geometry3K's rule: 0.9 for a \boxed{…} that equals the reference, 0.1 for <think>…</think> before it."""

from extras.rules.math_reward import as_text, boxed_content
from extras.rules.prime_math import equal_as_text
from extras.rules.symbolic import LONGEST, symbolically_equal

FORMAT = ("<think>", "</think>", "\\boxed{", "}")  # in this order, the first at the beginning


def compute_score(
    predict_str: str, ground_truth: str | float, use_boxed: bool = True, format_score: float = 0.1
) -> float:
    """Returns (1 - format_score) · right + format_score · well formed; `use_boxed=False` compares the whole text.

    Right: the answer equals `ground_truth`, by its text, normalised as prime_math's, or by algebra.
    """
    answer = boxed_content(predict_str) if use_boxed else predict_str
    truth = as_text(ground_truth)
    is_right = answer == truth
    if answer is not None and max(len(answer), len(truth)) <= LONGEST:
        is_right = equal_as_text(answer, truth) or symbolically_equal(answer, truth)
    return (1.0 - format_score) * is_right + format_score * is_well_formed(predict_str)


def is_well_formed(text: str) -> bool:
    rest, separator = text, FORMAT[0]
    for part in FORMAT:
        _, separator, rest = rest.partition(part)
    return bool(separator) and text.startswith(FORMAT[0])
