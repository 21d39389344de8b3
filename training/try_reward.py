"""A reward without a model: python -m training.reward FILE --data ROWS [--name f] [--timeout S] [--audit]

Scores the responses that the rows hold, each with a deadline, and prints what came of them; with --audit it scores
cheap answers and right ones instead (training/audit_reward.py). Without a file the rules of public data sets score, by
each row's data_source. Ends with 1 if a row could not be scored, or the audit found something. Neither torch nor
transformers is loaded unless the reward asks for them.
"""

import argparse
import numbers
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from configs.errors import refusals
from data.import_utils import load_extern_object, load_module
from data.rows import read_rows, with_labels
from data.types import Row
from training.audit_reward import CONSTANT, Finding, audit
from training.reward_function import FunctionReward
from training.reward_score import default_compute_score
from training.row_scorer import Outcome, Scorer

NAMES = ("compute_score", "compute_reward")  # looked for without --name
MOST_SHOWN, WIDTH = 40, 48  # rows of the table, characters of a text in it
SECONDS = 60.0
LOG_WIDTH = 160  # characters of a line in a file or a pipe


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m training.reward", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("reward", nargs="?", metavar="FILE", help="your reward (none: the rules of public data sets)")
    parser.add_argument("--data", required=True, metavar="ROWS", help=".jsonl, .json or .parquet, with responses")
    parser.add_argument("--name", help=f"the function in FILE ({' or '.join(NAMES)})")
    parser.add_argument("--timeout", type=float, default=SECONDS, metavar="S", help=f"for a response ({SECONDS:g})")
    parser.add_argument("--audit", action="store_true", help="score cheap answers and right ones")
    arguments = parser.parse_args(argv)
    console = Console() if Console().is_terminal else Console(width=LOG_WIDTH)
    with refusals():
        reward = load_reward(arguments.reward, arguments.name)
        rows = read_views(arguments.data, needs_response=not arguments.audit)
    score = Scorer(reward, arguments.timeout)
    if arguments.audit:
        findings = audit(rows, score)
        console.print(audit_table(findings), audit_verdict(findings), sep="\n")
        return int(any(finding.warning for finding in findings))
    outcomes = score(rows)
    console.print(outcome_table(rows, outcomes), *summary(outcomes), sep="\n")
    return int(any(outcome.status != "ok" for outcome in outcomes))


def load_reward(path: str | None, name: str | None) -> FunctionReward:
    """The function of a file, as training calls it; without a path, the rules of public data sets.

    Raises:
        ValueError, AttributeError, FileNotFoundError, RuntimeError: there is none; says why.
    """
    if path is None:
        return FunctionReward(default_compute_score)
    if name is None:
        found = vars(load_module(path))
        name = next((known for known in NAMES if known in found), NAMES[0])
    return FunctionReward(load_extern_object(path, name))


def read_views(data: str, needs_response: bool) -> list[Row]:
    """The rows of a file with the columns of a `reward_view`; one for each response, where a row has a list of them.

    Raises:
        ValueError, FileNotFoundError: they cannot be read, or one has no response; names it.
    """
    views = []
    for origin, row in read_rows(data):
        row = with_labels(row, origin)
        responses = first_of(row, "responses", "response")
        if responses is None and needs_response:
            has = sorted(name for name, value in row.items() if value is not None)
            raise ValueError(
                f"{origin} has no response to score, in `response`, `responses` or `output`; it has {has}."
            )
        labels = row.get("reward_model") or {}
        view = row | {"prompts": prompt_text(row), "ground_truths": first_of(row | labels, "ground_truth", "gts")}
        for response in responses if isinstance(responses, list) else [responses]:
            views.append(view | {"responses": response})
    return views


def first_of(row: Row, *columns: str) -> Any:
    """What the first of `columns` that holds anything holds: rows have the columns of all rows of their file."""
    return next((row[column] for column in columns if row.get(column) is not None), None)


def prompt_text(row: Row) -> str:
    """The prompt as one text: the contents of its messages, a line each."""
    prompt = first_of(row, "prompt", "input") or ""
    return prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)


def outcome_table(rows: list[Row], outcomes: list[Outcome]) -> Table:
    """A line for each of the first rows: its response, what is right, its score and what came with it."""
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.extra))
    table = Table("row", "response", "ground truth", "score", *names, "outcome", "ms", box=None, pad_edge=False)
    for number, (row, outcome) in enumerate(zip(rows[:MOST_SHOWN], outcomes, strict=False)):
        score = f"{outcome.score:g}" if outcome.status == "ok" else "–"
        extra = [short(outcome.extra.get(name, "")) for name in names]
        texts = (short(row["responses"]), short(row["ground_truths"]))
        said = f"{outcome.status}: {outcome.said}" if outcome.said else outcome.status
        cells = (str(number), *texts, score, *extra, said, f"{1000 * outcome.seconds:.1f}")
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
    """A line for each kind of answer, of constants only for those that pay: what it earns, and why that is wrong."""
    table = Table("answer", "earns", "warning", "for example", box=None, pad_edge=False)
    for finding in findings:
        if finding.answer.startswith(CONSTANT) and not finding.warning:
            continue
        earned = "–" if finding.earned is None else f"{finding.earned:g}"
        table.add_row(*map(Text, (short(finding.answer), earned, finding.warning, short(finding.example))))
    return table


def audit_verdict(findings: list[Finding]) -> str:
    wrong = sum(bool(finding.warning) for finding in findings)
    if not wrong:
        return f"Sound: right answers pay, and none of {len(findings) - 1} kinds of cheap ones."
    return f"{wrong} of {len(findings)} kinds of answers earn what they should not, or cannot be scored."


def short(value: Any) -> str:
    """One line of `value`, without its middle if it is long."""
    text = " ".join(str(value).split())
    return text if len(text) <= WIDTH else f"{text[: WIDTH // 2]}…{text[-WIDTH // 2 :]}"
