"""Scores generated responses: python -m extras.evaluation.main_eval data.path=… reward.custom_reward_function.path=…

For each data source, over its prompts: mean@n, pass@k and, if the reward returns the answer it read as `pred`,
majority@n. Without a function the rules of public data sets score, by each row's data source.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a file it runs like as a module

from configs.loader import command
from extras.evaluation.settings import EvaluationConfig, EvaluationDataConfig, check_evaluation, check_reward_early

REPORT = "extras.evaluation.main_eval.report"
main = command("evaluation", EvaluationConfig, check_evaluation, __doc__, REPORT, check_reward_early)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from configs.errors import refusals
from configs.import_utils import find
from configs.schema import ScoringConfig
from data.files import replacing
from data.rows import Origin, read_rows, with_labels
from data.types import Row
from training.metric_utils import calc_maj_val, subset_sizes
from training.reward import RewardManager, RewardRun, Scored, score_view, view_of_rows
from training.tracking import short_number

Figures = dict[str, float]  # by name; NAME/stderr beside a mean over several prompts


@dataclass(frozen=True)
class Graded:
    """A prompt's responses: the score of each and, if the reward returns it, the answer that it read in each."""

    data_source: str
    scores: list[float]
    answers: list[str] | None = None


def report(config: EvaluationConfig) -> None:
    """Prints the figures of each data source as a table, and writes them to data.output_path, if it is set."""
    with refusals():
        figures = run(config)
    Console().print(as_table(figures))
    if config.data.output_path is not None:
        with replacing(config.data.output_path) as file:
            file.write((json.dumps(figures, indent=2) + "\n").encode())


def run(config: EvaluationConfig) -> dict[str, Figures]:
    """Scores the rows of the config, and returns what `evaluate` does."""
    rows = [standard_row(row, origin, config.data) for origin, row in read_rows(config.data.path, key="data.path")]
    reward = find("reward", config.reward.scorer)(config.reward, RewardRun(None, None))
    if config.reward.source() is None:
        reward.check(dict(enumerate(rows)))
    return evaluate(grade(rows, reward, config.reward), config.data.pass_score)


def standard_row(row: Row, origin: Origin, data: EvaluationDataConfig) -> Row:
    """Adds to `row` the names that rewards know, and its responses as a list. Raises ValueError if it has none."""
    responses = row.get(data.response_key)
    responses = [responses] if isinstance(responses, str) else responses
    if not isinstance(responses, list) or not responses or not all(isinstance(response, str) for response in responses):
        column = f"the responses (column data.response_key={data.response_key}) are {responses!r}"
        raise ValueError(f"{origin}: {column}; they must be a string or a list of strings.")
    names = {"prompt": data.prompt_key, "data_source": data.data_source_key, "reward_model": data.reward_model_key}
    known = {name: row[column] for name, column in names.items() if column in row}
    row = with_labels({**row, **known, "responses": responses}, origin)
    return {**row, "data_source": row.get("data_source") or origin.source}


def grade(rows: Sequence[Row], reward: RewardManager, config: ScoringConfig) -> list[Graded]:
    """Scores every response as in training, all in one call of `reward`.

    Responses that it could not score are left out, or get reward.failure_score. Raises RuntimeError or ValueError if
    the reward raised, or returned something that is not a score.
    """
    flat = [(row, response) for row in rows for response in row["responses"]]
    results = score_view(view_of_rows(*zip(*flat, strict=True), validate=True), reward, config)
    if config.on_failure == "score":
        failed = Scored(config.failure_score, {})
        results = [result if isinstance(result, Scored) else failed for result in results]
    has_answers = any("pred" in result.extra for result in results if isinstance(result, Scored))
    graded, remaining = [], iter(results)
    for row in rows:
        scored = [result for result in islice(remaining, len(row["responses"])) if isinstance(result, Scored)]
        answers = [str(result.extra.get("pred")) for result in scored] if has_answers else None
        if scored:
            graded.append(Graded(row["data_source"], [float(result.score) for result in scored], answers))
    return graded


def evaluate(graded: Sequence[Graded], pass_score: float) -> dict[str, Figures]:
    """Computes the figures of each data source and, if there are several, of "all".

    With n the fewest responses that a prompt of the source has, k is 1, 2, 4 … and n.
    """
    sources: dict[str, list[Graded]] = {}
    for prompt in graded:
        sources.setdefault(prompt.data_source, []).append(prompt)
    if len(sources) > 1:
        sources["all"] = list(graded)
    return {source: compute_evaluation_metrics(prompts, pass_score) for source, prompts in sources.items()}


def compute_evaluation_metrics(prompts: Sequence[Graded], pass_score: float) -> Figures:
    """Computes the figures of an evaluation of saved responses: means over prompts, each with its standard error.

    With n the fewest responses of a prompt: mean@n, pass@k for k = 1, 2, 4 … and n, and, if the answers are known,
    majority@n, the score of the most frequent of the first n answers. That is not verl's maj@n of a validation, which
    resamples the n answers before each vote.
    """
    n = min(len(prompt.scores) for prompt in prompts)
    columns = {f"mean@{n}": [fmean(prompt.scores) for prompt in prompts]}
    for k in sorted({1, *subset_sizes(n)}):
        columns[f"pass@{k}"] = [
            pass_at_k(len(prompt.scores), sum(score >= pass_score for score in prompt.scores), k) for prompt in prompts
        ]
    if all(prompt.answers is not None for prompt in prompts):
        ballots = [
            [{"answer": answer, "score": score} for answer, score in zip(prompt.answers, prompt.scores, strict=True)]
            for prompt in prompts
        ]
        columns[f"majority@{n}"] = [calc_maj_val(votes[:n], "answer", "score") for votes in ballots]
    figures: Figures = {"prompts": len(prompts), "responses": sum(len(prompt.scores) for prompt in prompts)}
    for name, values in columns.items():
        figures[name] = fmean(values)
        if len(values) > 1:
            figures[f"{name}/stderr"] = stdev(values) / math.sqrt(len(values))
    return figures


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Returns the chance that k of the n responses, drawn without replacement, include at least one that passed.

    1 − C(n − c, k) / C(n, k): unbiased for k responses drawn anew (arXiv:2107.03374, section 2.1).
    """
    assert 0 <= passed <= n and 1 <= k <= n, f"pass@{k} of {passed} in {n}"
    return 1 - math.comb(n - passed, k) / math.comb(n, k)


def as_table(figures: dict[str, Figures]) -> Table:
    """Makes a table of each figure of each data source, with ± its standard error."""
    table = Table("data source", "figure", "value")
    for source, row in figures.items():
        names = [name for name in row if not name.endswith("/stderr")]
        for name in names:
            value = str(row[name]) if isinstance(row[name], int) else short_number(row[name], 3)
            error = f" ± {short_number(row[f'{name}/stderr'], 3)}" if f"{name}/stderr" in row else ""
            table.add_row(source, name, value + error, end_section=name == names[-1])
    return table
