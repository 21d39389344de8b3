"""A user that another model plays, behind an OpenAI-compatible API."""

from typing import Any

from configs.process import read_key
from extras.http.http import ask_once
from extras.interactions.base import BaseInteraction

END = "<end>"
INSTRUCTION = (
    "You play the user of an assistant, in whose place the other side of this conversation is. Say only what the user "
    f"says next. Write {END} when the user has what they came for, or gives up."
)
TIMEOUT = 300.0  # seconds


class EndpointInteraction(BaseInteraction):
    """Asks `config.base_url` (…/v1) for what the user says next, by the chat completions of `config.model`.

    It is told `config.instruction`, and the row's interaction_kwargs.persona below it. The conversation ends when it
    writes <end>. `config.sampling` goes along (temperature, max_tokens, …), as a bearer token the key that the variable
    `config.api_key_env` holds, or `config.api_key`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        if missing := [key for key in ("base_url", "model") if not self.config.get(key)]:
            raise ValueError(f"config.{missing[0]} is not set: which server and model plays the user.")
        self.api_key = read_key(self.config, "config")

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        instruction = self.config.get("instruction", INSTRUCTION)
        system = "\n".join(filter(None, (instruction, kwargs.get("persona"))))
        text = await self._ask([{"role": "system", "content": system}, *swap_sides(messages)])
        return END in text, text.partition(END)[0].strip(), 0.0, {}

    async def _ask(self, messages: list[dict[str, Any]]) -> str:
        url = f"{self.config['base_url'].rstrip('/')}/chat/completions"
        body = {"model": self.config["model"], "messages": messages, **self.config.get("sampling", {})}
        answer = await ask_once("POST", url, body, api_key=self.api_key, timeout=TIMEOUT)
        return answer["choices"][0]["message"]["content"] or ""


def swap_sides(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Returns the conversation from the other side: the policy's answers are a user's to the model that plays it."""
    sides = {"user": "assistant", "assistant": "user"}
    return [
        {"role": sides[message["role"]], "content": message["content"]}
        for message in messages
        if message["role"] in sides
    ]
