"""Does a reward pay for the right answers, and for nothing cheaper?

Each row's ground truth is put into the forms that rewards ask for; the form that pays best is the one in which cheap
answers are tried, beside their bare text. What they earn is measured between the least and the best that was seen.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from data.types import Row
from training.row_scorer import Outcome

MOST_ROWS = 16
PAYS = 0.2  # of what the right answers earn; as much, and an answer pays
JUNK_CHARACTERS = 20_000
FORMS = ("{}", "#### {}", r"\boxed{{{}}}", "Answer: {}", "The answer is {}.", "<answer>{}</answer>",
         r"<think>so</think><answer>{}</answer>", r"<think>so</think>\boxed{{{}}}")  # fmt: skip
CONSTANT = "always"
CONSTANTS = ("0", "1", "2", "10", "-1", "yes", "no", "A", "B", "true", "none", "nan", "inf")
RIGHT = "the right answer"

Score = Callable[[list[Row]], list[Outcome]]


@dataclass(frozen=True)
class Finding:
    """What a kind of answer earns on average, and, if that is wrong, why; `example`: one such answer."""

    answer: str
    earned: float | None
    warning: str = ""
    example: str = ""


def audit(rows: list[Row], score: Score) -> list[Finding]:
    """What right answers and cheap ones earn, over up to MOST_ROWS of `rows`."""
    rows = distinct(rows)[:: -(-len(distinct(rows)) // MOST_ROWS)]
    form, right = best_form(rows, score)
    asked = [(kind, row, answer) for row in rows for kind, answer in cheap_answers(row, form)]
    outcomes = score([with_response(row, answer) for _, row, answer in asked])
    tried: dict[str, list[tuple[str, Outcome]]] = {}
    for (kind, _, answer), outcome in zip(asked, outcomes, strict=True):
        tried.setdefault(kind, []).append((answer, outcome))
    scores = [outcome.score for outcome in [*outcomes, *right] if outcome.status == "ok"]
    least = min(scores, default=0.0)
    best = mean([outcome.score for outcome in right if outcome.status == "ok"])
    findings = [right_finding(right, least, form)]
    most = best if best is not None and best > least else least + 1.0
    return findings + [cheap_finding(kind, answers, least, most) for kind, answers in tried.items()]


def distinct(rows: list[Row]) -> list[Row]:
    """One row for each prompt and ground truth."""
    return list({(row["prompts"], str(row["ground_truths"])): row for row in rows}.values())


def best_form(rows: list[Row], score: Score) -> tuple[str, list[Outcome]]:
    """The form in which right answers earn most, and what each of them came to; no outcomes where none is known."""
    known = [(row, text) for row in rows if (text := right_answer(row)) is not None]
    outcomes = score([with_response(row, form.format(text)) for form in FORMS for row, text in known]) if known else []
    tried = {form: outcomes[place * len(known) : (place + 1) * len(known)] for place, form in enumerate(FORMS)}
    earned = {form: sum(one.score for one in tried[form] if one.status == "ok") for form in FORMS}
    form = max(FORMS, key=earned.__getitem__)
    return form, tried[form]


def right_answer(row: Row) -> str | None:
    """The text of a row's ground truth, or of the first of several; None: there is none, or it is no answer (tests)."""
    truth: Any = row["ground_truths"]
    if isinstance(truth, dict):
        truth = truth.get("target")
    if isinstance(truth, list):
        truth = truth[0] if truth else None
    return None if truth is None or isinstance(truth, dict) or str(truth).startswith("{") else str(truth)


def cheap_answers(row: Row, form: str) -> list[tuple[str, str]]:
    """(kind, answer) for all that should not pay for `row`; constants that are right there are left out."""
    answers = [
        ("empty text", ""),
        ("the form without an answer", form.format("")),
        ("the prompt itself", row["prompts"]),
    ]
    answers.append((f"{JUNK_CHARACTERS // 1000} kB of junk", junk(len(row["prompts"]))))
    truth = right_answer(row)
    targets = row["ground_truths"].get("target") if isinstance(row["ground_truths"], dict) else row["ground_truths"]
    right = {str(one).strip().lower() for one in (targets if isinstance(targets, list) else [targets])}
    for constant in CONSTANTS:
        if constant.lower() not in right:
            said = (constant, form.format(constant))
            answers += [(f'{CONSTANT} "{text}"', text) for text in said]
    if truth is not None:
        other = "8" if truth == "7" else "7"
        answers.append((f'"{form.format("ANSWER or 7")}"', form.format(f"{truth} or {other}")))
        answers.append((f'"{form.format("7 or ANSWER")}"', form.format(f"{other} or {truth}")))
        answers.append(("both, each in the form", f"{form.format(other)}\n{form.format(truth)}\n{form.format(other)}"))
    return list(dict.fromkeys(answers))


def junk(seed: int) -> str:
    return "".join(random.Random(seed).choices(string.printable, k=JUNK_CHARACTERS))


def with_response(row: Row, response: str) -> Row:
    return row | {"responses": response}


def right_finding(outcomes: list[Outcome], least: float, form: str) -> Finding:
    if not outcomes:
        return Finding(RIGHT, None, "no row has a ground truth that is an answer: whether it pays is not known")
    if failure := next((outcome for outcome in outcomes if outcome.status != "ok"), None):
        return Finding(RIGHT, None, f"cannot be scored: {failure.status}: {failure.said}", form)
    earned = mean([outcome.score for outcome in outcomes])
    paid = sum(outcome.score > least for outcome in outcomes)
    shown = form.format("ANSWER")
    if paid < len(outcomes):
        unpaid = f"{len(outcomes) - paid} of {len(outcomes)} rows"
        why = f"does not pay: no more than the worst answer in {unpaid}, in any of {len(FORMS)} forms"
        return Finding(RIGHT, earned, why, shown)
    return Finding(RIGHT, earned, "", shown)


def cheap_finding(kind: str, answers: list[tuple[str, Outcome]], least: float, most: float) -> Finding:
    """`least` and `most`: the lowest score that was seen, and what right answers earn on average."""
    if failure := next((one for one in answers if one[1].status != "ok"), None):
        answer, outcome = failure
        return Finding(kind, None, f"cannot be scored: {outcome.status}: {outcome.said}", answer)
    earned = mean([outcome.score for _, outcome in answers])
    share = (earned - least) / (most - least)
    if share < PAYS:
        return Finding(kind, earned)
    return Finding(
        kind, earned, f"pays {share:.0%} of what right answers earn", max(answers, key=lambda a: a[1].score)[0]
    )


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
