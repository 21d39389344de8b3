"""What several settings of supervised training must agree on, checked before torch is imported."""

from importlib.util import find_spec
from pathlib import Path

from configs.errors import ConfigError
from configs.paths import find_path
from configs.run_checks import check_output_folder, check_resume, check_save_contents, check_workers
from configs.schema import SFTConfig


def check_sft(config: SFTConfig) -> None:
    """Raises ConfigError for settings that contradict each other; each message names a way out."""
    data = config.data
    if not data.train_files:
        raise ConfigError(
            "data.train_files is not set: give .parquet, .json or .jsonl files of prompts and responses, or of "
            "conversations (column messages)."
        )
    for key, files in (("train_files", data.train_files), ("val_files", data.val_files or [])):
        for file in [files] if isinstance(files, str) else files:
            if not find_path(file).is_file():
                raise ConfigError(f"data.{key}={file}: there is no such file (looked in {Path.cwd()}).")
    if not data.val_files and config.trainer.test_freq > 0:
        raise ConfigError(
            f"trainer.test_freq={config.trainer.test_freq} asks for validation, but there is nothing to validate on: "
            "set data.val_files."
        )
    if data.micro_batch_size_per_gpu is None and data.max_token_len_per_gpu < data.max_length:
        raise ConfigError(
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} is below data.max_length={data.max_length}: one "
            f"row may not fit a forward pass. Raise it to at least {data.max_length}."
        )
    if not data.roles_to_train:
        raise ConfigError("data.roles_to_train=[] leaves nothing to learn: name roles, as in [assistant].")
    if config.model.lora_rank and find_spec("peft") is None:
        raise ConfigError(
            f"model.lora_rank={config.model.lora_rank} needs the package peft, which is not installed: pip install "
            "peft, or train all weights with model.lora_rank=0."
        )
    check_workers(config.trainer)
    check_resume(config.trainer)
    check_save_contents("checkpoint.save_contents", config.checkpoint)
    check_output_folder(config.trainer.default_local_dir)
