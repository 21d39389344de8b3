"""Warns once a run goes wrong: steps in a row that teach nothing, an engine that samples from other probabilities.

The start says if the episodes of a validation may be long; a validation prints some of its samples.
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerBase

from configs.checks import plural
from configs.errors import notice
from configs.extras import has
from configs.import_utils import find
from configs.schema import Config
from data.protocol import DataProto
from data.types import Observer
from extras.watch.settings import Settings
from extras.watch.shown_samples import print_samples

MEAN_MISMATCH, MAX_MISMATCH_RATIO = "rollout_mismatch/abs_log_prob_diff", "rollout_mismatch/max_ratio"
FAR = 10  # times as likely to one as to the other: such a token is a mistake, and no matter of precision
SHOWN = 2  # responses that are printed of a step that taught nothing
ENTROPY_COEFF = 0.2  # to try where a policy has to look further; twice the weight in use where that is more
LONG_EPISODE = 1000  # tokens, one after the other: an untrained model may write them all
MOST_OF_OTHERS = 0.8  # of a step's tokens that are the environment's, while most answers are no legal action
STRAY = 0.05  # of the rows, or of the range of scores: so few are taken for stray samples, and not for a signal

logger = logging.getLogger(__name__)


class Watch(Observer):
    """Looks at every step of reinforcement learning, and warns of what goes wrong."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.has_stepped = False
        settings, self.alarms = run.config.trainer, []
        if isinstance(settings, Settings):
            entropy_coeff, asks = run.config.actor_rollout_ref.actor.entropy_coeff, partial(compare_moves, run)
            self.alarms = [
                NoSignal(settings.no_signal_steps, run.tokenizer, entropy_coeff, asks),
                MismatchAlarm(settings.max_rollout_mismatch, run.config.algorithm.get("rollout_correction")),
            ]

    def started(self, step: int) -> None:
        if self.alarms and self.run.env_setup is not None:
            say_length(self.run.config, self.run.env_setup.environment)
        moves = compare_moves(self.run) if self.alarms else None
        if moves is not None and moves.teach_nothing:
            notice(moves.advice("training states"))

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        if batch is not None:
            if self.alarms and self.run.env_setup is not None and not self.has_stepped:
                say_whose_tokens(self.run, metrics)
            self.has_stepped = True
            for alarm in self.alarms:
                alarm.check(metrics, batch)

    def validated(self, step: int, batches: Sequence[DataProto], metrics: Mapping[str, float]) -> None:
        if self.alarms:
            for batch in batches:
                shown = self.run.config.trainer.log_val_generations
                print_samples(f"validation at step {step}", batch, self.run.tokenizer, shown)


def say_length(config: Config, environment: Any) -> None:
    """Says how long a validation may be, if its episodes may take thousands of tokens, one after the other."""
    env, rollout = config.env, config.actor_rollout_ref.rollout
    turns = environment.max_turns if "max_turns" in dir(environment) else 1  # one of the user's need not say it
    tokens = rollout.multi_turn.max_tokens_per_turn or rollout.response_length
    in_one_response = env.mode == "episode" and env.history == "transcript"
    if env.val_episodes and not in_one_response and turns * tokens >= LONG_EPISODE:
        notice(
            f"a validation plays {plural(env.val_episodes, 'episode')} of up to {plural(turns, 'answer')} of up to "
            f"{plural(tokens, 'token')} each, and may take long: env.max_turns and data.max_response_length bound it, "
            "trainer.test_freq and trainer.val_before_train say when there is one."
        )


@runtime_checkable
class CommentsAnswers(Protocol):
    """An environment that says something of an answer without a legal action."""

    invalid_feedback: str


def say_whose_tokens(run: Any, metrics: Mapping[str, float]) -> None:
    """Says if the tokens of transcripts are mostly the environment's because most answers are no legal action."""
    shown, answered = (metrics.get(f"episode/tokens/{role}/mean", 0.0) for role in ("observation", "policy"))
    legal, _ = readable_answers(metrics)
    if legal >= 0.5 or shown <= MOST_OF_OTHERS * (shown + answered):
        return
    environment = run.env_setup.environment
    comment = environment.invalid_feedback if isinstance(environment, CommentsAnswers) else ""
    length = len(run.tokenizer.encode(f"{comment}\n", add_special_tokens=False)) if comment else 0
    comments = min(shown, metrics["invalid_actions/mean"] * length) / (shown + answered)
    notice(
        f"{shown / (shown + answered):.0%} of the tokens of this step are the environment's, as {1 - legal:.0%} of the "
        f"answers are no legal action; {comments:.0%} are what it says of these. Train on single states first, and on "
        "episodes from that checkpoint (docs/multiturn.md); env.kwargs.invalid_feedback='' says nothing, and "
        "env.invalid_action=end ends an episode there."
    )


