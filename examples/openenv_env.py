"""Any OpenEnv server as an environment, by OpenEnv's own client: `env.id=openenv:http://127.0.0.1:8000`.

Needs the package openenv (requirements-envs.txt). What an answer means is read off the server's schema of actions: one
text or number is the answer itself, anything else a JSON object. The server must allow as many sessions as episodes
are played at once, and one more (`max_concurrent_envs`).
"""

import json
import urllib.request
from typing import Any

import gymnasium as gym

from custom.env_wrapper import ENVIRONMENTS
from extras.gym.space_text import NUMBER, AnswerSpace, with_label

try:
    from openenv import GenericEnvClient
except ImportError as error:
    raise ImportError(
        f"openenv:URL needs the package openenv: pip install -c constraints.txt -r requirements-envs.txt ({error})"
    ) from error

TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "object": dict, "array": list}


class ActionTexts(AnswerSpace):
    """Answers that make an action by a server's JSON schema; `fields` are its properties but the metadata."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self.fields = {name: field for name, field in schema["properties"].items() if name != "metadata"}
        self.required = set(schema.get("required", ())) & self.fields.keys()
        kinds = [field.get("type") for field in self.fields.values()]
        self.only = next(iter(self.fields)) if kinds in (["string"], ["integer"], ["number"]) else None
        super().__init__(self._told())

    def _told(self) -> str:
        if self.only is not None:
            kind = self.fields[self.only]["type"]
            return f"Answer with the {self.only.replace('_', ' ')}{'' if kind == 'string' else ', a number'}."
        form = {name: field.get("description") or field.get("type", "any") for name, field in self.fields.items()}
        return f"Answer with a JSON object: {json.dumps(form)}."

    def action(self, answer: str) -> dict[str, Any] | None:
        """The action that an answer stands for, or None."""
        if self.only is None:
            return self._object(answer)
        kind, numbers = self.fields[self.only]["type"], NUMBER.findall(answer)
        if kind == "string":
            return {self.only: answer} if answer else None
        value = float(numbers[-1]) if numbers else 0.5
        if kind == "integer" or not numbers:
            return {self.only: int(value)} if value.is_integer() else None
        return {self.only: value}

    def _object(self, answer: str) -> dict[str, Any] | None:
        """The JSON object between the first and the last brace, if its fields are those of an action."""
        try:
            found = json.loads(answer[answer.find("{") : answer.rfind("}") + 1])
        except (ValueError, RecursionError):
            return None
        fits = self.required <= found.keys() <= self.fields.keys() and all(
            isinstance(value, TYPES.get(self.fields[name].get("type"), object)) for name, value in found.items()
        )
        return found if fits else None

    def contains(self, answer: Any) -> bool:
        return self.action(answer) is not None


class OpenEnv(gym.Env):
    """A session with the server at `url`, opened by the first reset."""

    def __init__(self, url: str, seconds: float = 60.0) -> None:
        self.url, self.seconds, self.client = url, seconds, None
        with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=seconds) as response:
            self.action_space = ActionTexts(json.load(response)["action"])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.client is None:
            self.client = GenericEnvClient(base_url=self.url, message_timeout_s=self.seconds).sync()
            self.client.connect()
        return self.client.reset(seed=seed).observation, {}

    def step(self, action):
        result = self.client.step(self.action_space.action(action))
        return result.observation, float(result.reward or 0.0), bool(result.done), False, result.metadata or {}

    def close(self):
        if self.client is not None:
            self.client.close()
            self.client = None


def openenv_text(env: OpenEnv, observation: dict[str, Any]) -> str:
    """The fields of an observation in lines; of a single one, the value alone."""
    fields = {name: value for name, value in observation.items() if name != "metadata" and value not in (None, "", [])}
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in fields.items()}
    return next(iter(texts.values())) if len(texts) == 1 else "\n".join(map(with_label, texts, texts.values()))


gym.register("OpenEnv-v0", OpenEnv)
ENVIRONMENTS["OpenEnv-v0"] = {"observation_to_text": openenv_text, "repeatable": False}
