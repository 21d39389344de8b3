"""The tokenizer of a run, and where its models come from."""

import re
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from configs.schema import ModelConfig

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_model_path(path: str | None, key: str) -> str:
    """`path` if a model can be there: a folder with a config.json, or something that can be a hub name.

    Raises:
        ValueError: not set, no such folder, or a folder without config.json; names the key and the remedy.
    """
    remedy = (
        "Give a folder written by save_pretrained; `python -m custom.tiny_model DIR` makes a small one to try with."
    )
    if not path:
        raise ValueError(f"{key} is not set. {remedy}")
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{key}={path}: the folder has no config.json, so it is not a model. {remedy}")
        return str(folder)
    if folder.is_absolute() or path.startswith((".", "~")) or not HUB_NAME.fullmatch(path) or folder.parent.is_dir():
        raise ValueError(f"{key}={path}: there is no such folder (looked in {Path.cwd()}). {remedy}")
    return path


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with a pad token and, if set, the custom chat template."""
    path = check_model_path(model.tokenizer_path or model.path, "actor_rollout_ref.model.path")
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is known by lengths and masks, so any id will do
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer
