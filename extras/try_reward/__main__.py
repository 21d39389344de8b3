"""Tries a reward without a model: FILE --data ROWS [--name f] [--timeout S] [--audit]

Scores the responses that the rows hold as training does, and prints a table; --audit scores cheap answers and right
ones instead: does the reward pay for the right answers, and for nothing cheaper? Without a file the rules of public
data sets score, by each row's data_source. The audit tries the usual forms of a right answer and those of the responses
that contain it, or the one of --form. Ends with 1 if a row could not be scored, or the audit found something.
"""

from configs.errors import refusals  # isort: skip

import argparse
import math
import numbers
import random
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.import_utils import find
from configs.schema import RewardFunctionConfig, ScoringConfig
from data.protocol import DataProto
from data.rows import read_rows, with_labels
from data.types import NotScored, Row
from training.reward import RewardRun, Scored, call_manager, read_results, view_of_rows
from training.reward_function import FunctionReward, load_function

MOST_SHOWN, WIDTH = 40, 48  # rows of the table, characters of a text in it
LOG_WIDTH = 160  # characters of a line in a file or a pipe
MOST_ROWS = 16
PAYS = 0.2  # share of the right answers' score from which a cheap answer pays
JUNK_CHARACTERS = 20_000
FORMS = ("{}", "#### {}", r"\boxed{{}}", "Answer: {}", "The answer is {}.", "<answer>{}</answer>",
         r"<think>so</think><answer>{}</answer>", r"<think>so</think>\boxed{{}}")  # fmt: skip
MOST_FORMS = 8  # of a file's own
CONSTANT = "always"
CONSTANTS = ("0", "1", "2", "10", "-1", "yes", "no", "A", "B", "true", "none", "nan", "inf")
RIGHT = "the right answer"
BEFORE = "7, or maybe "  # before the form: shown and not warned of, as a policy may think aloud there


@dataclass(frozen=True)
class Outcome:
    """The result of scoring a response: `status` ok, timeout or error, the `reason` of the last two, and seconds."""

    status: str
    score: float = math.nan
    extra: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    seconds: float = 0.0


Score = Callable[[list[Row]], list[Outcome]]


@dataclass(frozen=True)
class Finding:
    """The mean score of a kind of answer and, if it is wrong, the warning; `example`: one such answer."""

    answer: str
    earned: float | None
    warning: str = ""
    example: str = ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m extras.try_reward", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reward", nargs="?", metavar="FILE", help="your reward (none: the rules of public data sets)")
    parser.add_argument("--data", required=True, metavar="ROWS", help=".jsonl, .json or .parquet, with responses")
    parser.add_argument("--name", help=f"the function in FILE ({RewardFunctionConfig.name}, or the only reward)")
    parser.add_argument("--timeout", type=float, default=ScoringConfig.timeout, metavar="S", help="for a response (60)")
    parser.add_argument("--audit", action="store_true", help="score cheap answers and right ones")
    parser.add_argument("--form", metavar="TEXT", help="how a right answer is written, for --audit: 'answer is {}'")
    arguments = parser.parse_args(argv)
    if arguments.form is not None and "{}" not in arguments.form:
        parser.error(f"--form {arguments.form}: it needs {{}} where the answer stands, as in 'answer is {{}}'")
    console = Console() if Console().is_terminal else Console(width=LOG_WIDTH)
    with refusals():
        config = ScoringConfig(timeout=arguments.timeout, max_failed_fraction=1.0)
        reward = load_reward(arguments.reward, arguments.name, config)
        rows = read_views(arguments.data, needs_response=not arguments.audit)
        score = partial(score_rows, reward=reward)
        findings, outcomes = (audit(rows, score, arguments.form), []) if arguments.audit else ([], score(rows))
    if arguments.audit:
        wrong = sum(bool(finding.warning) for finding in findings)
        verdict = f"{wrong} of {len(findings)} kinds of answers earn what they should not, or cannot be scored."
        sound = f"Sound: right answers pay, and none of {len(findings) - 1} kinds of cheap ones."
        console.print(audit_table(findings), verdict if wrong else sound, sep="\n")
        return int(wrong > 0)
    console.print(outcome_table(rows, outcomes), *summary(outcomes), sep="\n")
    return int(any(outcome.status != "ok" for outcome in outcomes))


