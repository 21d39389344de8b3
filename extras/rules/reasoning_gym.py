"""The tasks of reasoning-gym, each with the scorer that comes with it (data/rows.py makes rows of them).

The answer is what stands in the last <answer>…</answer>, or the whole text where there is none.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any

from extras.rules.search_r1_like_qa_em import last_answer


def compute_score(solution_str: str, ground_truth: dict[str, Any]) -> float:
    """Returns the task's own score of an answer, from 0 to 1; 0 for one that its scorer cannot read.

    `ground_truth` is the task as reasoning-gym made it: question, answer and metadata.
    """
    answer = last_answer(solution_str)
    task = scorer(ground_truth["metadata"]["source_dataset"])
    try:
        return float(task((solution_str if answer is None else answer).strip(), ground_truth))
    except Exception:  # of a package of many scorers, each with a parser of its own
        return 0.0


@cache
def scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    return importlib.import_module("reasoning_gym").get_score_answer_fn(task)
