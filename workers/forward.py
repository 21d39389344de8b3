"""Defines the hook `forward`: how models are computed. The core's leaves them to PyTorch and transformers."""

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
        trial: tries whether a forward is to be used.
    """

    trial: type[Trial] = Trial

    def start_process(self) -> None:
        """Sets up a process that is ours alone, before anything is loaded."""

    def release_memory(self) -> None:
        """Gives back what loading has left behind."""

    def prepare(self, model: PreTrainedModel) -> Callable[..., Any] | None:
        """Exchanges layers of `model`, of the same names and weights. Returns a forward, (model, micro, temperature,
        ask) → TokenScores, that takes each prompt once and is to be tried; None: there is no other than the padded."""
        return None

    def batches(self, model: PreTrainedModel, config: RolloutConfig) -> tuple[type, ...]:
        """Lists the kinds of `RunningBatch` by which `model` may generate, the fast ones first, to be tried; none: the
        engine's own."""
        return ()


def forward_of(settings: ModelConfig) -> Forward:
    """Finds the forward that model.kernels names; auto: that of extras/kernels, where it is."""
    return find("forward", "kernels" if settings.kernels == "auto" and has("forward", "kernels") else "off")()
