"""Defines the hook `adapter`: which weights of the policy are trained. The core's: all of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from configs.import_utils import find
from configs.schema import ModelConfig, RolloutConfig


class NoAdapter:
    """Trains all weights; the base of what trains others in their stead. A model carries its own as `model.adapter`.

    Attributes:
        off: the block in which a model computes what it did before training; None: it needs a copy for that.
        hint: ends the error of a forward that fails.
    """

    name = ""  # as the user knows it
    off: Callable[[PreTrainedModel], AbstractContextManager] | None = None
    hint = ""

    def __init__(self, settings: ModelConfig | None = None) -> None:
        self.settings = settings

    @classmethod
    def check_settings(cls, settings: ModelConfig, key: str) -> None:
        """Raises ConfigError for settings that cannot work, before a model is loaded; `key` names their section."""

    def is_sent_alone(self, rollout: RolloutConfig) -> bool:
        """Says whether an engine is sent what was added, and adds it itself, in place of the whole weights."""
        return False

    def add(self, model: PreTrainedModel) -> None:
        """Changes the layers of `model`, before it is spread and has weights."""

    def start(self, model: PreTrainedModel) -> None:
        """Gives what `add` has added its first numbers, once all others are loaded."""

    def check(self, model: PreTrainedModel, log_probs: Callable[[PreTrainedModel], Tensor], limit: float) -> None:
        """Tries whether `weights` compute what `model` does; raises ValueError where log-probs differ by `limit`."""

    def weights(self, model: PreTrainedModel, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields name and value of every weight of the plain model that computes the same, this rank's part, tied ones
        under each of their names. All ranks go through them.

        Args:
            merged: False: of the model as it was before training.
        """
        for name, value in model.state_dict(keep_vars=True).items():
            yield name, value.detach()

    def is_adapter_weight(self, name: str) -> bool:
        """Says whether a parameter of this name was added."""
        return False

    def adapter_weights(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and full value of each weight that was added, as its files have it, on all ranks."""
        return iter(())

    def scales(self, model: PreTrainedModel) -> dict[str, float]:
        """Returns the factors by which an engine that adds them itself multiplies parameters, where that is not 1."""
        return {}

    def saved_name(self, name: str) -> str:
        """Returns the name that a parameter which was added has in its files."""
        return name

    def plain_name(self, name: str) -> str:
        """Returns the name that a parameter has in the plain model."""
        return name

    def save(self, model: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> None:
        """Writes the configs of `folder`/huggingface, and beside it what `adapter_weights` gave."""
        model.save_pretrained(folder / "huggingface", state_dict={})


def adapter_of(settings: ModelConfig) -> NoAdapter:
    """Returns what the settings of a policy ask for."""
    return find("adapter", settings.adapter)(settings)
