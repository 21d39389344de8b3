"""Search-R1's rule for questions: what stands in the last <answer>…</answer> is one of the targets, word by word."""

import re
import string
from typing import Any

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MOST_TAGS = 10  # more of them, and an answer is worth a quarter
PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(
    solution_str: str,
    ground_truth: dict[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """`score` if the answer is one of ground_truth["target"], `format_score` if it is another, 0 if there is none.

    `score` / 4 where <answer> or </answer> occurs more than ten times. `method` changes nothing, as in verl.
    """
    answer = extract_answer(solution_str)
    if answer is None:
        return 0.0
    if normalise(answer) not in map(normalise, targets_of(ground_truth)):
        return format_score
    hedges = max(solution_str.count("<answer>"), solution_str.count("</answer>")) > MOST_TAGS
    return score / 4 if hedges else score


def compute_score_subem(
    solution_str: str,
    ground_truth: dict[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """As `compute_score`, but the answer need only contain a target; however many tags there are."""
    answer = extract_answer(solution_str)
    if answer is None:
        return 0.0
    said = normalise(answer)
    return score if any(normalise(target) in said for target in targets_of(ground_truth)) else format_score


def extract_answer(text: str) -> str | None:
    found = ANSWER.findall(text)
    return found[-1].strip() if found else None


def targets_of(ground_truth: dict[str, Any]) -> list[str]:
    target = ground_truth["target"]
    return [target] if isinstance(target, str) else list(target)


def normalise(text: str) -> str:
    """SQuAD's: lower case, without ASCII punctuation, without the articles a, an and the, single spaces."""
    words = re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION))
    return " ".join(words.split())
