r"""Geometry3K's rule: 0.9 for a \boxed{…} that equals the reference, 0.1 for <think>…</think> before it."""

import re

from training.reward_score.math_reward import boxed_content, is_equivalent
from training.reward_score.symbolic import symbolically_equal

FORMAT = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """(1 - format_score) · right + format_score · well formed; `use_boxed=False` compares the whole text.

    Right: the answer equals `ground_truth`, by its normalised text or by algebra.
    """
    answer = boxed_content(predict_str) if use_boxed else predict_str
    is_right = answer is not None and (is_equivalent(answer, ground_truth) or symbolically_equal(answer, ground_truth))
    is_well_formed = FORMAT.fullmatch(predict_str) is not None
    return (1.0 - format_score) * is_right + format_score * is_well_formed
