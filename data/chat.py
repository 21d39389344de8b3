"""Chat messages as token ids: whole prompts, and what a conversation goes on with after an answer.

A policy's answer is never encoded again: its ids stay as they were sampled, and what the chat template writes between
it and the next answer is appended to them.
"""

import reprlib
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from configs.errors import notice_once
from configs.schema import PretrainedModelConfig
from data.pretrained import load_tokenizer, template_terminator
from data.types import Message

Prompt = str | list[Message]
RM_KEY = "reward.reward_model.model"  # where the config has the reward model
QUESTION, ANSWER = "question-0417", "answer-0417"  # stand for the turns before an increment, which it does not repeat


def parse_prompt(value: Any) -> Prompt:
    """A prompt column's value as a string, or as plain chat messages without the nulls parquet puts for absent keys.

    Raises:
        ValueError: it is neither a string nor a non-empty list of messages with a role and a content.
    """
    if isinstance(value, np.ndarray):  # what pandas makes of a list in a parquet file
        value = value.tolist()
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(f"the prompt is {reprlib.repr(value)}; it must be a string or a list of chat messages.")
    for message in value:
        match message:
            case {"role": str(), "content": str() | list()} | {"role": str(), "tool_calls": list()}:
                pass
            case _:
                found = reprlib.repr(message)
                raise ValueError(f"the prompt holds {found}; a chat message needs a 'role' and a 'content'.")
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def encode_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, **template_kwargs: Any) -> list[int]:
    """Token ids of a prompt, up to where the answer starts.

    Chat messages go through the tokenizer's template with the generation prompt, or, if it has none, are written as
    `role: content` lines that end in `assistant:`. A string is the whole text, and is encoded as it is.
    """
    if isinstance(prompt, list) and tokenizer.chat_template is not None:
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **template_kwargs)
    if isinstance(prompt, list):
        prompt = plain_chat(prompt)
    return tokenizer(prompt)["input_ids"]


def plain_chat(messages: list[Message], generation_prompt: bool = True) -> str:
    """`role: content` lines, for tokenizers without a chat template."""
    notice_once(
        "the tokenizer has no chat template: messages are written as 'role: content' lines. "
        "Set actor_rollout_ref.model.custom_chat_template for another format, or give prompts as plain strings."
    )
    if not all(isinstance(message.get("content"), str) for message in messages):
        raise ValueError("messages with parts or tool calls need a tokenizer with a chat template.")
    lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    return lines + ("assistant:" if generation_prompt else "")


class ChatFormat:
    """A tokenizer's chat template, as one conversation after the other goes through it.

    Args:
        template_kwargs: passed on to the template.
        tools: schemas of the tools that prompts describe.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any], tools: list[dict] | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.template_kwargs = template_kwargs | ({"tools": tools} if tools else {})
        self.terminator = template_terminator(tokenizer)

    def prompt_ids(self, messages: Prompt) -> list[int]:
        """Token ids of a prompt, up to where the answer starts."""
        return encode_prompt(messages, self.tokenizer, **self.template_kwargs)

    def text(self, token_ids: list[int]) -> str:
        """An answer as text, without special tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)

    def increment(self, messages: list[Message], stopped: bool) -> list[int]:
        """Token ids that follow an answer: the end of its turn, `messages`, and the start of the next answer.

        `stopped`: whether the answer ended by a stop id, which then stands for the special token that ends a turn.

        Raises:
            ValueError: the template does not write these messages behind an answer; names it and the remedy.
        """
        ids = self.tokenizer.encode(self.increment_text(messages), add_special_tokens=False)
        return ids[1:] if stopped and self.terminator is not None and ids[:1] == [self.terminator] else ids

    def increment_text(self, messages: list[Message]) -> str:
        """Returns the text that the template writes behind an answer when `messages` follow it.

        Raises:
            ValueError: as `increment`.
        """
        start = [{"role": "user", "content": QUESTION}]
        turns = [*start, {"role": "assistant", "content": ANSWER}, *messages]
        try:
            whole = self.render(turns, generation_prompt=True)
            starts = tuple(self.render(start, generation_prompt) for generation_prompt in (True, False))
        except TemplateError as error:
            raise self._refusal(f"refuses {messages_named(messages)} after an answer ({error})") from error
        if whole.count(ANSWER) != 1 or not whole.startswith(starts):
            raise self._refusal(f"writes what comes before {messages_named(messages)} otherwise than without them")
        return whole.partition(ANSWER)[2]

    def render(self, messages: list[Message], generation_prompt: bool) -> str:
        """Messages as the text that the template makes of them."""
        if self.tokenizer.chat_template is None:
            return plain_chat(messages, generation_prompt)
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **self.template_kwargs
        )

    def _refusal(self, problem: str) -> ValueError:
        return ValueError(
            f"the chat template of {self.tokenizer.name_or_path or type(self.tokenizer).__name__} {problem}, so a "
            "conversation cannot go on without encoding the policy's own tokens anew. Set "
            "actor_rollout_ref.model.custom_chat_template to one that only appends, or, for an environment, show each "
            "turn in a prompt of its own: env.history=turns."
        )


def messages_named(messages: list[Message]) -> str:
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
    return f"messages of the role {roles}"


def reward_tokenizer(model: PretrainedModelConfig, policys: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """The reward model's tokenizer; None: it is the policy's, with the same template.

    Raises:
        ValueError: it cannot be loaded, or has another vocabulary and no chat template.
    """
    own = load_tokenizer(model, RM_KEY)
    if own.get_vocab() == policys.get_vocab() and own.chat_template == policys.chat_template:
        return None
    if own.chat_template is None and policys.chat_template is not None:
        raise ValueError(
            f"{RM_KEY}.path={model.path}: its tokenizer is not the policy's and has no chat template, so the "
            f"conversation cannot be shown to it: set {RM_KEY}.custom_chat_template to the template that it was "
            "trained with."
        )
    return own


def encode_conversation(prompt: Prompt | None, response: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Token ids of a prompt and its response by `tokenizer`: messages in its chat template, a text as it is.

    Raises:
        ValueError: there is no prompt.
    """
    if isinstance(prompt, str):
        return tokenizer(prompt + response).input_ids
    if prompt is None:
        raise ValueError(
            f"a row has raw_prompt_ids and no prompt, and the tokenizer of {RM_KEY} is not the policy's: give the rows "
            "their prompts as messages or as text."
        )
    messages = [*prompt, {"role": "assistant", "content": response}]
    if tokenizer.chat_template is None:
        return tokenizer(plain_chat(messages, generation_prompt=False)).input_ids
    return tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
