"""The figures of an evaluation of saved responses: mean, pass@k and majority, each with its standard error."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from training.metric_utils import calc_maj_val, subset_sizes

Figures = dict[str, float]  # by name; NAME/stderr beside a mean over several prompts


@dataclass(frozen=True)
class Graded:
    """A prompt's responses: the score of each, and, if the reward says, the answer that it read in each."""

    data_source: str
    scores: list[float]
    answers: list[str] | None = None


def compute_evaluation_metrics(prompts: Sequence[Graded], pass_score: float) -> Figures:
    """Computes what an evaluation of saved responses reports: means over prompts, each with its standard error.

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
    """The chance that of k of the n responses, drawn without replacement, at least one is among the `passed`.

    1 − C(n − c, k) / C(n, k): unbiased for k responses drawn anew (arXiv:2107.03374, section 2.1).
    """
    assert 0 <= passed <= n and 1 <= k <= n, f"pass@{k} of {passed} in {n}"
    return 1 - math.comb(n - passed, k) / math.comb(n, k)
