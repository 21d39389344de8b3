"""Settings of a server, and their checks."""

from dataclasses import dataclass, fields

from configs.errors import ConfigError
from configs.process import read_key
from configs.schema import ModelConfig, RolloutConfig
from configs.settings import Frozen, group, setting

TRAINING_ONLY = (  # of `rollout`
    "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "tensor_model_parallel_size", "load_lora",
    "nnodes",
)  # fmt: skip
BY_REQUEST = ("n", "do_sample", "temperature", "top_k", "top_p")  # of `rollout`
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass
class ServerDataConfig(Frozen):
    max_prompt_length: int = setting(1536, "Tokens of a sequence for the prompt.", ge=1)
    max_response_length: int = setting(512, "Tokens of a sequence for the response.", ge=1)


@dataclass
class ServerSettings(Frozen):
    host: str = setting("127.0.0.1", "Address to listen at; the default is reachable only from this machine.")
    port: int = setting(8000, "Port to listen at; 0: any free one, which is printed.", ge=0, le=65535)
    api_key: str | None = setting(None, "Token that clients must send (Authorization: Bearer …); null: none.")
    api_key_env: str | None = setting(None, "Environment variable that holds the token.")
    served_model_name: str | None = setting(None, "What clients call the model; null: model.path.")
    takes_weights: bool = setting(False, "With rollout.name=vllm: accept weights of a run with rollout.name=openai.")


@dataclass
class ServerTrainerConfig(Frozen):
    seed: int = setting(0, "The one seed: equal runs give equal responses.", ge=0)
    n_threads: int | None = setting(None, "CPU threads; null: OMP_NUM_THREADS, else the cores.", ge=1)


@dataclass
class ServerConfig(Frozen):
    model: ModelConfig = group(ModelConfig, "The model.")
    data: ServerDataConfig = group(ServerDataConfig, "Lengths; prompt and response share the sum of both.")
    rollout: RolloutConfig = group(
        RolloutConfig, "The engine: hf, vllm (vLLM's own server), or yours.", log_prob_max_token_len_per_gpu=1
    )
    server: ServerSettings = group(ServerSettings, "Where and for whom.")
    trainer: ServerTrainerConfig = group(ServerTrainerConfig, "The process.")


def check_server(config: ServerConfig) -> None:
    """Raises ConfigError for settings that cannot work together."""
    server, rollout, data, model = config.server, config.rollout, config.data, config.model
    if server.host not in LOOPBACK and not read_key(vars(server), "server"):
        raise ConfigError(f"server.host={server.host} lets others in: set server.api_key_env, or host=127.0.0.1.")
    if server.takes_weights and (rollout.name != "vllm" or server.host not in LOOPBACK):
        settings = f"server.takes_weights=true with rollout.name={rollout.name}, server.host={server.host}"
        raise ConfigError(f"{settings}: it needs rollout.name=vllm and server.host=127.0.0.1.")
    adapter, rank = model.get("lora_adapter_path"), model.get("lora_rank")
    if adapter and rollout.name == "vllm":
        raise ConfigError(f"model.lora_adapter_path={adapter}: rollout.name=vllm reads a merged model.path alone.")
    if rank and not adapter:
        raise ConfigError(f"model.lora_rank={rank} is set, which only training reads: set model.lora_adapter_path.")
    for name in ("prompt_length", "response_length"):
        if rollout[name] != (length := data[f"max_{name}"]):
            raise ConfigError(f"rollout.{name}={rollout[name]} is not data.max_{name}={length}: set the latter alone.")
    defaults, sampling = RolloutConfig(log_prob_max_token_len_per_gpu=1), rollout.val_kwargs
    changed = [name for name in (*TRAINING_ONLY, *BY_REQUEST) if rollout.get(name) != defaults.get(name)]
    changed += [f"val_kwargs.{item.name}" for item in fields(sampling) if item.default != sampling[item.name]]
    if changed:
        raise ConfigError(f"rollout.{changed[0]} is set: only training reads it, or each request says it. Unset it.")