def compare_moves(run: Any, batch: DataProto | None = None) -> Any | None:
    """Compares what moves are paid in the states of a batch, by default in training states (extras/gym/actions.py).

    None: the run has no such states, or nobody can say.
    """
    env = run.config.env
    if env.id is None or env.mode != "step" or not has("environment", "moves"):
        return None
    infos = None if batch is None else batch.non_tensor_batch.get("extra_info", ())
    states = infos if infos is None else [info["state"] for info in infos if info and "state" in info]
    return find("environment", "moves")(run.reward, states)


class MismatchAlarm:
    """Warns once when the mean |Δ log-prob| of a step is above `limit`, and again after a step that was not.

    Steps that measure nothing (a critic's warm-up, an engine without log-probs) change nothing, nor do those that learn
    from tokens of older weights (extras/overlap), which differ by design; None: never. `correction` is the section
    algorithm.rollout_correction; None: this copy has none.
    """

    def __init__(self, limit: float | None, correction: Any = None) -> None:
        self.limit, self.is_corrected = limit, correction is not None and correction.corrects
        self.raised = False

    def check(self, metrics: Mapping[str, float], batch: DataProto) -> None:
        """Looks at a step's metrics."""
        if self.limit is None or MEAN_MISMATCH not in metrics or metrics.get("staleness/max"):
            return
        too_far = not metrics[MEAN_MISMATCH] <= self.limit  # NaN is too far as well
        if too_far and not self.raised:
            logger.warning(
                "%s is %.3g nats a token, above trainer.max_rollout_mismatch=%g: the engine samples from other "
                "probabilities than the policy has. Often: top_p or top_k, which only the engine applies; its lower "
                "precision. %s",
                MEAN_MISMATCH, metrics[MEAN_MISMATCH], self.limit, self.remedy(metrics),
            )  # fmt: skip
        self.raised = too_far

    def remedy(self, metrics: Mapping[str, float]) -> str:
        """Names the preset that corrects such a mismatch: by sequence where single tokens are far off, as they spoil
        the responses that they stand in, else by token (docs/algorithms.md, An experiment)."""
        if self.is_corrected:
            return "algorithm.rollout_correction is set, and weighs or drops what differs."
        is_far = not metrics.get(MAX_MISMATCH_RATIO, 1) <= FAR
        preset = "decoupled_seq_is" if is_far else "decoupled_token_is"
        shape = f"single tokens are more than {FAR} times as likely" if is_far else "all tokens differ a little"
        return f"Set algorithm.rollout_correction={preset}, as {shape}."


class NoSignal:
    """Warns when at most STRAY of the rows of the last `limit` steps had anything to teach; 0: never.

    A row teaches if it has an advantage other than 0; of a step whose scores are all equal none does. The warning names
    the likeliest cause, and the best and the worst response of the last step are printed. A run that learns slowly has
    many such stretches: it warns of the 1st, the 10th, the 100th and the 1000th. `asks` compares what moves are paid in
    the states of a batch.
    """

    def __init__(
        self,
        limit: int,
        tokenizer: PreTrainedTokenizerBase,
        entropy_coeff: float = 0.0,
        asks: Callable[[DataProto], Any | None] = lambda batch: None,
    ) -> None:
        self.limit, self.tokenizer, self.entropy_coeff, self.asks = limit, tokenizer, entropy_coeff, asks
        self.taught: deque[float] = deque(maxlen=limit)  # shares of rows
        self.is_silent, self.times = False, 0

    def check(self, metrics: Mapping[str, float], batch: DataProto) -> None:
        """Counts a step, by its metrics and the batch that it learnt from."""
        teaches = ((batch.advantages != 0) & batch.response_mask.bool()).any(1)
        self.taught.append(0.0 if teaches_nothing(metrics) else teaches.float().mean().item())
        silent = len(self.taught) == self.limit > 0 and sum(self.taught) <= STRAY * self.limit
        begins, self.is_silent = silent and not self.is_silent, silent
        self.times += begins
        if begins and self.times in (1, 10, 100, 1000):
            again = f", for the {self.times}th time" if self.times > 1 else ""
            cause = likeliest_cause(metrics, self.entropy_coeff, self.asks(batch))
            logger.warning("%d steps in a row taught nothing%s (trainer.no_signal_steps): %s", self.limit, again, cause)
            print_samples("of a step that taught nothing", batch, self.tokenizer, SHOWN)


def teaches_nothing(metrics: Mapping[str, float]) -> bool:
    """Says whether all scores of a step are equal, all advantages 0, or there is none of either."""
    if "critic/advantages/max" not in metrics:
        return True
    scores_tie = metrics["critic/score/max"] == metrics["critic/score/min"]
    return scores_tie or metrics["critic/advantages/max"] == metrics["critic/advantages/min"] == 0


