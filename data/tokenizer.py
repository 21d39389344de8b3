"""The tokenizer of a run, and where its models come from."""

import re
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from configs.errors import first_line
from configs.paths import find_path
from configs.schema import PretrainedModelConfig

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_model_path(path: str | None, key: str) -> str:
    """`path` if a model can be there: a folder with a config.json, or something that can be a hub name.

    Raises:
        ValueError: not set, no such folder, or a folder without config.json; names the key and the remedy.
    """
    remedy = (
        "Give a folder written by save_pretrained; `python -m custom.tiny_model DIR` makes a small one to try with, "
        "`make quickstart` makes outputs/quickstart/warm_start."
    )
    if not path:
        raise ValueError(f"{key} is not set. {remedy}")
    folder = find_path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{key}={path}: the folder has no config.json, so it is not a model. {remedy}")
        return str(folder)
    if folder.is_absolute() or path.startswith((".", "~")) or not HUB_NAME.fullmatch(path) or folder.parent.is_dir():
        raise ValueError(f"{key}={path}: there is no such folder (looked in {Path.cwd()}). {remedy}")
    return path


def load_tokenizer(model: PretrainedModelConfig, section: str = "actor_rollout_ref.model") -> PreTrainedTokenizerBase:
    """The tokenizer of the model that the config's `section` describes, with a pad token and its chat template.

    Raises:
        ValueError: it cannot be loaded, or has no token to end a response with; names the key and the remedy.
    """
    key = f"{section}.path" if model.tokenizer_path is None else f"{section}.tokenizer_path"
    path = model.tokenizer_path or check_model_path(model.path, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(find_path(path)), trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"{key}={path}: no tokenizer can be loaded from there ({first_line(error)}). Give a folder with the files "
            f"of tokenizer.save_pretrained: the model's own, or {section}.tokenizer_path."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{key}={path}: the tokenizer has no eos_token, so no response would end: save one with it.")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token  # padding is known by lengths and masks, so any id will do
    if model.custom_chat_template:
        tokenizer.chat_template = model.custom_chat_template
    return tokenizer


def template_terminator(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token right after an assistant's message in the chat template, if there is one."""
    if not tokenizer.chat_template:
        return None
    marker = "answer-0417"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": marker}]
    _, rendered, tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(marker)
    if not rendered:  # the template leaves an assistant's turns out
        return None
    ids = tokenizer.encode(tail, add_special_tokens=False)
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids else None
