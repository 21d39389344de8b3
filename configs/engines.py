"""Which engine generates, and whether it can: checked before torch is imported."""

from dataclasses import fields
from importlib.util import find_spec

from configs.errors import ConfigError
from configs.loader import notice
from configs.paths import find_path
from configs.schema import RolloutConfig

ENGINES = ("hf", "vllm")
ENGINES_ELSEWHERE = ("sglang", "trtllm")
VLLM_SETTINGS = (
    "gpu_memory_utilization",
    "free_cache_engine",
    "enforce_eager",
    "max_model_len",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "load_format",
)


def check_engine(rollout: RolloutConfig) -> None:
    key, name = "actor_rollout_ref.rollout", rollout.name
    if name in ENGINES_ELSEWHERE:
        raise ConfigError(
            f"{key}.name={name}: that engine is not part of this version. Use hf (the model itself generates), vllm, "
            "or the path of a file with a Rollout subclass of yours."
        )
    if name not in ENGINES and not find_path(name).is_file() and "." not in name:
        raise ConfigError(
            f"{key}.name={name} is neither hf, nor vllm, nor a file, nor a dotted module with a Rollout subclass."
        )
    if name == "vllm" and find_spec("vllm") is None:
        raise ConfigError(
            f"{key}.name=vllm: vLLM is not installed here. `make setup-vllm` installs it, for the GPU if there is one, "
            f"else for the CPU; or set {key}.name=hf: the model itself generates."
        )
    longest = rollout.prompt_length + rollout.response_length
    if name == "vllm" and rollout.max_model_len is not None and rollout.max_model_len < longest:
        raise ConfigError(
            f"{key}.max_model_len={rollout.max_model_len} is below prompt_length + response_length = {longest}: leave "
            "it null to follow them, or lower data.max_prompt_length or data.max_response_length."
        )
    plain = {field.name: field.default for field in fields(RolloutConfig)}
    if name == "hf" and (idle := [one for one in VLLM_SETTINGS if rollout[one] != plain[one]]):
        notice(f"{key} sets {', '.join(idle)}, which the vllm engine reads, and name=hf does not.")
