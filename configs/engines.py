"""Which engine generates, and whether it can: checked before torch is imported."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec

from configs.errors import ConfigError
from configs.loader import notice
from configs.paths import find_path
from configs.schema import RolloutConfig

ENGINES = ("hf", "vllm", "sglang", "openai")
ENGINES_ELSEWHERE = ("trtllm",)
WEIGHT_TRANSFERS = ("shared_memory", "nccl")
VLLM_SETTINGS = (
    "gpu_memory_utilization",
    "free_cache_engine",
    "enforce_eager",
    "max_model_len",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "load_format",
    "tensor_model_parallel_size",
)


@dataclass(frozen=True)
class OpenAISettings:
    """Which server answers, and how it is asked: actor_rollout_ref.rollout.engine_kwargs.openai.

    Attributes:
        base_url: where its API begins, e.g. http://127.0.0.1:8000/v1.
        api_key: what it asks for; None: nothing.
        model: which of its models; None: its only one.
        timeout: seconds that a response may take.
        weights_folder: where weights are handed over: in memory that this node's processes share.
        weight_transfer: how weights get to the server: shared_memory on one node; nccl: from GPU to GPU, by vLLM.
        weights_address: with nccl, where the server's workers reach this node; null: whence it asks the server.
        weights_timeout: seconds that the server may take for a part of the weights, and to connect.
    """

    base_url: str
    api_key: str | None = None
    model: str | None = None
    timeout: float = 3600.0
    weights_folder: str = "/dev/shm"
    weight_transfer: str = "shared_memory"
    weights_address: str | None = None
    weights_timeout: float = 600.0


def openai_settings(rollout: RolloutConfig) -> OpenAISettings:
    """Raises ConfigError if base_url is missing or no address, or weight_transfer is unknown, or something else set."""
    key, given = "actor_rollout_ref.rollout.engine_kwargs.openai", rollout.engine_kwargs.get("openai") or {}
    names = [field.name for field in fields(OpenAISettings)]
    if not isinstance(given, Mapping) or not set(given) <= set(names):
        shown = [*given] if isinstance(given, Mapping) else given  # not the key, if there is one
        raise ConfigError(f"{key}={shown}: it holds {', '.join(names)}, and nothing else.")
    if not str(given.get("base_url")).startswith(("http://", "https://")):
        raise ConfigError(
            f"{key}.base_url={given.get('base_url')}: rollout.name=openai asks a server, whose address this is, with "
            "http:// or https://. `python -m training.main_server` starts one (docs/engines.md)."
        )
    settings = OpenAISettings(**given)
    if settings.weight_transfer not in WEIGHT_TRANSFERS:
        raise ConfigError(
            f"{key}.weight_transfer={settings.weight_transfer} is none of {', '.join(WEIGHT_TRANSFERS)}: shared_memory "
            "for a server on the trainer's node, nccl for one on other GPUs."
        )
    return settings


def check_engine(rollout: RolloutConfig, workers: int) -> None:
    """Raises ConfigError for an engine that there is not, or that cannot do what is set; `workers`: of the run."""
    key, name = "actor_rollout_ref.rollout", rollout.name
    if name in ENGINES_ELSEWHERE:
        raise ConfigError(
            f"{key}.name={name}: that engine is not part of this version. Use hf (the model itself generates), vllm, "
            "sglang, openai (a server), or the path of a file with a Rollout subclass of yours."
        )
    if name not in ENGINES and not find_path(name).is_file() and "." not in name:
        raise ConfigError(
            f"{key}.name={name} is none of {', '.join(ENGINES)}, nor a file, nor a dotted module with a Rollout "
            "subclass."
        )
    if name == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            f"{key}.name=vllm: vLLM is not installed here. `make setup-vllm` installs it, for the GPU if there is one, "
            f"else for the CPU; or set {key}.name=hf: the model itself generates."
        )
    if name == "sglang" and find_spec("sglang") is None:
        raise ConfigError(
            f"{key}.name=sglang: SGLang is not installed here. It brings a torch of its own: give it an environment "
            f"(docs/engines.md), or set {key}.name=hf or vllm."
        )
    if name == "openai":
        openai_settings(rollout)
    if name == "vllm" and workers % rollout.tensor_model_parallel_size:
        raise ConfigError(
            f"{key}.tensor_model_parallel_size={rollout.tensor_model_parallel_size} does not divide the {workers} "
            "workers of the run (trainer.nnodes × n_gpus_per_node, or × n_workers_per_node): each engine is split over "
            "so many of them. Set it to 1, or to a number that does."
        )
    longest = rollout.prompt_length + rollout.response_length
    if name in ("vllm", "sglang", "openai") and rollout.max_model_len is not None and rollout.max_model_len < longest:
        raise ConfigError(
            f"{key}.max_model_len={rollout.max_model_len} is below prompt_length + response_length = {longest}: leave "
            "it null to follow them, or lower data.max_prompt_length or data.max_response_length."
        )
    plain = {field.name: field.default for field in fields(RolloutConfig)}
    ours = {"hf": VLLM_SETTINGS, "openai": [one for one in VLLM_SETTINGS if one != "max_model_len"]}
    if idle := [one for one in ours.get(name, ()) if rollout[one] != plain[one]]:
        notice(f"{key} sets {', '.join(idle)}, which the vllm engine reads, and name={name} does not.")
