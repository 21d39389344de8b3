"""Scores responses that were generated: python -m training.main_eval data.path=… reward.custom_reward_function.path=…

For each data source, over its prompts: mean@n, pass@k and, if the reward returns the answer it read as `pred`, maj@n.
Without a function the rules of public data sets score, by each row's data source.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module

from configs.loader import command
from configs.serving import EvaluationConfig, EvaluationDataConfig, check_evaluation

main = command("evaluation", EvaluationConfig, check_evaluation, __doc__, "training.main_eval.report")
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from statistics import fmean, stdev

from rich.console import Console
from rich.table import Table

from configs.errors import ConfigError, refusals
from configs.schema import SandboxFusionConfig, ScoringConfig
from data.chat import parse_prompt
from data.data_report import prompt_text
from data.files import replacing
from data.protocol import DataProto, object_array
from data.rows import Origin, read_rows, with_labels
from data.types import Row
from training.reward import RewardManager, load_default, load_functions, view_scores
from training.reward_score import KNOWN, has_rule

Figures = dict[str, float]  # by metric; NAME/stderr beside a mean over several prompts


@dataclass(frozen=True)
class Graded:
    """A prompt's responses: the score of each, and, if the reward says, the answer that it read in each."""

    data_source: str
    scores: list[float]
    answers: list[str] | None = None


def report(config: EvaluationConfig) -> None:
    """Prints the figures of each data source as a table, and writes them to data.output_path, if it is set."""
    with refusals():
        found = run(config)
    Console().print(as_table(found))
    if config.data.output_path is not None:
        with replacing(config.data.output_path) as file:
            file.write((json.dumps(found, indent=2) + "\n").encode())


def run(config: EvaluationConfig) -> dict[str, Figures]:
    """The figures of each data source, as `evaluate` has them."""
    rows = [with_responses(row, origin, config.data) for origin, row in read_rows(config.data.path)]
    reward = load_functions(config.reward, None)
    if reward is None:
        check_rules(rows)
        reward = load_default(config.reward, SandboxFusionConfig(), None)
    return evaluate(grade(rows, reward, config.reward), config.data.pass_score)


def check_rules(rows: Sequence[Row]) -> None:
    """Raises ConfigError if there is no rule for the data source of a row."""
    if unknown := sorted({str(row["data_source"]) for row in rows if not has_rule(row["data_source"])}):
        raise ConfigError(
            "reward.custom_reward_function.path is not set, and there is no rule for the data sources "
            f"{', '.join(unknown)}: name the file of a reward function. Rules are there for {', '.join(KNOWN)}."
        )


def with_responses(row: Row, origin: Origin, data: EvaluationDataConfig) -> Row:
    """`row` under the names that rewards know, with a list of responses.

    Raises:
        ValueError: it has none; names the row and the column.
    """
    responses = row.get(data.response_key)
    responses = [responses] if isinstance(responses, str) else responses
    if not isinstance(responses, list) or not responses or not all(isinstance(one, str) for one in responses):
        raise ValueError(
            f"{origin}: the responses (column data.response_key={data.response_key}) are {responses!r}; they must be a "
            "string or a list of strings."
        )
    if data.reward_model_key in row:
        row = {**row, "reward_model": row[data.reward_model_key]}
    row = with_labels(row, origin)
    prompt = row.get(data.prompt_key)
    return {
        "responses": responses,
        "prompts": None if prompt is None else prompt_text(parse_prompt(prompt)),
        "data_source": row.get(data.data_source_key) or "unknown",
        "ground_truths": row.get("reward_model", {}).get("ground_truth"),
        "extra_info": row["extra_info"],
    }