def load_reward(path: str | None, name: str | None, config: ScoringConfig) -> FunctionReward:
    """Loads the function of a file, as training does; without a path, the rules of public data sets."""
    if path is None:
        return find("reward", "rules")(config, RewardRun(None, None))
    return load_function(RewardFunctionConfig(path, name or RewardFunctionConfig.name), config, None)


def read_views(data: str, needs_response: bool) -> list[Row]:
    """Reads the rows of a file with the columns of a `reward_view`; a list of responses gives a row for each."""
    rows, responses = [], []
    for origin, row in read_rows(data):
        row = with_labels(row, origin)
        answers = first_of(row, "responses", "response")
        answers = None if answers == [] else answers
        if answers is None and needs_response:
            has = sorted(name for name, value in row.items() if value is not None)
            raise ValueError(
                f"{origin} has no response to score, in `response`, `responses` or `output`; it has {has}."
            )
        labels = row.get("reward_model") or {}
        row["reward_model"] = labels | {"ground_truth": first_of(row | labels, "ground_truth")}
        for response in answers if isinstance(answers, list) else [answers]:
            rows.append(row)
            responses.append(response)
    view = view_of_rows(rows, responses)
    return [view[index].non_tensor_batch for index in range(len(view))]


def score_rows(rows: list[Row], reward: FunctionReward) -> list[Outcome]:
    """Scores rows of `read_views` as training does; one after another if the function takes one response and not its
    group, else at once."""
    view = DataProto.from_single_dict({name: [row[name] for row in rows] for name in rows[0]})
    one_by_one = reward.takes_one_response and "group" not in reward.names
    parts = [view[row : row + 1] for row in range(len(view))] if one_by_one else [view]
    calls = [timed_call(part, reward) for part in parts]
    returned = [result for [result], _ in calls] if one_by_one else calls[0][0]
    width = returned.shape[1] if isinstance(returned, torch.Tensor) and returned.ndim == 2 else 1
    try:
        results = read_results(returned, (len(view), width), reward.title)
    except ValueError as error:
        results = [NotScored("error", str(error))] * len(view)
    seconds = [seconds for _, seconds in calls] * (len(view) // len(calls))
    return [outcome_of(result, duration) for result, duration in zip(results, seconds, strict=True)]


def timed_call(view: DataProto, reward: FunctionReward) -> tuple[Any, float]:
    """Returns what `reward` returns for a view, NotScored for each row if it raises, and the seconds for each."""
    began = time.perf_counter()
    try:
        returned = call_manager(reward, view)
    except RuntimeError as error:
        returned = [NotScored("error", str(error))] * len(view)
    return returned, (time.perf_counter() - began) / len(view)


def outcome_of(result: Scored | NotScored, seconds: float) -> Outcome:
    if isinstance(result, NotScored):
        return Outcome(result.outcome, reason=result.reason, seconds=seconds)
    return Outcome("ok", float(torch.as_tensor(result.score).sum()), result.extra, seconds=seconds)


def first_of(row: Row, *columns: str) -> Any:
    """Returns the value of the first of `columns` that is not None: rows have the columns of all rows of a file."""
    return next((row[column] for column in columns if row.get(column) is not None), None)


def outcome_table(rows: list[Row], outcomes: list[Outcome]) -> Table:
    """Builds a line for each of the first rows: response, ground truth, score, extra columns, outcome and time."""
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.extra))
    table = Table("row", "response", "ground truth", "score", *names, "outcome", "ms", box=None, pad_edge=False)
    for number, (row, outcome) in enumerate(zip(rows[:MOST_SHOWN], outcomes, strict=False)):
        score = f"{outcome.score:g}" if outcome.status == "ok" else "–"
        extra = [short(outcome.extra.get(name, "")) for name in names]
        texts = (short(row["responses"]), short(row["ground_truths"]))
        text = f"{outcome.status}: {outcome.reason}" if outcome.reason else outcome.status
        cells = (str(number), *texts, score, *extra, text, f"{1000 * outcome.seconds:.1f}")
        table.add_row(*map(Text, cells))
    return table


