"""What a model's config.json says of it, before its weights are loaded."""

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    PretrainedConfig,
)

from configs.loader import first_line
from configs.schema import PretrainedModelConfig
from data.tokenizer import check_model_path

POSITIONS = ("max_position_embeddings", "max_seq_len")  # what a config calls the number of its positions


def load_model_config(model: PretrainedModelConfig, path: str | None, key: str) -> PretrainedConfig:
    """The config of the model at `path`, which the setting `key` names, with `model.override_config`.

    Raises:
        ValueError: there is no model there, or transformers does not know its kind; names the key.
    """
    folder = check_model_path(path, key)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{key}={path}: its config.json cannot be read ({first_line(error)}).") from error
    config.update(model.override_config)
    return config


def position_count(config: PretrainedConfig) -> int | None:
    """How many positions a model of this `config` was made for; None: it does not say."""
    values = config.to_dict()
    found = [values.get(config.attribute_map.get(name, name)) for name in POSITIONS]
    return next((count for count in found if count), None)


def check_positions(config: PretrainedConfig, longest: int, model_key: str, length_keys: str) -> None:
    """Raises ValueError if sequences of `longest` tokens, which the settings `length_keys` allow, have more positions
    than the model that `model_key` names was made for."""
    positions = position_count(config.get_text_config())
    if positions is not None and longest > positions:
        raise ValueError(
            f"{length_keys} allow sequences of {longest} tokens, and the model of {model_key} was made for {positions} "
            "positions (its config.json says so): lower the lengths, or choose a model for longer texts."
        )


def check_is_decoder(config: PretrainedConfig, model_key: str) -> None:
    """Raises ValueError unless transformers has the model that `model_key` names as one that writes on from a text."""
    if not is_known(config, MODEL_FOR_CAUSAL_LM_MAPPING, "AutoModelForCausalLM"):
        raise ValueError(
            f"{model_key}: transformers has no {config.model_type} that continues a text (AutoModelForCausalLM): "
            "choose a decoder-only language model (docs/models.md)."
        )


def check_has_value_head(config: PretrainedConfig, model_key: str) -> None:
    """Raises ValueError unless transformers has the model that `model_key` names with a head of one number a token."""
    if not is_known(config, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, "AutoModelForTokenClassification"):
        raise ValueError(
            f"{model_key}: transformers has no {config.model_type} with a value a token "
            "(AutoModelForTokenClassification), so it cannot be a critic: choose an algorithm.adv_estimator "
            "without one (grpo, rloo, reinforce_plus_plus), or another model with the same tokenizer as critic."
        )


def check_is_reward_model(config: PretrainedConfig, model_key: str) -> None:
    """Raises ValueError unless transformers has the model that `model_key` names with one number a sequence."""
    if not is_known(config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "AutoModelForSequenceClassification"):
        raise ValueError(
            f"{model_key}: transformers has no {config.model_type} with a score a sequence "
            "(AutoModelForSequenceClassification), so it cannot be a reward model: choose another kind of model."
        )
    if config.num_labels != 1:
        raise ValueError(
            f"{model_key}: the model has {config.num_labels} outputs a sequence (its config.json says so), and a "
            "reward model has one: give one that was trained with num_labels=1."
        )


def is_known(config: PretrainedConfig, models: dict[type, type], auto_class: str) -> bool:
    """Whether there is a model of this `config` among `models`, or in code of its own folder."""
    own = config.to_dict().get("auto_map") or {}
    return type(config) in models or auto_class in own
