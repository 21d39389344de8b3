"""The roles of workers as the training loop sees them: a few verbs each.

`training/` knows only these; `workers/` implements them, in this process or behind Ray.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from data.protocol import DataProto
from data.types import SamplingParams
from training.mini_batches import Update
from training.reward_function import Loadable


class WorkerError(RuntimeError):
    """A worker in another process failed; the message carries its rank and traceback."""


class Rollout(Protocol):
    """Samples responses from the policy."""

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        """Responses to every row of `prompts` (column raw_prompt_ids), as the columns of a rollout beside its own."""

    def update_weights(self, version: int) -> dict[str, float]:
        """Makes the engine sample from the actor's present weights, which have this number; returns the certificate
        that it does: rollout/weight_version, and, if it was probed, rollout/sync_max_logprob_diff."""

    def score_early(self, functions: Sequence[Loadable]) -> None:
        """Scores responses by these functions of the run's reward while others are generated; they bring the results as
        the column reward_results."""


class Scorer(Protocol):
    """A policy that scores responses: the one in training, or the frozen reference."""

    def compute_log_prob(self, batch: DataProto, temperature: float, columns: Sequence[str]) -> DataProto:
        """Returns the `columns` asked for, of old_log_probs, entropys and sum_pi_squared, or the reference's
        ref_log_prob: [B, R] float32 each, 0 where the policy produced no token."""


class Trained(Protocol):
    """A model in training, which is part of every checkpoint."""

    def save(self, folder: Path, contents: Sequence[str], background: bool) -> None:
        """Writes the parts named in `contents` (model, optimizer, extra, hf_model) into `folder`; in the background it
        returns when they are copied."""

    def is_saved(self) -> bool:
        """Says whether all that `save` was told is written; raises what went wrong with it."""

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote; raises ValueError if a part is missing or unreadable."""

    def checkpoint_bytes(self, contents: Sequence[str]) -> int:
        """Returns the size of what `save` writes of the parts named in `contents`."""


class Actor(Scorer, Trained, Protocol):
    """The policy in training."""

    def update_policy(self, mini_batch: DataProto, update: Update) -> dict[str, float]:
        """Makes one optimiser step; returns its metrics."""

    def compute_loss(self, batch: DataProto, update: Update) -> dict[str, float]:
        """The metrics of the loss that `update_policy` would step on; nothing changes."""


class Critic(Trained, Protocol):
    """The value model in training."""

    def compute_values(self, batch: DataProto) -> DataProto:
        """Column values, [B, R] float32."""

    def update_critic(self, mini_batch: DataProto, update: Update) -> dict[str, float]:
        """Makes one optimiser step; returns its metrics."""


class RewardModel(Protocol):
    """A learned reward model."""

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Column rm_scores, [B] float32."""


@dataclass
class Roles:
    """The roles of a run; ref, critic and rm only where it needs them."""

    rollout: Rollout
    actor: Actor
    ref: Scorer | None = None
    critic: Critic | None = None
    rm: RewardModel | None = None
    num_workers: int = 1  # over which throughput is divided