def summary(outcomes: list[Outcome]) -> Iterator[str]:
    """Lines under the table: how many rows are not shown, means of the numbers, counts of outcomes."""
    if len(outcomes) > MOST_SHOWN:
        yield f"… {len(outcomes) - MOST_SHOWN} more rows"
    scored = [outcome for outcome in outcomes if outcome.status == "ok"]
    columns = {"score": [outcome.score for outcome in scored]}
    for name in scored[0].extra if scored else ():
        columns[name] = [outcome.extra.get(name) for outcome in scored]
    for name, values in columns.items():
        if values and all(isinstance(value, numbers.Real) for value in values):
            yield f"{name}: mean {sum(values) / len(values):g}, min {min(values):g}, max {max(values):g}"
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in ("ok", "timeout", "error")}
    yield f"{len(outcomes)} responses: " + ", ".join(f"{count} {status}" for status, count in counts.items())


def audit_table(findings: list[Finding]) -> Table:
    """Builds a line for each kind of answer, of constants only for those that pay: its mean score, and its warning."""
    table = Table("answer", "earns", "warning", "for example", box=None, pad_edge=False)
    for finding in findings:
        if finding.answer.startswith(CONSTANT) and not finding.warning:
            continue
        earned = "–" if finding.earned is None else f"{finding.earned:g}"
        table.add_row(*map(Text, (short(finding.answer), earned, finding.warning, short(finding.example))))
    return table


def short(value: Any) -> str:
    """One line of `value`, without its middle if it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= WIDTH else f"{text[: WIDTH // 2]}…{text[-WIDTH // 2 :]}"


def audit(rows: list[Row], score: Score, form: str | None = None) -> list[Finding]:
    """Scores right answers and cheap ones, over up to MOST_ROWS of `rows`; `form`: how a right answer is written."""
    forms = [*FORMS, *forms_of(rows)] if form is None else [form]
    rows = distinct(rows)[:: -(-len(distinct(rows)) // MOST_ROWS)]
    form, right = best_form(rows, score, forms)
    cases = [(kind, row, answer) for row in rows for kind, answer in cheap_answers(row, form)]
    outcomes = score([row | {"responses": answer} for _, row, answer in cases])
    tried: dict[str, list[tuple[str, Outcome]]] = {}
    for (kind, _, answer), outcome in zip(cases, outcomes, strict=True):
        tried.setdefault(kind, []).append((answer, outcome))
    scores = [outcome.score for outcome in [*outcomes, *right] if outcome.status == "ok"]
    least = min(scores, default=0.0)
    best = mean([outcome.score for outcome in right if outcome.status == "ok"])
    most = best if best is not None and best > least else least + 1.0
    cheap = [cheap_finding(kind, answers, least, most) for kind, answers in tried.items()]
    return [right_finding(right, least, form, len(forms)), *cheap]


def distinct(rows: list[Row]) -> list[Row]:
    """Keeps one row for each prompt and ground truth."""
    return list({(row["prompts"], str(row["ground_truths"])): row for row in rows}.values())


def forms_of(rows: list[Row]) -> list[str]:
    """Lists the forms of a file's responses: each that contains its row's answer, with {} where it occurs last."""
    forms: dict[str, None] = {}
    for row in rows:
        truth, response = right_answer(row), row["responses"]
        if truth and isinstance(response, str) and truth in response and "{}" not in response:
            forms["{}".join(response.rsplit(truth, 1))] = None
    return list(forms)[:MOST_FORMS]


def best_form(rows: list[Row], score: Score, forms: list[str]) -> tuple[str, list[Outcome]]:
    """Returns the form in which right answers score highest, and their outcomes; none if no right answer is known."""
    known = [(row, text) for row in rows if (text := right_answer(row)) is not None]
    outcomes = score([row | {"responses": put(text, form)} for form in forms for row, text in known]) if known else []
    tried = {form: outcomes[index * len(known) : (index + 1) * len(known)] for index, form in enumerate(forms)}
    earned = {form: sum(outcome.score for outcome in tried[form] if outcome.status == "ok") for form in forms}
    form = max(forms, key=earned.__getitem__)
    return form, tried[form]


def put(answer: str, form: str) -> str:
    """Puts an answer into a form, in the place of {}."""
    return form.replace("{}", answer)


def right_answer(row: Row) -> str | None:
    """The text of a row's ground truth, or of the first of several; None: there is none, or it is no answer (tests)."""
    truth: Any = row["ground_truths"]
    if isinstance(truth, dict):
        truth = truth.get("target")
    if isinstance(truth, list):
        truth = truth[0] if truth else None
    return None if truth is None or isinstance(truth, dict) or str(truth).startswith("{") else str(truth)


