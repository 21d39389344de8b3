"""The tasks of reasoning-gym, each with the scorer that comes with it (data/rows.py makes rows of them).

The answer is what stands in the last <answer>…</answer>, or the whole text where there is none.
"""

import importlib
import re
from collections.abc import Callable
from functools import cache
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def compute_score(solution_str: str, ground_truth: dict[str, Any]) -> float:
    """The task's own score of an answer, from 0 to 1.

    Args:
        ground_truth: the task as reasoning-gym made it: question, answer and metadata.
    """
    answers = ANSWER.findall(solution_str) or [solution_str]
    return float(scorer(ground_truth["metadata"]["source_dataset"])(answers[-1].strip(), ground_truth))


@cache
def scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    return importlib.import_module("reasoning_gym").get_score_answer_fn(task)
