"""Settings of a server as the engine: actor_rollout_ref.rollout.engine_kwargs.openai."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from configs.errors import ConfigError
from configs.process import read_key
from configs.schema import RolloutConfig

KEY = "actor_rollout_ref.rollout.engine_kwargs.openai"
WEIGHT_TRANSFERS = ("shared_memory", "nccl")


@dataclass(frozen=True)
class OpenAISettings:
    """Settings of an OpenAI-compatible server as the engine.

    Attributes:
        base_url: the beginning of its addresses, e.g. http://127.0.0.1:8000/v1.
        api_key: the key that the server requires; None: it requires none.
        api_key_env: the environment variable that holds it.
        model: the name of the model on the server; None: it has only one.
        timeout: seconds that a response may take.
        weights_folder: folder in memory shared by this node's processes, through which weights are passed.
        weight_transfer: the way of weights to the server: shared_memory on one node; nccl: from GPU to GPU, by vLLM.
        weights_address: with nccl, this node's address for the server's workers; None: that of its own requests.
        weights_timeout: seconds that the server may take to receive a part of the weights, and to connect.
    """

    base_url: str
    api_key: str | None = None
    api_key_env: str | None = None
    model: str | None = None
    timeout: float = 3600.0
    weights_folder: str = "/dev/shm"
    weight_transfer: str = "shared_memory"
    weights_address: str | None = None
    weights_timeout: float = 600.0


def openai_settings(rollout: RolloutConfig) -> OpenAISettings:
    """Reads the settings. Raises ConfigError for a base_url that is no address, and for unknown keys and values."""
    options, names = rollout.engine_kwargs.get("openai") or {}, [field.name for field in fields(OpenAISettings)]
    if not isinstance(options, Mapping) or not set(options) <= set(names):
        shown = [*options] if isinstance(options, Mapping) else options  # keys alone: a value may be the api_key
        raise ConfigError(f"{KEY}={shown}: it holds {', '.join(names)}, and nothing else.")
    if not str(options.get("base_url")).startswith(("http://", "https://")):
        raise ConfigError(f"{KEY}.base_url={options.get('base_url')}: set the server's address, http://… or https://….")
    settings = OpenAISettings(**options)
    if settings.weight_transfer not in WEIGHT_TRANSFERS:
        known = ", ".join(WEIGHT_TRANSFERS)
        raise ConfigError(f"{KEY}.weight_transfer={settings.weight_transfer} is none of {known}.")
    return replace(settings, api_key=read_key(vars(settings), KEY))