def cheap_answers(row: Row, form: str) -> list[tuple[str, str]]:
    """Lists (kind, answer) for all answers that should not pay in `row`; constants that are right are left out."""
    junk = "".join(random.Random(len(row["prompts"])).choices(string.printable, k=JUNK_CHARACTERS))
    answers = [
        ("empty text", ""),
        ("the form without an answer", put("", form)),
        ("the prompt itself", row["prompts"]),
        (f"{JUNK_CHARACTERS // 1000} kB of junk", junk),
    ]
    targets = row["ground_truths"].get("target") if isinstance(row["ground_truths"], dict) else row["ground_truths"]
    right = {str(target).strip().lower() for target in (targets if isinstance(targets, list) else [targets])}
    for constant in CONSTANTS:
        if constant.lower() not in right:
            spellings = (constant, put(constant, form))
            answers += [(f'{CONSTANT} "{text}"', text) for text in spellings]
    if (truth := right_answer(row)) is not None:
        other = "8" if truth == "7" else "7"
        answers.append((f'"{put("ANSWER or 7", form)}"', put(f"{truth} or {other}", form)))
        answers.append((f'"{put("7 or ANSWER", form)}"', put(f"{other} or {truth}", form)))
        answers.append(("both, each in the form", "\n".join(put(text, form) for text in (other, truth, other))))
        answers.append((f'"{BEFORE}{put("ANSWER", form)}"', f"{other}, or maybe {put(truth, form)}"))
    return list(dict.fromkeys(answers))


def right_finding(outcomes: list[Outcome], least: float, form: str, forms: int) -> Finding:
    if not outcomes:
        return Finding(RIGHT, None, "no row has a ground truth that is an answer: whether it pays is not known")
    if failure := next((outcome for outcome in outcomes if outcome.status != "ok"), None):
        return Finding(RIGHT, None, f"cannot be scored: {failure.status}: {failure.reason}", form)
    earned = mean([outcome.score for outcome in outcomes])
    unpaid = sum(outcome.score <= least for outcome in outcomes)
    rows = f"{unpaid} of {len(outcomes)} rows, in any of {forms} forms: name yours by --form"
    why = f"does not pay: no more than the worst answer in {rows}" if unpaid else ""
    return Finding(RIGHT, earned, why, put("ANSWER", form))


def cheap_finding(kind: str, answers: list[tuple[str, Outcome]], least: float, most: float) -> Finding:
    """Judges the scores of one kind of answer; `least`: the lowest score of all, `most`: the right answers' mean."""
    if failure := next((pair for pair in answers if pair[1].status != "ok"), None):
        answer, outcome = failure
        return Finding(kind, None, f"cannot be scored: {outcome.status}: {outcome.reason}", answer)
    earned = mean([outcome.score for _, outcome in answers])
    share = (earned - least) / (most - least)
    if share < PAYS or kind.startswith(f'"{BEFORE}'):
        return Finding(kind, earned)
    return Finding(
        kind, earned, f"pays {share:.0%} of what right answers earn", max(answers, key=lambda a: a[1].score)[0]
    )


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


if __name__ == "__main__":
    raise SystemExit(main())
