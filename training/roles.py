"""What the training loop asks of its workers: four roles of a few verbs each.

`training/` knows only these; `workers/` implements them, in this process or behind Ray.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from configs.schema import RolloutConfig, SamplingConfig
from data.protocol import DataProto


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn; spelt out, never inherited from a model's generation_config."""

    do_sample: bool
    temperature: float
    top_k: int  # -1: off
    top_p: float  # 1: off
    max_tokens: int

    @classmethod
    def from_config(cls, config: RolloutConfig | SamplingConfig, max_tokens: int) -> "SamplingParams":
        sampled = config.do_sample and config.temperature > 0
        return cls(sampled, config.temperature, config.top_k, config.top_p, max_tokens)


class Rollout(Protocol):
    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        """Responses to every row of `prompts` (column raw_prompt_ids), as the columns of a rollout; all of a call's
        draws come from `seed`."""

    def update_weights(self, step: int) -> None:
        """Makes the engine sample from the actor's present weights."""


class Actor(Protocol):
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Columns old_log_probs and entropys, [B, R] float32."""

    def update_policy(self, batch: DataProto) -> dict[str, float]:
        """One optimiser step on one mini-batch, and its metrics."""

    def save(self, folder: Path) -> None:
        """Writes the role's part of a checkpoint."""

    def load(self, folder: Path) -> None:
        """Restores it."""


class Reference(Protocol):
    def compute_log_prob(self, batch: DataProto) -> DataProto:
        """Column ref_log_prob, [B, R] float32."""


class Critic(Protocol):
    def compute_values(self, batch: DataProto) -> DataProto:
        """Column values, [B, R] float32."""

    def update_critic(self, batch: DataProto) -> dict[str, float]:
        """One optimiser step on one mini-batch, and its metrics."""

    def save(self, folder: Path) -> None:
        """Writes the role's part of a checkpoint."""

    def load(self, folder: Path) -> None:
        """Restores it."""


@dataclass
class Roles:
    """Who does the work; ref and critic only where the algorithm needs them."""

    rollout: Rollout
    actor: Actor
    ref: Reference | None
    critic: Critic | None
    num_workers: int = 1  # over which throughput is divided
