"""Defines the tools that a policy may call: verl's lifecycle of one, and plain functions as tools.

A tool is described to the policy by a schema in OpenAI's function format: of a yaml, of its class, or of the type hints
and the docstring of a function. extras/tools/parsers.py reads calls of the policy's answers.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from extras.tools.parsers import read_json

KEY = "actor_rollout_ref.rollout.multi_turn"

JSON_TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "array": list, "object": dict}
TOOL_MARK = "function_tool"  # the attribute of a function that is marked as a tool
NAME = re.compile(r"[A-Za-z_][\w-]*")
OPENAIS_FORMAT = '{"type": "function", "function": {"name": …, "description": …, "parameters": {"type": "object", …}}}'
SUPPORTED = "str, int, float, bool, list, dict, list[…], dict[str, …], Literal[…], Optional[…] and X | None"


class ToolSchema(dict):
    """An OpenAI function schema: a dict whose keys can be read as attributes too, as verl's schema classes are."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the schema has no {name!r}; it has {', '.join(self)}")
        return ToolSchema(self[name]) if isinstance(self[name], dict) else self[name]

    @classmethod
    def model_validate(cls, schema: Mapping[str, Any]) -> "ToolSchema":
        return cls(schema)

    def model_dump(self, **kwargs: Any) -> dict[str, Any]:
        """Returns a plain dict of its own, whatever pydantic's switches are."""
        return deepcopy(dict(self))


def schema_of_text(name: str, description: str, argument: str, argument_description: str) -> ToolSchema:
    """Returns the schema of a tool with one argument, a text."""
    parameters = {"type": "object", "properties": {argument: {"type": "string", "description": argument_description}}}
    parameters["required"] = [argument]
    return ToolSchema(type="function", function={"name": name, "description": description, "parameters": parameters})


@dataclass(frozen=True)
class ToolResponse:
    """The result of a call: a text, for the policy to read.

    Raises:
        ValueError: it holds images or videos, which are left out here.
    """

    text: str | None = None
    image: list | None = None
    video: list | None = None

    def __post_init__(self) -> None:
        if self.image or self.video:
            raise ValueError("a ToolResponse holds an image or a video: the policy reads text here, so give `text`.")

    def is_empty(self) -> bool:
        return not self.text

    def is_text_only(self) -> bool:
        return bool(self.text)


class BaseTool:
    """A tool with verl's lifecycle: create, execute as often as it is called, calc_reward, release.

    One object serves all episodes at once; what belongs to an episode is kept by its `instance_id`. An episode has one
    instance, from its first call of the tool to its end.

    Attributes:
        config: the tool's `config` of the yaml.
        tool_schema: in OpenAI's function format; name: the name in it.
        blocks: whether its methods compute or wait without `await`; each call then runs in a thread of its own.
        max_concurrent: calls of all episodes that run side by side; more wait.
    """

    blocks, max_concurrent = False, 64
    tool_schema: ToolSchema | None = None  # a class may bring its own

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        schema = self.get_openai_tool_schema() if tool_schema is None else tool_schema
        if schema is None:
            raise ValueError(f"the tool {type(self).__name__} has no schema: give tool_schema in the yaml.")
        self.tool_schema = checked_schema(schema)
        self.name: str = self.tool_schema["function"]["name"]
        self.queue: Any = self  # tools of one queue share max_concurrent

    def settings(self, **defaults: Any) -> dict[str, Any]:
        """Returns `config` over these defaults; raises ValueError for a key that is none of theirs."""
        if unknown := sorted(self.config.keys() - defaults.keys() - {"type"}):
            raise ValueError(f"config has the keys {unknown}; it may have {', '.join(defaults)}.")
        return defaults | self.config

    def get_openai_tool_schema(self) -> Mapping[str, Any] | None:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Makes the instance of an episode: its id. The row's create_kwargs arrive as `create_kwargs`."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Answers a call: (response, reward, metrics). `parameters` go with the schema."""
        raise NotImplementedError(f"the tool {self.name} defines no execute(instance_id, parameters, **kwargs)")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | list | None:
        """Returns the reward of the whole episode with this tool, beside the rewards of single calls (`as_reward`)."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Forgets the instance: its episode is over."""


