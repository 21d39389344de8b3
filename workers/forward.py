"""Defines the hook `forward`: how models compute. The core's leaves that to PyTorch and transformers."""

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from configs.extras import has
from configs.import_utils import find
from configs.schema import ModelConfig, RolloutConfig
from workers.forward_check import Trial


class Forward:
    """Leaves layers as they are, and batches padded; the base of forwards that do more.

    Attributes:
        trial: checks whether a forward may be used.
    """

    trial: type[Trial] = Trial

    def start_process(self) -> None:
        """Sets up a process that only this run uses, before anything is loaded."""

    def release_memory(self) -> None:
        """Releases memory that loading has left allocated."""

    def prepare(self, model: PreTrainedModel) -> Callable[..., Any] | None:
        """Replaces layers of `model`, keeping names and weights. Returns a forward to be tried, (model, micro,
        temperature, ask) → TokenScores, that computes each prompt once; None: there is only the padded one."""
        return None

    def batches(self, model: PreTrainedModel, config: RolloutConfig) -> tuple[type, ...]:
        """Lists the kinds of `RunningBatch` to be tried for generation, the fastest first; none: the engine's own."""
        return ()


def forward_of(settings: ModelConfig) -> Forward:
    """Makes the forward that model.kernels names; auto: that of extras/kernels, if it is present."""
    return find("forward", "kernels" if settings.kernels == "auto" and has("forward", "kernels") else "off")()
