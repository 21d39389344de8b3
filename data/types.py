"""The data types of a rollout, to be read first: from the row of a data set to the row that is trained on.

A `Row` of the data set has a prompt. The policy's turns about it are `Request`s, drawn by `SamplingParams`, and an
engine answers each by a `Completion`. An environment, a tool or a user says by a `Reply` how the episode goes on. What
was said becomes a `Sample`, a list of tokens, or several; `data.padding.collate` makes of them the columns of a
DataProto (data/protocol.py).
"""

import reprlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from configs.schema import Config, SamplingConfig

if TYPE_CHECKING:
    from data.protocol import DataProto

# A row of a data set: all columns of its file, and raw_prompt (text, or chat messages), raw_prompt_ids (its token ids,
# with the generation prompt), data_source, extra_info, index; agent_name and reward_model.ground_truth, if it has them.
Row = dict[str, Any]
Message = dict[str, Any]  # of a chat: role, content
Metrics = dict[str, float]  # by name, of a step
Score = float | dict[str, Any]  # of a response, by a reward: a number, or a dict with it as score, and what is logged

# How a row, or an episode, ended: each name is a metric, end_reason/NAME.
ENVIRONMENT_FAILURES = ("env_error", "timeout")  # the environment's fault, or a tool's
FAILED_END_REASONS = (*ENVIRONMENT_FAILURES, "aborted", "reward_timeout", "reward_error")  # the row measures nothing
LIMITS = ("env_truncated", "max_turns", "max_tokens", "context_full", "answer_cut")  # the last: by its own limit
END_REASONS = ("terminated", *LIMITS, *FAILED_END_REASONS)
LARGEST_REWARD = 1e30  # sums of such still fit float32
END_REASON_OF = {"stop": "terminated", "length": "max_tokens", "aborted": "aborted"}  # by an engine's finish_reason


@dataclass(frozen=True)
class NotScored:
    """A reward's result for a row that it could not score: `outcome` is timeout or error, `reason` says why."""

    outcome: str
    reason: str
    trace: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """The settings by which tokens are drawn; spelt out, never inherited from a model's generation_config."""

    do_sample: bool
    temperature: float
    top_k: int  # -1: off
    top_p: float  # 1: off
    max_tokens: int
    min_p: float = 0.0  # 0: off
    stop_token_ids: tuple[int, ...] = ()  # that end a response, beside the engine's own

    @classmethod
    def from_config(cls, config: SamplingConfig, max_tokens: int) -> "SamplingParams":
        return cls(*config.draws(), config.top_k, config.top_p, max_tokens, config.min_p)


@dataclass(frozen=True)
class Request:
    """A prompt to be answered; its draws depend on `seed` alone, and no other request in flight has this `id`.

    `episode`: whose next turn may follow this one, by a prompt that begins with this one's and its response. An engine
    may keep what it has computed until then, or `forget` is called.
    """

    id: int
    prompt_ids: list[int]  # PromptIds, where the prompt shows media
    sampling: SamplingParams
    seed: int
    piecewise: bool = False  # whether its tokens are asked for while it runs, by tokens_so_far
    episode: Hashable | None = None


@dataclass(frozen=True)
class Completion:
    """The response to the request `id`; `log_probs` are of the sampled tokens, after temperature, top-k and top-p."""

    id: int
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop" (the last id is a stop id), "length" or "aborted"
    weight_version: int | list[int]  # of all tokens, or of each, where weights changed meanwhile

    def __post_init__(self) -> None:
        if self.finish_reason not in END_REASON_OF:
            reasons = ", ".join(END_REASON_OF)
            raise ValueError(f"request {self.id} finished with finish_reason={self.finish_reason!r}, not of {reasons}.")


@dataclass(frozen=True)
class Reply:
    """The other side's reply to an answer of the policy.

    The policy goes on by `messages`, which are appended to all that was said, or by `prompt_ids`, a prompt of its own
    (the next turn is then a row of its own). Neither is read where there is an `end_reason`; where none of
    these is given, the answer was the last.

    Raises:
        ValueError, TypeError: the reward is no finite number, or the content of a message no text that can be encoded.
    """

    messages: list[Message] = field(default_factory=list)
    prompt_ids: list[int] | None = None
    reward: float = 0.0  # earned by the answer, and placed on its last token
    end_reason: str | None = None
    columns: Row = field(default_factory=dict)  # of the episode's rows, as they stand now: success, …

    def __post_init__(self) -> None:
        check_reward(self.reward)
        for message in self.messages:
            check_text(message.get("content"), " ".join(filter(None, (message["role"], message.get("name")))))


def check_reward(reward: float) -> None:
    """Raises ValueError or TypeError for a reward that is no finite number."""
    if not -LARGEST_REWARD < reward < LARGEST_REWARD:  # false for NaN, too
        raise ValueError(f"the reward {reward} is no finite number below {LARGEST_REWARD:g}")