class FunctionTool(BaseTool):
    """A Python function, sync or async, as a tool; it can still be called as the function it is. Its schema, unless
    given, is made of its type hints and docstring."""

    def __init__(self, function: Callable, name: str | None = None, schema: Mapping[str, Any] | None = None) -> None:
        self.function = function
        self.blocks = not inspect.iscoroutinefunction(function)
        if schema is not None and not isinstance(schema, Mapping):  # an object of verl's, or pydantic's
            schema = schema.model_dump(exclude_none=True)
        if schema is None:
            schema = function_schema(function, name)
        elif name and isinstance(schema.get("function"), Mapping):
            schema = {**schema, "function": {**schema["function"], "name": name}}
        super().__init__({}, schema)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        result = self.function(**parameters)
        return as_result(await result if inspect.isawaitable(result) else result)


def function_tool(
    function: Callable | str | None = None, *, name: str | None = None, schema: Mapping[str, Any] | None = None
) -> Any:
    """Marks a function as a tool, and returns it: `@function_tool`, `@function_tool("calc")` for another name than its
    own, or with a `schema` in OpenAI's format.

    It may return a text, anything that JSON can write, or (text, reward) or (text, reward, metrics).
    """
    if not callable(function):
        return partial(function_tool, name=function or name, schema=schema)
    setattr(function, TOOL_MARK, FunctionTool(function, name, schema))
    return function


