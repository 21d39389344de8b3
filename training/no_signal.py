"""A run that learns nothing, step after step, and what the likeliest cause is."""

import logging
from collections.abc import Mapping

from transformers import PreTrainedTokenizerBase

from data.protocol import DataProto
from training.validation import print_rows, sample_rows, spread

logger = logging.getLogger(__name__)

SHOWN = 2  # responses


class NoSignal:
    """Counts the steps in a row whose rewards teach nothing, and says so once when they are `limit`; 0: never.

    A step teaches nothing if all its responses score alike, or if every advantage is 0. Said are the likeliest cause
    and, to see it, the best and the worst response of the last of these steps, decoded by `tokenizer`.
    """

    def __init__(self, limit: int, tokenizer: PreTrainedTokenizerBase) -> None:
        self.limit = limit
        self.tokenizer = tokenizer
        self.in_a_row = 0

    def check(self, metrics: Mapping[str, float], batch: DataProto) -> None:
        """Counts a step, by its metrics and the batch that it learnt from."""
        self.in_a_row = self.in_a_row + 1 if teaches_nothing(metrics) else 0
        if self.in_a_row == self.limit > 0:
            logger.warning(
                "%d steps in a row taught nothing (trainer.no_signal_steps): %s", self.limit, likeliest_cause(metrics)
            )
            rows = sample_rows(batch, self.tokenizer, int(metrics["training/global_step"]))
            print_rows("of a step that taught nothing", [*spread(rows, SHOWN)])


def teaches_nothing(metrics: Mapping[str, float]) -> bool:
    """Whether all scores of a step are equal, all advantages 0, or there is none of either."""
    if "critic/advantages/max" not in metrics:
        return True
    scores_tie = metrics["critic/score/max"] == metrics["critic/score/min"]
    return scores_tie or metrics["critic/advantages/max"] == metrics["critic/advantages/min"] == 0


def likeliest_cause(metrics: Mapping[str, float]) -> str:
    """Why a step that taught nothing did not, and what to do about it: the first of the known causes that fits."""
    late, broken = (int(metrics.get(f"reward/{outcome}", 0)) for outcome in ("timeout", "error"))
    if late or broken:
        return (
            f"{late} responses were not scored in time, and {broken} made the reward raise "
            "(reward/timeout, reward/error; the warnings name the line). Mend the function, which `python -m "
            "training.reward` tries, or raise reward.timeout."
        )
    if "critic/score/max" not in metrics:
        return "every rollout failed (response/aborted_ratio is 1). Look at end_reason/… in metrics.jsonl."
    cut = f"{metrics['response_length/clip_ratio']:.0%} of the responses reach data.max_response_length"
    readable, source = readable_answers(metrics)
    if readable < 0.1:
        return (
            f"{readable:.0%} of the responses could be read as an action ({source}; {cut}). "
            "Look at some with trainer.rollout_data_dir=…; make text_to_action more lenient, give responses more room, "
            "or start from a model that knows the format."
        )
    score = metrics["critic/score/max"]
    if score > metrics["critic/score/min"]:
        return (
            "the samples of a prompt always score alike, so they tell nothing about each other. Raise "
            "actor_rollout_ref.rollout.n or the temperature, or use a reward that tells answers apart."
        )
    long = metrics["response_length/max"] > 1 and metrics["response_length/clip_ratio"] > 0.5
    if long and "reward/valid_action/mean" not in metrics:
        return f"every response scores {score:g}, and {cut} and may be cut before they answer: raise it."
    return (
        f"every response scores {score:g}. The reward is the same for all answers, it is too rare to be found by "
        "chance, or the task is mastered. docs/environments.md (What a step trains on) shows what to do about a "
        "reward that comes at the end alone."
    )


def readable_answers(metrics: Mapping[str, float]) -> tuple[float, str]:
    """The share of answers that were an action, as far as it is known, else 1, and the metrics that say so."""
    if metrics.get("num_turns/mean") and "invalid_actions/mean" in metrics:
        invalid = metrics["invalid_actions/mean"] / metrics["num_turns/mean"]  # of parallel calls there may be more
        return max(0.0, 1 - invalid), "invalid_actions/mean, num_turns/mean"
    return metrics.get("reward/valid_action/mean", 1.0), "reward/valid_action/mean"