def likeliest_cause(metrics: Mapping[str, float], entropy_coeff: float = 0.0, moves: Any | None = None) -> str:
    """Explains why a step taught nothing, and what to do about it: the first of the known causes that fits.

    `entropy_coeff` is the weight in use, above which the advice lies; `moves` compares those of the step's states.
    """
    late, broken = (int(metrics.get(f"reward/{outcome}", 0)) for outcome in ("timeout", "error"))
    if late or broken:
        return (
            f"{late} responses were not scored in time, and {broken} by an error or no number (see the warnings). "
            "Mend the function, which `python -m extras.try_reward` tries, or raise reward.timeout."
        )
    if "critic/score/max" not in metrics:
        return "every rollout failed (response/aborted_ratio is 1). Look at end_reason/… in metrics.jsonl."
    if moves is not None and moves.teach_nothing:
        return moves.advice("states of this step")
    cut = f"{metrics['response_length/clip_ratio']:.0%} of the responses reach data.max_response_length"
    least, best, mean = (metrics[f"critic/score/{name}"] for name in ("min", "max", "mean"))
    if unreadable := lack_of_actions(metrics, moves is not None, cut):
        return unreadable
    if room := lack_of_room(metrics):
        return room
    if STRAY * (best - least) < mean - least < (1 - STRAY) * (best - least):
        return (
            "the samples of a prompt always score alike. Raise actor_rollout_ref.rollout.n or the temperature, use a "
            "reward that tells answers apart, or set "
            f"actor_rollout_ref.actor.entropy_coeff={max(ENTROPY_COEFF, 2 * entropy_coeff):g}: see "
            "docs/environments.md (What a small model learns)."
        )
    reads_actions = "reward/valid_action/mean" in metrics
    long = metrics["response_length/max"] > 1 and metrics["response_length/clip_ratio"] > 0.5
    if least == best and (best > 0 or (best < 0 and not reads_actions)):
        wrong = f"no answer is right{f', or all are cut: {cut}' if long else ''}"
        return (
            f"the reward returns {best:g} for every response. Does it read the response (python -m extras.try_reward)? "
            f"If it does, {'the task is mastered' if best > 0 else wrong}."
        )
    score, all_of = best if 2 * mean > least + best else least, "nearly every" if best > least else "every"
    if long and not reads_actions:
        return f"{all_of} response scores {score:g}, and {cut} and may be cut before they answer: raise it."
    return (
        f"{all_of} response scores {score:g}. The reward is the same for all answers, it is too rare to be found by "
        "chance, the model is too small to read the state, or the task is mastered: see docs/environments.md (The "
        "training prompts; What a small model learns)."
    )


def lack_of_actions(metrics: Mapping[str, float], differ: bool, cut: str) -> str:
    """Says that hardly any response is an action, or that those which are earn no other score, unless it is known that
    moves `differ`; else ""."""
    readable, source = readable_answers(metrics)
    if readable >= 0.1:
        return ""
    if readable and not differ and metrics["critic/score/min"] == metrics["critic/score/max"]:
        return (
            f"the {readable:.0%} of the responses that were legal actions ({source}) earned what the others did. The "
            "reward does not tell moves apart, or is too rare to be found by chance: see docs/environments.md (The "
            "training prompts)."
        )
    return (
        f"{readable:.0%} of the responses could be read as an action ({source}; {cut}). Make text_to_action more "
        "lenient, give responses more room, or start from a model that knows the format (python -m extras.imitate)."
    )


def lack_of_room(metrics: Mapping[str, float]) -> str:
    """Says that most episodes of several turns ended for want of room, and which settings give more; else ""."""
    if "episode/tokens/policy/mean" not in metrics:
        return ""
    ends = {reason: metrics.get(f"end_reason/{reason}", 0.0) for reason in ("context_full", "max_tokens")}
    if (cut := metrics.get("end_reason/answer_cut", 0.0)) > 0.5:
        return (
            f"most episodes end by an answer that its own limit has cut, {cut:.0%} with end_reason answer_cut. Raise "
            "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn, or the max_tokens that a program asks for."
        )
    if sum(ends.values()) <= 0.5:
        return ""
    shares = " and ".join(f"{share:.0%} with end_reason {reason}" for reason, share in ends.items() if share)
    return (
        f"most episodes end for want of room, {shares}. Raise data.max_response_length, which holds a transcript "
        "(with env.history=turns data.max_prompt_length, which holds each prompt)."
    )


def readable_answers(metrics: Mapping[str, float]) -> tuple[float, str]:
    """Returns the share of answers that were an action (1: unknown), and the names of its metrics."""
    if metrics.get("num_turns/mean") and "invalid_actions/mean" in metrics:
        invalid = metrics["invalid_actions/mean"] / metrics["num_turns/mean"]  # of parallel calls there may be more
        return max(0.0, 1 - invalid), "invalid_actions/mean, num_turns/mean"
    return metrics.get("reward/valid_action/mean", 1.0), "reward/valid_action/mean"
