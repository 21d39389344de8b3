"""Settings of batch generation and of evaluation, and their checks.

Keys are those of verl's generation.yaml and evaluation.yaml where verl has them; `rollout` sets the engine.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import II

from configs.checks import check_output_folder, check_sources, check_users_files, is_greedy
from configs.errors import ConfigError
from configs.schema import ModelConfig, RolloutConfig, ScoringConfig
from configs.settings import Frozen, group, setting

TRAINING_ONLY = (  # of `rollout`
    "log_prob_micro_batch_size_per_gpu", "log_prob_max_token_len_per_gpu", "tensor_model_parallel_size", "load_lora",
    "nnodes",
)  # fmt: skip
TABLES = (".jsonl", ".parquet")


@dataclass
class GenerationDataConfig(Frozen):
    path: Any = setting(None, "Prompts: one path or a list (.parquet, .json, .jsonl).", texts=True)
    output_path: str | None = setting(None, "The same rows with their responses: a .jsonl or .parquet file to make.")
    prompt_key: str = setting("prompt", "Column with the prompt: a list of chat messages, or a plain string.")
    response_key: str = setting("responses", "Column for the responses to a prompt, a list of strings.")
    strings_are_chat: bool = setting(
        False, "Read a prompt that is a string as a user's message, for the chat template; false: it is the whole text."
    )
    n_samples: int = setting(1, "Responses per prompt; sets rollout.n, too.", ge=1)
    batch_size: int = setting(128, "Prompts answered and saved at a time; saved answers are not lost.", ge=1)
    max_prompt_length: int = setting(1536, "Longest prompt, in tokens, template included.", ge=1)
    max_response_length: int = setting(512, "Longest response, in tokens.", ge=1)
    truncation: str = setting(
        "error", "Longer prompts raise, or are cut at the named side.", choices=("error", "left", "right", "middle")
    )
    apply_chat_template_kwargs: dict[str, Any] = setting({}, "Passed on to the tokenizer's apply_chat_template.")


@dataclass
class GenerationTrainerConfig(Frozen):
    seed: int = setting(0, "The one seed: equal runs give equal responses.", ge=0)
    n_threads: int | None = setting(None, "CPU threads; null: OMP_NUM_THREADS, else the cores.", ge=1)


@dataclass
class GenerationConfig(Frozen):
    model: ModelConfig = group(ModelConfig, "The model.")
    data: GenerationDataConfig = group(GenerationDataConfig, "Prompts in, responses out.")
    rollout: RolloutConfig = group(
        RolloutConfig, "The engine, and how it samples.", n=II("data.n_samples"), log_prob_max_token_len_per_gpu=1
    )
    trainer: GenerationTrainerConfig = group(GenerationTrainerConfig, "The process.")


@dataclass
class EvaluationDataConfig(Frozen):
    path: Any = setting(None, "Rows with responses: one path or a list (.parquet, .json, .jsonl).", texts=True)
    output_path: str | None = setting(None, "Where the figures go, a .json file; null: only the table is shown.")
    prompt_key: str = setting("prompt", "Column with the prompt, for rewards that read it.")
    response_key: str = setting("responses", "Column with the responses to a prompt: a list of strings, or one.")
    data_source_key: str = setting("data_source", "Column that names where a row comes from; figures are split by it.")
    reward_model_key: str = setting("reward_model", "Column whose ground_truth says what is right.")
    pass_score: float = setting(1.0, "A response passes if its score is at least this.")


@dataclass
class EvaluationConfig(Frozen):
    data: EvaluationDataConfig = group(EvaluationDataConfig, "Responses in, figures out.")
    reward: ScoringConfig = group(ScoringConfig, "What scores them, as in training.")


def check_reward_early(config: EvaluationConfig) -> None:
    """Raises FileNotFoundError or ConfigError for a reward function's file that is absent, or no Python."""
    check_users_files(config, ["reward.custom_reward_function.path"])


def check_generation(config: GenerationConfig) -> None:
    """Raises ConfigError for settings that cannot work together."""
    data, rollout = config.data, config.rollout
    check_files(data.path, "prompts")
    if data.output_path is None:
        raise ConfigError("data.output_path is not set: name the .jsonl or .parquet file that gets the responses.")
    output = Path(data.output_path)
    if output.suffix not in TABLES:
        raise ConfigError(f"data.output_path={data.output_path}: its ending must be one of {', '.join(TABLES)}.")
    if output.exists():
        raise ConfigError(f"data.output_path={data.output_path} exists already: name another file, or remove it.")
    check_output_folder(str(output.parent), "data.output_path")
    if rollout.n != data.n_samples:
        raise ConfigError(f"rollout.n={rollout.n} is not data.n_samples={data.n_samples}: set the latter alone.")
    if rollout.n > 1 and is_greedy(rollout):
        greedy = f"data.n_samples={rollout.n} asks for {rollout.n} greedy responses to a prompt, all the same"
        raise ConfigError(f"{greedy}: set it to 1, or rollout.do_sample=true.")
    check_engine_settings(rollout, data, config.model)


def check_evaluation(config: EvaluationConfig) -> None:
    """Raises ConfigError for settings that cannot work together."""
    data = config.data
    check_files(data.path, "rows with responses")
    if data.output_path is not None:
        check_output_folder(str(Path(data.output_path).parent), "data.output_path")


def check_files(path: str | list[str] | None, contents: str) -> None:
    if not path:
        raise ConfigError(f"data.path is not set: give .parquet, .json or .jsonl files with {contents}.")
    check_sources("data.path", path)


def check_engine_settings(rollout: RolloutConfig, data: GenerationDataConfig, model: ModelConfig) -> None:
    """Raises ConfigError for settings that only training reads, and for other lengths in `rollout` than in `data`."""
    if (rank := model.get("lora_rank")) and not model.get("lora_adapter_path"):
        raise ConfigError(f"model.lora_rank={rank} is set, which only training reads: set model.lora_adapter_path.")
    for name, length in (("prompt_length", data.max_prompt_length), ("response_length", data.max_response_length)):
        if rollout[name] != length:
            raise ConfigError(f"rollout.{name}={rollout[name]} is not data.max_{name}={length}: set the latter alone.")
    defaults, sampling = RolloutConfig(log_prob_max_token_len_per_gpu=1), rollout.val_kwargs
    changed = [name for name in TRAINING_ONLY if rollout.get(name) != defaults.get(name)]
    changed += [f"val_kwargs.{item.name}" for item in fields(sampling) if item.default != sampling[item.name]]
    if changed:
        raise ConfigError(f"rollout.{changed[0]} is set, which only training reads: unset it.")
