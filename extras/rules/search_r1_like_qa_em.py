"""Search-R1's rule for questions: what stands in the last <answer>…</answer> is one of the targets, word by word."""

import operator
import re
import string
from collections.abc import Callable
from functools import partial
from typing import Any

from extras.rules.math_reward import as_text

CLOSE = "</answer>"
ANSWER = re.compile(rf"<answer>(.*?){CLOSE}", re.DOTALL)
MOST_TAGS = 10  # more of them, and an answer is worth a quarter
PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Returns `score` if the answer is one of ground_truth["target"], or of a ground truth that is no dict,
    `format_score` if it is another, 0 if there is none.

    `score` / 4 where <answer> or </answer> occurs more than ten times. `method` changes nothing, as in verl.
    """
    right = is_right(solution_str, ground_truth, em_check)
    hedges = max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MOST_TAGS
    if right:
        return score / 4 if hedges else score
    return 0.0 if right is None else format_score


def compute_score_subem(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Scores as `compute_score`, but the answer need only contain a target, however many tags there are."""
    right = is_right(solution_str, ground_truth, subem_check)
    return 0.0 if right is None else score if right else format_score


def is_right(text: str, ground_truth: Any, check: Callable[[str, Any], int]) -> int | None:
    """Says whether the last answer matches a target; None: there is no answer."""
    targets = ground_truth["target"] if isinstance(ground_truth, dict) else ground_truth
    answer = last_answer(text)
    return None if answer is None else check(answer, targets)


def em_check(prediction: str, golden_answers: Any, matches: Callable[[str, str], bool] = operator.eq) -> int:
    """Returns 1 if the prediction matches one of the answers, or the only one, both normalised; else 0."""
    answers, text = as_text(golden_answers), normalise(prediction)
    answers = [answers] if isinstance(answers, str) else answers
    return int(any(matches(text, normalise(as_text(answer))) for answer in answers))


subem_check = partial(em_check, matches=operator.contains)


def last_answer(text: str) -> str | None:
    """Returns the content of the last <answer>…</answer>; None: there is none."""
    answers = ANSWER.findall(text[: text.rfind(CLOSE) + len(CLOSE)])  # the rest is searched from every <answer> on
    return answers[-1].strip() if answers else None


def normalise(text: str) -> str:
    """SQuAD's: lower case, without ASCII punctuation, without the articles a, an and the, single spaces."""
    words = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION))
    return " ".join(words.split())
