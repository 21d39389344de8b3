"""Reads a model's config.json and its tokenizer, and checks them before its weights are loaded."""

from functools import partial
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from configs.errors import first_line
from configs.extras import TABLE
from configs.import_utils import find
from configs.paths import check_model_path, find_path
from configs.schema import PretrainedModelConfig

POSITIONS = ("max_position_embeddings", "max_seq_len")  # names that configs have for the number of positions
HEADS = {  # transformers' classes: for which configs it has one, and what it is, for messages
    AutoModelForCausalLM: (MODEL_FOR_CAUSAL_LM_MAPPING, "that continues a text: see docs/models.md"),
    AutoModelForSequenceClassification: (MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "with a score a sequence"),
    AutoModelForTokenClassification: (
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
        "with a value a token: choose another critic, or an estimator without one (grpo)",
    ),
}


def load_model_config(model: PretrainedModelConfig, path: str | None, key: str) -> PretrainedConfig:
    """Returns the config of the model at `path`, which the setting `key` names, with `model.override_config`."""
    folder = check_model_path(path, key)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{key}={path}: its config.json cannot be read ({first_line(error)}).") from error
    config.update(model.override_config)
    vision_of(config, key)
    return config


def vision_of(config: PretrainedConfig, key: str = "") -> Any | None:
    """Finds the class by which models of this `config` read images, which tells transformers of them; None: they read
    text alone."""
    return find("vision", config.model_type, key) if config.model_type in TABLE["vision"] else None


def position_count(config: PretrainedConfig) -> int | None:
    """Returns the number of positions a model of this `config` was made for; None: it does not say."""
    values = config.to_dict()
    counts = [values.get(config.attribute_map.get(name, name)) for name in POSITIONS]
    return next((count for count in counts if count), None)


def check_model(
    model: PretrainedModelConfig,
    key: str,
    longest: int,
    length_keys: str = "data.max_prompt_length + data.max_response_length",
    head: type = AutoModelForCausalLM,
) -> PretrainedConfig:
    """Returns the config of the model that the setting `key` names; raises ValueError unless transformers has it as one
    of the class `head`, with positions for sequences of `longest` tokens, which the settings `length_keys` allow."""
    config = load_model_config(model, model.path, key)
    check_has_head(config, key, head)
    positions = position_count(config.get_text_config())
    if positions is not None and longest > positions:
        raise ValueError(
            f"{length_keys} allow sequences of {longest} tokens, and {key} was made for {positions} positions: lower "
            "the lengths."
        )
    return config


def check_has_head(config: PretrainedConfig, model_key: str, head: type = AutoModelForCausalLM) -> None:
    """Raises ValueError unless transformers has the model that `model_key` names as one of the class `head`."""
    in_folder = head.__name__ in (config.to_dict().get("auto_map") or {})  # in code of its own
    configs, kind = HEADS[head]
    if type(config) not in configs and not in_folder:
        raise ValueError(f"{model_key}: transformers has no {config.model_type} {kind}.")


def check_same_tokens(policy: PretrainedModelConfig, path: str, key: str) -> None:
    """Raises ValueError unless the model at `path`, which `key` names, reads token ids as the policy does."""
    tokenizer, others_tokenizer = load_tokenizer(policy), load_tokenizer(policy.at(path))
    if tokenizer.get_vocab() != others_tokenizer.get_vocab():
        raise ValueError(f"{key}={path} has other tokens than the policy, whose token ids it would score.")


def load_tokenizer(model: PretrainedModelConfig, section: str = "actor_rollout_ref.model") -> PreTrainedTokenizerBase:
    """Returns the tokenizer of the model that `section` of the config describes, with a pad token and a template."""
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
    tokenizer.chat_template = model.custom_chat_template or tokenizer.chat_template
    check_template(tokenizer, f"{section}.custom_chat_template" if model.custom_chat_template else f"{key}={path}")
    tokenizer = as_users_read(tokenizer)
    if model.path and (vision := vision_of(load_model_config(model, model.path, f"{section}.path"))):
        tokenizer.images = vision.reader(find_path(model.path), tokenizer)  # of rows
    return tokenizer


def check_template(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raises ValueError for a chat template that jinja cannot read; `source` is where it is from."""
    if not tokenizer.chat_template:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ValueError(f"{source}: line {error.lineno} of the chat template is no jinja: {error.message}.") from error
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return  # the template refuses this conversation, and may take others


def as_users_read(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Gives a tokenizer a pad token, and templates that return a list of ids, as transformers' did before 5."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # padding is known by masks, so any id will do
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    return tokenizer


def template_terminator(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the special token after an assistant's message in the template, behind white space at most; else None."""
    if not tokenizer.chat_template:
        return None
    marker = "answer-0417"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": marker}]
    _, rendered, tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(marker)
    if not rendered:  # the template leaves an assistant's turns out
        return None
    ids = tokenizer.encode(tail.lstrip(), add_special_tokens=False)
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids else None
