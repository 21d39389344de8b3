"""Defines the hook `adapter`: which weights of the policy are trained. The core's: all of them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from configs.import_utils import find
from configs.schema import ModelConfig, RolloutConfig


class NoAdapter:
    """Trains all weights; the base of adapters, which train added weights instead. A model has it as `model.adapter`.

    Attributes:
        off: a context in which a model computes as before training; None: that needs a copy of the model.
        hint: last sentence of the error of a forward that fails.
    """

    name = ""  # in messages
    off: Callable[[PreTrainedModel], AbstractContextManager] | None = None
    hint = ""

    def __init__(self, settings: ModelConfig | None = None) -> None:
        self.settings = settings

    @classmethod
    def check_settings(cls, settings: ModelConfig, key: str) -> None:
        """Raises ConfigError for settings that cannot work, before a model is loaded; `key` names their section."""

    def is_sent_alone(self, rollout: RolloutConfig) -> bool:
        """Says whether an engine is sent the adapter alone, and applies it itself, instead of the merged weights."""
        return False

    def add(self, model: PreTrainedModel) -> None:
        """Adds the adapter to the layers of `model`, before it is sharded and has weights."""

    def start(self, model: PreTrainedModel) -> None:
        """Initialises the weights that `add` has added, after all others are loaded."""

    def check(self, model: PreTrainedModel, log_probs: Callable[[PreTrainedModel], Tensor], limit: float) -> None:
        """Checks that `weights` compute what `model` does; raises ValueError if log-probs differ by `limit`."""

    def weights(self, model: PreTrainedModel, merged: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and this rank's shard of every weight of the plain model, tied ones under each of their
        names. All ranks iterate them.

        Args:
            merged: whether the adapter is merged into them; False: as before training.
        """
        for name, value in model.state_dict(keep_vars=True).items():
            yield name, value.detach()

    def is_adapter_weight(self, name: str) -> bool:
        """Says whether the parameter of this name belongs to the adapter."""
        return False

    def adapter_weights(self, model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
        """Yields the name, as in its files, and the full value of each adapter weight, on all ranks."""
        return iter(())

    def scales(self, model: PreTrainedModel) -> dict[str, float]:
        """Returns the factors, other than 1, by which an engine that applies the adapter multiplies parameters."""
        return {}

    def saved_name(self, name: str) -> str:
        """Returns the name that an adapter weight has in its files."""
        return name

    def plain_name(self, name: str) -> str:
        """Returns the name that a parameter has in the plain model."""
        return name

    def save(self, model: PreTrainedModel, weights: dict[str, Tensor], folder: Path) -> None:
        """Writes the configs of `folder`/huggingface, and the adapter's `weights` beside it."""
        model.save_pretrained(folder / "huggingface", state_dict={})


def adapter_of(settings: ModelConfig) -> NoAdapter:
    """Makes the adapter that the settings of a policy name."""
    return find("adapter", settings.adapter)(settings)
