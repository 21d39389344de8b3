"""Declares and checks the settings of supervised training."""

from dataclasses import dataclass
from typing import Any, ClassVar

from configs.checks import check_gpus, check_output_folder, check_sources, logger_names
from configs.errors import ConfigError
from configs.extras import section
from configs.paths import check_model_path
from configs.schema import (
    CheckpointConfig,
    DatasetClassConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    TrainFSDPConfig,
)
from configs.settings import EACH_EPOCH, LAST, Frozen, Open, group, own_keys, setting


@dataclass
class SFTDataConfig(Open):
    train_files: Any = setting(None, "Training rows: one path or a list (.parquet, .json, .jsonl).", texts=True)
    val_files: Any = setting(None, "Validation rows; null: none.", texts=True)
    train_max_samples: int = setting(-1, "Use only this many training rows, the first ones; -1: all.", ge=-1)
    val_max_samples: int = setting(-1, "Use only this many validation rows, the first ones; -1: all.", ge=-1)
    prompt_key: str = setting("prompt", "Column with the prompt: chat messages, or a plain string.")
    response_key: str = setting("response", "Column with the response, a string.")
    prompt_dict_keys: Any = setting(
        None,
        "Keys that lead to the prompt in a column of dicts; a text there is a user's message.",
        texts=True,
    )
    response_dict_keys: Any = setting(None, "Keys that lead to the response in a column of dicts.", texts=True)
    train_batch_size: int = setting(256, "Rows per step; the default is lowered to the rows of an epoch.", ge=1)
    micro_batch_size_per_gpu: int | None = setting(None, "Rows per forward pass; null: by tokens.", ge=1)
    use_dynamic_bsz: bool = setting(False, "Cut forward passes by tokens, whatever micro_batch_size_per_gpu is.")
    max_token_len_per_gpu: int = setting(16384, "Tokens a forward pass may hold when cutting by tokens.", ge=1)
    max_length: int = setting(1024, "Longest prompt plus response, in tokens.", ge=2)
    truncation: str = setting("error", "What happens to longer rows.", choices=("error", "left", "right"))
    apply_chat_template_kwargs: dict[str, Any] = setting({}, "Passed on to apply_chat_template.")
    messages_key: str = setting("messages", "Column with a whole conversation; then no other column is needed.")
    tools_key: str = setting("tools", "Column with the schemas of a conversation's tools: a list, or one as JSON.")
    roles_to_train: list[str] = setting(["assistant"], "Roles whose messages are learnt.")
    turns_to_train: str = setting(
        "all", "Which of them; a message with weight 0 is left out in any case.", choices=("all", "last")
    )
    max_bad_fraction: float = setting(
        0.0, "Share of the rows that may be unusable: they are left out, counted and listed.", ge=0, lt=1
    )
    custom_cls: DatasetClassConfig = group(DatasetClassConfig, "A dataset class of yours; null: SFTDataset.")
    extras: dict[str, Any] = own_keys("data", "custom_cls.path")


@dataclass
class SFTTrainerConfig(section("restarts"), section("best"), RunConfig):
    test_freq: int | str = setting(
        -1,
        "Validate every so many steps, or after_each_epoch, and after the last; -1: after it only.",
        steps=(EACH_EPOCH,),
    )
    save_freq: int | str = setting(
        -1,
        "Save every this many steps, or after_each_epoch, and after the last; -1 and last: only then.",
        steps=(EACH_EPOCH, LAST),
    )


@dataclass
class SFTConfig(Frozen):
    model_key: ClassVar[str] = "model.path"  # names the model that the run trains

    data: SFTDataConfig = group(SFTDataConfig, "Rows.")
    model: ModelConfig = group(ModelConfig, "The model.")
    optim: OptimConfig = group(OptimConfig, "Optimiser and schedule.", lr=1e-5, lr_warmup_steps_ratio=0.1)
    fsdp_config: TrainFSDPConfig = group(TrainFSDPConfig, "Precision and offloading.")
    trainer: SFTTrainerConfig = group(SFTTrainerConfig, "The run.")
    checkpoint: CheckpointConfig = group(CheckpointConfig, "Contents of checkpoints.")

    @property
    def policy_model(self) -> ModelConfig:
        """Returns the settings of the model that the run trains."""
        return self.model


def check_early(config: SFTConfig) -> None:
    """Raises ValueError or FileNotFoundError for what can be refused before torch is imported, which takes seconds."""
    check_model_path(config.model.path, "model.path")
    logger_names(config)  # or raises
    check_gpus(config.trainer.n_gpus_per_node or 0)


def check_sft(config: SFTConfig) -> None:
    """Raises ConfigError for settings that contradict each other; each message names a way out."""
    data = config.data
    if not data.train_files:
        raise ConfigError(
            "data.train_files is not set: give files of prompts and responses, or of conversations (column messages)."
        )
    for key in ("train_files", "val_files") if data.custom_cls.path is None else ():  # a user's class may fetch them
        check_sources(f"data.{key}", data[key])
    if not data.val_files and config.trainer.test_freq != -1:
        raise ConfigError(f"trainer.test_freq={config.trainer.test_freq} validates on no rows: set data.val_files.")
    by_tokens = data.use_dynamic_bsz or data.micro_batch_size_per_gpu is None
    if by_tokens and data.max_token_len_per_gpu < data.max_length:
        raise ConfigError(
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} is below data.max_length={data.max_length}."
        )
    if not data.roles_to_train:
        raise ConfigError("data.roles_to_train=[] leaves nothing to learn: name roles, as in [assistant].")
    check_output_folder(config.trainer.default_local_dir)
