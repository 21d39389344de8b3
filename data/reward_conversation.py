"""Prompt and response as a reward model reads them whose tokenizer or chat template is not the policy's."""

from transformers import PreTrainedTokenizerBase

from configs.schema import PretrainedModelConfig
from data.chat import Prompt, plain_chat
from data.pretrained import load_tokenizer

KEY = "reward.reward_model.model"


def reward_tokenizer(model: PretrainedModelConfig, policys: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """The reward model's tokenizer; None: it is the policy's, with the same template.

    Raises:
        ValueError: it cannot be loaded, or has another vocabulary and no chat template.
    """
    own = load_tokenizer(model, KEY)
    if own.get_vocab() == policys.get_vocab() and own.chat_template == policys.chat_template:
        return None
    if own.chat_template is None and policys.chat_template is not None:
        raise ValueError(
            f"{KEY}.path={model.path}: its tokenizer is not the policy's and has no chat template, so the conversation "
            f"cannot be shown to it: set {KEY}.custom_chat_template to the template that it was trained with."
        )
    return own


def written(prompt: Prompt | None, response: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt and its response by `tokenizer`: messages in its chat template, a text as it is.

    Raises:
        ValueError: there is no prompt.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt + response).input_ids
    if prompt is None:
        raise ValueError(
            f"a row has raw_prompt_ids and no prompt, and the tokenizer of {KEY} is not the policy's: give the rows "
            "their prompts as messages or as text."
        )
    messages = [*prompt, {"role": "assistant", "content": response}]
    if tokenizer.chat_template is None:
        return tokenizer(plain_chat(messages, generation_prompt=False)).input_ids
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
