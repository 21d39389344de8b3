"""The score of the learned reward model in the step: in place of the other reward's, or added to it."""

from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedTokenizerBase

from configs.schema import Config, PretrainedModelConfig
from data.chat import Prompt, as_text, encode_pieces, render
from data.padding import last_token
from data.pretrained import check_has_head, load_model_config, load_tokenizer
from data.protocol import DataProto, object_array
from data.types import Metrics, Stage
from training.reward import reward_of

RM_KEY = "reward.reward_model.model"


def zero_reward(data: DataProto) -> list[float]:
    """Scores every row 0: the reward of a run that only the model scores."""
    return [0.0] * len(data)


def load(settings: Any, run: Any) -> Any:
    """Loads the reward of a run that only the model scores (the entry of the table)."""
    return zero_reward


class ModelScores(Stage):
    """Puts the model's score in place of the reward's, plus function_weight times that one.

    Validation is scored by the other reward alone, if there is one: it shows what a policy gains that only pleases the
    model. Beside the score come `rm_score` and `function_score`, each alone.

    Raises:
        FloatingPointError: a score of the model is not finite.
    """

    at = "scored"

    @classmethod
    def check(cls, config: Config) -> None:
        model = config.reward.reward_model.model
        check_is_reward_model(load_model_config(model, model.path, f"{RM_KEY}.path"), f"{RM_KEY}.path")
        reward_tokenizer(model, load_tokenizer(config.actor_rollout_ref.model))

    def __call__(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        is_alone = reward_of(self.config.reward, self.config.env.id) == "model"
        if is_alone or not batch.meta_info.get("validate"):
            add_model_scores(batch, self.trainer.roles["rm"], self.config.reward.reward_model.function_weight, is_alone)
        return {}


def check_is_reward_model(config: PretrainedConfig, model_key: str) -> None:
    """Raises ValueError unless transformers has the model that `model_key` names with one number a sequence."""
    check_has_head(config, model_key, AutoModelForSequenceClassification)
    if config.num_labels != 1:
        raise ValueError(f"{model_key}: it has {config.num_labels} outputs a sequence, and a reward model has one.")


def add_model_scores(batch: DataProto, model: Any, function_weight: float, is_alone: bool) -> None:
    scores = model.rows("compute_rm_score", batch).batch["rm_scores"]
    if not torch.isfinite(scores).all():
        row = int((~torch.isfinite(scores)).nonzero()[0])
        raise FloatingPointError(
            f"the reward model gives {scores[row].item()} to row {row} of a batch: its weights are not finite, or "
            "reward.reward_model.fsdp_config.dtype=float32 is needed."
        )
    beside = batch.batch["token_level_scores"]
    extra = {"rm_score": scores} | ({} if is_alone else {"function_score": beside.sum(1)})
    batch.non_tensor_batch.update({name: object_array(values.tolist()) for name, values in extra.items()})
    batch.meta_info["reward_extra_keys"] = sorted([*batch.meta_info["reward_extra_keys"], *extra])
    placed = last_token(batch.batch["response_mask"]) * scores[:, None]
    batch.batch["token_level_scores"] = placed + function_weight * beside


def reward_tokenizer(model: PretrainedModelConfig, policys: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """Loads the reward model's tokenizer; None: it is the policy's, with the same template.

    Raises:
        ValueError: it cannot be loaded, or has another vocabulary and no chat template.
    """
    tokenizer = load_tokenizer(model, RM_KEY)
    if tokenizer.get_vocab() == policys.get_vocab() and tokenizer.chat_template == policys.chat_template:
        return None
    if tokenizer.chat_template is None and policys.chat_template is not None:
        raise ValueError(
            f"{RM_KEY}.path={model.path}: its tokenizer is not the policy's and has no chat template: set "
            f"{RM_KEY}.custom_chat_template to that of its training."
        )
    return tokenizer


def encode_conversation(prompt: Prompt | None, response: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt and its response by `tokenizer`: messages in its chat template, a text as it is."""
    response = as_text(response, tokenizer)
    if isinstance(prompt, str):
        return encode_pieces(prompt + response, tokenizer, begins_text=True)
    if prompt is None:
        raise ValueError(
            f"a row has raw_prompt_ids alone, and the tokenizer of {RM_KEY} is not the policy's: give prompts as text."
        )
    messages = [*as_text(prompt, tokenizer), {"role": "assistant", "content": response}]
    text = render(messages, tokenizer, generation_prompt=False)
    return encode_pieces(text, tokenizer, begins_text=tokenizer.chat_template is None)