def check_text(text: Any, speaker: str) -> None:
    """Raises ValueError for what `speaker` says if it is no text, or one that no tokenizer encodes."""
    if not isinstance(text, str):
        raise ValueError(f"the {speaker} says {reprlib.repr(text)}, which is no text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"the {speaker} says a text that cannot be encoded: {half!r} at place {error.start} is half a character. "
            "Decode bytes with errors='replace'"
        ) from None


PER_TOKEN = ("token_ids", "policy_mask", "log_probs", "weight_versions", "rewards", "turns")


@dataclass
class Sample:
    """One training row: a prompt, and everything that came after it, from an answer or a whole episode.

    The lists from `token_ids` to `turns` have one entry a token of the response; `extend` alone makes them longer.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    policy_mask: list[int] = field(default_factory=list)  # 1: the policy's; 0: of an observation, a tool
    log_probs: list[float] = field(default_factory=list)  # of the sampled tokens, as drawn; 0 for the others
    weight_versions: list[int] = field(default_factory=list)  # of the weights that a token was sampled from
    rewards: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)  # of an episode, from 0; an observation is of the turn it follows
    end_reason: str | None = None  # one of END_REASONS
    extras: Row = field(default_factory=dict)  # further columns of the row

    def __post_init__(self) -> None:
        lengths = {name: len(vars(self)[name]) for name in PER_TOKEN}
        assert len(set(lengths.values())) == 1, f"the lists of a sample have one entry a token each, not {lengths}"

    def extend(
        self,
        token_ids: Sequence[int],
        log_probs: Sequence[float] | None,
        policy: bool,
        weight_version: int | Sequence[int] = 0,
        turn: int = 0,
    ) -> None:
        """Appends tokens, with rewards of 0; `log_probs` None: nobody sampled them."""
        count = len(token_ids)
        log_probs = [0.0] * count if log_probs is None else log_probs
        assert len(log_probs) == count, f"{count} tokens with {len(log_probs)} log-probs: there is one a token"
        self.token_ids += token_ids
        self.policy_mask += [int(policy)] * count
        self.log_probs += log_probs
        self.weight_versions += [weight_version] * count if isinstance(weight_version, int) else weight_version
        self.rewards += [0.0] * count
        self.turns += [turn] * count

    def until(self, length: int) -> "Sample":
        """Returns this prompt with the first `length` tokens of its response, and all that is known of each."""
        return replace(self, **{name: vars(self)[name][:length] for name in PER_TOKEN})

    def fail(self) -> None:
        """Takes the sample out of training: its tokens stay to be looked at, with a mask and rewards of 0."""
        self.policy_mask, self.rewards = [0] * len(self.token_ids), [0.0] * len(self.token_ids)


class Stage:
    """Does a part of the step that a run can do without: adds columns to the batch, and returns metrics.

    A run whose settings ask for it (the names of the table) makes one with its trainer, and calls it at its place.

    Attributes:
        at: "scored": a batch of responses has its scores (each draw of dynamic sampling, ReMax's greedy responses);
            "prepared": the columns of roles are there; "advantaged": the advantages are.
        state: what it keeps from step to step, and checkpoints do: plain values, bytes and tensors by name.
    """

    at: ClassVar[str]

    @classmethod
    def check(cls, config: Config) -> None:
        """Raises ConfigError for what cannot work; called before a model is loaded."""

    @classmethod
    def reads(cls, config: Config) -> set[str]:
        """Names the columns of roles that it reads."""
        return set()

    @classmethod
    def makes(cls, config: Config) -> set[str]:
        """Names the columns that it makes for the loss, or in place of a role, which is not asked for them."""
        return set()

    @classmethod
    def loss_settings(cls, config: Config) -> dict[str, Any]:
        """Returns what is laid over actor.policy_loss: settings for a loss, and the loss_mode of one that it brings."""
        return {}

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.config, self.state = trainer, trainer.config, {}

    def __call__(self, batch: "DataProto", timing: dict[str, float]) -> Metrics:
        """Works on `batch` in place; the seconds of its parts go to `timing`."""
        raise NotImplementedError


class Observer:
    """Watches a run, from configs/extras.py or trainer.logger; a method that it does not need does nothing.

    Args:
        run: training/run.py's Run, with config, tokenizer, folder, total_steps and global_step.
    """

    decides = False  # whether the run depends on it: one that only watches is left out after an OSError of `stepped`

    def __init__(self, run: Any) -> None:
        self.run = run

    @classmethod
    def check(cls, config: Any) -> None:
        """Raises ConfigError for a setting that cannot work, before anything is loaded."""

    def started(self, step: int) -> None:
        """Begins after `step`: 0, or that of the checkpoint it goes on from; trainer.val_only begins nothing."""

    def stepped(self, step: int, batch: "DataProto | None", metrics: Metrics) -> None:
        """Takes the batch of a finished step (None: what was measured before training) and all its metrics."""

    def validated(self, step: int, batches: "Sequence[DataProto]", metrics: Metrics) -> None:
        """Takes the scored answers of a validation, before its step; may set run.save_requested and run.stop_reason."""

    def ended(self, error: BaseException | None) -> None:
        """Closes what it has open; `error` has ended the run, KeyboardInterrupt for a signal."""