def as_result(result: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """Splits a function's result into response, reward and metrics; most results are a response alone."""
    parts = (*result, None, None)[:3] if isinstance(result, tuple | list) and 1 <= len(result) <= 3 else ()
    match parts:
        case (str() | dict() | ToolResponse(), int() | float() | None, dict() | None):
            response, reward, metrics = parts
            return as_response(response), as_reward(reward), metrics or {}
    return as_response(result), 0.0, {}


def as_response(result: Any) -> ToolResponse:
    """Writes what a function returned as text: containers as JSON, None as "None"."""
    if isinstance(result, ToolResponse):
        return as_response(result.text) if isinstance(result.text, ToolResponse) else result  # verl's sandbox nests
    if isinstance(result, dict | list | tuple):
        return ToolResponse(text=json.dumps(result, ensure_ascii=False, default=str))
    return ToolResponse(text=str(result))


def as_reward(value: Any) -> float:
    """Returns the reward that a tool gave: a number, the sum of a list, 0 for None. Texts in a list count for nothing,
    as verl's SearchTool keeps what it has found there."""
    if isinstance(value, list | tuple):
        return sum(as_reward(item) for item in value if not isinstance(item, str))
    return 0.0 if value is None else float(value)


def checked_schema(schema: Mapping[str, Any]) -> ToolSchema:
    """Returns `schema` with what may be left out ("parameters": none; "description": "")."""
    match schema:
        case {"type": "function", "function": {"name": str(name)} as function} if NAME.fullmatch(name):
            pass
        case _:
            shown = json.dumps(schema, default=str)[:200]
            raise ValueError(f"the tool schema {shown} is not in OpenAI's format: {OPENAIS_FORMAT}.")
    empty = {"type": "object", "properties": {}, "required": []}
    declared = function.get("parameters") or {}
    parameters = empty | ({"type": None} | declared if declared else {})
    parameters["required"] = list(parameters["required"] or [])
    subject = f"the schema of the tool {name!r}: parameters"
    if parameters["type"] != "object" or not isinstance(parameters["properties"], Mapping):
        raise ValueError(f"{subject} must have type: object, and properties, a mapping of names, not {parameters}.")
    for key, value in parameters["properties"].items():
        if not isinstance(value, Mapping) or any(kind not in [*JSON_TYPES, "null"] for kind in types_of(value)):
            rule = f"it must be a mapping, with types of {', '.join(JSON_TYPES)} and null"
            raise ValueError(f"{subject}.properties.{key} is {value}; {rule}.")
    if unknown := sorted(set(parameters["required"]) - set(parameters["properties"])):
        raise ValueError(f"{subject}.required names {unknown}, which properties does not: describe them there.")
    described = {"description": function.get("description") or "", "parameters": parameters}
    function = {"name": name, **described} | function | described
    return ToolSchema(deepcopy({**schema, "function": function}))


def types_of(property_schema: Mapping[str, Any]) -> list[str]:
    """Lists the JSON types that a property may have; []: any."""
    if isinstance(alternatives := property_schema.get("anyOf"), list):  # as pydantic writes `int | None`
        kinds = [types_of(each) if isinstance(each, Mapping) else [] for each in alternatives]
        return [kind for each in kinds for kind in each] if all(kinds) else []
    kinds = property_schema.get("type") or []
    kinds = kinds if isinstance(kinds, list) else [kinds]
    return [*kinds, "null"] if kinds and property_schema.get("nullable") else kinds


def as_one_of(value: Any, kinds: Sequence[str]) -> Any:
    """Returns `value` as the first of these JSON types that it can be, its own before others; None: it can be none."""
    kinds = sorted(kinds, key=lambda kind: not isinstance(value, JSON_TYPES.get(kind, ())))
    return next((typed for kind in kinds if (typed := as_type(value, kind)) is not None), None)


def as_type(value: Any, kind: str) -> Any:
    """Returns `value` as one of a JSON type, read from a text or written as one if need be; None: it cannot be."""
    if isinstance(value, str) and kind not in ("string", "null"):
        read = read_json(value.lower() if kind == "boolean" else value)  # templates write Python's True
        value = read if isinstance(read, JSON_TYPES.get(kind, ())) else value
    elif kind == "string" and isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = isinstance(value, JSON_TYPES.get(kind, ())) and (kind == "boolean" or not isinstance(value, bool))
    return value if fits else None


def function_schema(function: Callable, name: str | None = None) -> dict[str, Any]:
    """Makes OpenAI's function schema: types from the hints, texts from the docstring (Google's or Sphinx's)."""
    from transformers.utils import chat_template_utils as made_by

    from workers.upstream import schema_of_hints

    tool = f"the tool {function.__name__} ({inspect.getsourcefile(function)})"
    doc = re.sub(r"^(\s*\w+) *\([^)\n]*\):", r"\1:", inspect.getdoc(function) or "", flags=re.M)  # days (int): how many
    texts = dict(re.findall(r":param (\w+): *(.*)", doc)) | made_by.parse_google_format_docstring(doc)[1]
    description = re.split(r"\n\n|^\s*(?:\w+:\s*$|:param)", doc, maxsplit=1, flags=re.M)[0]
    if not description.strip():
        raise ValueError(f"{tool} has no docstring: its first sentence is what tells the policy what the tool is for.")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ValueError(f"{tool}, parameter {parameter.name}: it cannot be called by name: spell it out.")
        if parameter.annotation is parameter.empty:
            raise ValueError(f"{tool}, parameter {parameter.name} has no type hint: give it one of {SUPPORTED}.")
    try:
        parameters = schema_of_hints(function)
    except (made_by.TypeHintParsingException, NameError, TypeError) as error:
        raise ValueError(f"{tool}: {error}, which no JSON type stands for: use one of {SUPPORTED}.") from error
    parameters["properties"].pop("return", None)
    for key, described in parameters["properties"].items():
        if described.get("type") == "object" and "dict" not in (hint := str(function.__annotations__[key]).lower()):
            raise ValueError(f"{tool}, parameter {key}: {hint}, which no JSON type stands for: use one of {SUPPORTED}.")
        described |= {"description": texts[key]} if key in texts else {}
    described = {"name": name or function.__name__, "description": " ".join(description.split())}
    return {"type": "function", "function": described | {"parameters": {"required": []} | parameters}}