def grade(rows: Sequence[Row], reward: RewardManager, config: ScoringConfig) -> list[Graded]:
    """Every response scored by `reward`, as in training: all of them in one call of it. Those that it could not score
    are left out, or get reward.failure_score.

    Raises:
        RuntimeError, ValueError: the reward raised, or returned what is no score; names it.
    """
    flat = [{**row, "responses": response} for row in rows for response in row["responses"]]
    view = DataProto.from_single_dict(
        {name: object_array([row[name] for row in flat]) for name in flat[0]}, {"validate": True}
    )
    scores, extra, failures = view_scores(view, reward, (len(flat), 1), config)
    scores, answers = iter(scores.reshape(len(flat)).tolist()), iter(extra.get("pred", ()))
    left_out = failures if config.on_failure == "mask" else {}
    numbers, graded = count(), []
    for row in rows:
        found = [(next(numbers), next(scores), str(next(answers, ""))) for _ in row["responses"]]
        kept = [(score, answer) for number, score, answer in found if number not in left_out]
        said = [answer for _, answer in kept] if "pred" in extra else None
        if kept:
            graded.append(Graded(row["data_source"], [score for score, _ in kept], said))
    return graded


def evaluate(graded: Sequence[Graded], pass_score: float) -> dict[str, Figures]:
    """The figures of each data source, and, of several, of "all".

    With n the fewest responses that a prompt of the source has, k is 1, 2, 4 … and n.
    """
    sources: dict[str, list[Graded]] = {}
    for one in graded:
        sources.setdefault(one.data_source, []).append(one)
    if len(sources) > 1:
        sources["all"] = list(graded)
    return {source: figures(prompts, pass_score) for source, prompts in sources.items()}


def figures(prompts: Sequence[Graded], pass_score: float) -> Figures:
    """Each metric's mean over prompts, and its standard error."""
    n = min(len(prompt.scores) for prompt in prompts)
    columns = {f"mean@{n}": [fmean(prompt.scores) for prompt in prompts]}
    for k in sizes(n):
        columns[f"pass@{k}"] = [
            pass_at_k(len(prompt.scores), sum(score >= pass_score for score in prompt.scores), k) for prompt in prompts
        ]
    if all(prompt.answers is not None for prompt in prompts):
        columns[f"maj@{n}"] = [majority_score(prompt.answers[:n], prompt.scores[:n]) for prompt in prompts]
    found: Figures = {"prompts": len(prompts), "responses": sum(len(prompt.scores) for prompt in prompts)}
    for name, values in columns.items():
        found[name] = fmean(values)
        if len(values) > 1:
            found[f"{name}/stderr"] = stdev(values) / math.sqrt(len(values))
    return found


def sizes(n: int) -> list[int]:
    """1, 2, 4 … below `n`, and `n`."""
    return [2**power for power in range(n.bit_length()) if 2**power < n] + [n]


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The chance that of k of the n responses, drawn without replacement, at least one is among the `passed`.

    1 − C(n − c, k) / C(n, k): unbiased for k responses drawn anew (arXiv:2107.03374, section 2.1).
    """
    assert 0 <= passed <= n and 1 <= k <= n, f"pass@{k} of {passed} in {n}"
    return 1 - math.comb(n - passed, k) / math.comb(n, k)


def majority_score(answers: Sequence[str], scores: Sequence[float]) -> float:
    """The score of the most frequent answer; of equally frequent ones the first given wins."""
    winner, _ = Counter(answers).most_common(1)[0]
    return scores[answers.index(winner)]


def as_table(found: dict[str, Figures]) -> Table:
    """A line for each metric of each data source, with ± its standard error."""
    table = Table("data source", "figure", "value")
    for source, row in found.items():
        names = [name for name in row if not name.endswith("/stderr")]
        for name in names:
            table.add_row(source, name, cell(row, name), end_section=name == names[-1])
    return table


def cell(row: Figures, name: str) -> str:
    if isinstance(row[name], int):
        return str(row[name])
    error = f"{name}/stderr"
    return f"{row[name]:.3f}" + (f" ± {row[error]:.3f}" if error in row else "")
