"""Simulated users: who the policy talks to where a conversation has more than one question."""

from collections.abc import Coroutine, Mapping
from typing import Any
from uuid import uuid4

from data.rows import kwargs_in
from extras.tools.files import load_class, naming_entry, read_entries
from extras.tools.shared_loop import in_users_loop
from extras.tools.toolbox import AgentData

SUFFIX = "Interaction"
ENTRY_KEYS = {"name", "class_name", "config"}


class BaseInteraction:
    """A simulated user with verl's lifecycle: start_interaction, generate_response after each answer,
    finalize_interaction.

    One object serves all episodes at once; what belongs to an episode is kept by its `instance_id`.

    Args:
        config: of the yaml, with the interaction's name.

    Attributes:
        blocks: whether its methods compute or wait without `await`; each call then runs in a thread of its own.
    """

    blocks = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.name: str = self.config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begins a conversation: its id. `kwargs` are the row's extra_info.interaction_kwargs, at every call."""
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answers the last of `messages` as the user: (whether the conversation ends, text, score, more)."""
        raise NotImplementedError(f"the interaction {self.name} defines no generate_response(instance_id, messages)")

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forgets the conversation; called at its end."""


def load_interactions(path: str) -> dict[str, BaseInteraction]:
    """Loads the interactions of verl's yaml, by name: a list `interaction` of {name, class_name, config}.

    A class is named as a.b.Class or file.py:Class. Without a name, it is that of the class in lower case, less
    "Interaction" at its end.
    """
    interactions: dict[str, BaseInteraction] = {}
    for where, entry in read_entries(path, "interaction", ENTRY_KEYS):
        cls = load_class(entry, where, BaseInteraction)
        name = entry.get("name") or (cls.__name__.removesuffix(SUFFIX) or cls.__name__).lower()
        if name in interactions:
            raise ValueError(f"Duplicate interaction name '{name}' found in {path}: give each a `name` of its own.")
        with naming_entry(entry, where):
            interactions[name] = cls({**(entry.get("config") or {}), "name": name})
    return interactions


def interaction_of(interactions: Mapping[str, BaseInteraction], row: Mapping[str, Any]) -> BaseInteraction:
    """Returns the interaction that a row's interaction_kwargs name."""
    known, kwargs = ", ".join(interactions), kwargs_in(row, "interaction_kwargs")
    if "name" not in kwargs:
        raise ValueError(
            f"'name' key is required in interaction_kwargs: every row must name one of {known}; it holds {kwargs}."
        )
    if kwargs["name"] not in interactions:
        raise ValueError(
            f"extra_info.interaction_kwargs.name is {kwargs['name']!r}; multi_turn.interaction_config_path has {known}."
        )
    return interactions[kwargs["name"]]


class Users:
    """Makes the simulated user of a conversation, of those in the yaml at `path`; calls have `timeout` seconds."""

    def __init__(self, path: str, timeout: float) -> None:
        self.interactions, self.timeout = load_interactions(path), timeout

    def check(self, row: Mapping[str, Any]) -> None:
        """Raises ValueError if a row names no interaction, or one that is not there."""
        interaction_of(self.interactions, row)

    def __call__(self, row: Mapping[str, Any], data: AgentData) -> "Talk":
        data.interaction = interaction_of(self.interactions, row)
        data.interaction_kwargs = kwargs_in(row, "interaction_kwargs")
        return Talk(data.interaction, data.interaction_kwargs, self.timeout)


class Talk:
    """One conversation with a simulated user."""

    def __init__(self, interaction: BaseInteraction, kwargs: Mapping[str, Any], timeout: float) -> None:
        self.interaction, self.kwargs, self.timeout = interaction, kwargs, timeout
        self.instance: str | None = None  # once it has begun

    async def speak(self, messages: list[dict[str, Any]]) -> tuple[bool, str, float]:
        user = self.interaction
        if self.instance is None:
            self.instance = await self._in_time(user.start_interaction(str(uuid4()), **self.kwargs))
        is_over, text, score, _ = await self._in_time(user.generate_response(self.instance, messages, **self.kwargs))
        return is_over, text, float(score)

    async def close(self) -> None:
        if self.instance is not None:
            instance, self.instance = self.instance, None
            await self._in_time(self.interaction.finalize_interaction(instance))

    async def _in_time(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await in_users_loop(self.interaction, work, self.timeout)


def last_answer(messages: list[dict[str, Any]]) -> str:
    """Returns the last message of the policy; "" if it has not spoken."""
    answers = (message["content"] for message in reversed(messages) if message["role"] == "assistant")
    return next(answers, "")
