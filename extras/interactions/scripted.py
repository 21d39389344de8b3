"""A user who says what a script has, line by line."""

import re
from typing import Any

from extras.interactions.base import BaseInteraction, last_answer


class ScriptedInteraction(BaseInteraction):
    """Says the next line of the row's interaction_kwargs.script (or config.script) after each answer.

    The conversation ends when there is no further line, with a score of 0; or, with a score of 1, as soon as an answer
    matches `until`, a regular expression in interaction_kwargs or config, if there is one.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.lines: dict[str, int] = {}  # that were said, by conversation

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        instance_id = await super().start_interaction(instance_id)
        self.lines[instance_id] = 0
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        settings = self.config | kwargs
        script, until = settings.get("script") or [], settings.get("until")
        if not isinstance(script, list) or not all(isinstance(line, str) for line in script):
            raise ValueError(f"interaction_kwargs.script is {script!r}; it must be a list of texts.")
        if until is not None and re.search(until, last_answer(messages)):
            return True, "", 1.0, {}
        line = self.lines[instance_id]
        if line == len(script):
            return True, "", 0.0, {}
        self.lines[instance_id] += 1
        return False, script[line], 0.0, {}

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        del self.lines[instance_id]
