"""Calls a reward function as a reward manager.

A function's form is read from its signature, and it is given the arguments that it names. They come from a
`reward_view` (training/reward.py), a row for each response.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError, nearest_by_last_part
from configs.extras import find
from configs.import_utils import bind, callable_name, is_setting, load_extern_object, required_arguments
from configs.schema import RewardFunctionConfig, ScoringConfig
from data.chat import as_messages
from data.concurrency import run_all
from data.protocol import DataProto
from data.rows import RUN_COLUMNS
from data.types import NotScored, Row
from training.reward import RewardRun

FORMS = (
    "compute_score(data_source, solution_str, ground_truth, extra_info=None), "
    "compute_score(data_sources, solution_strs, ground_truths, extra_infos) for a whole batch in lists, "
    "reward(prompts, completions, **columns) of TRL, in lists too, "
    "compute_reward(data, tokenizer=None) for one in a DataProto, or "
    "compute_reward(prompt, response, ground_truth) with those of the three that it needs"
)
# What a function of one response may name, and the column of the view that holds it. The first four are verl's.
ARGUMENTS = {
    "data_source": "data_source",
    "solution_str": "responses",
    "ground_truth": "ground_truths",
    "extra_info": "extra_info",
    "prompt": "prompts",
    "response": "responses",
    "environment": "__environment__",
}
LISTS = {f"{name}s": column for name, column in ARGUMENTS.items()}  # the same of a function of a whole batch
# The same of TRL's form: in lists too, and prompts as they are in the data.
TRL = {
    "prompts": "raw_prompt",
    "completions": "completions",
    "completion_ids": "response_ids",
    "ground_truth": "ground_truths",
}
NO_COLUMN = RUN_COLUMNS | {"prompt", "raw_prompt", "raw_prompt_ids", "response_ids"}  # what TRL's **kwargs do not hold
FACTS = frozenset(("split", "messages", "response_ids", "end_reason", "group", "uid"))  # of both forms
SERVED = ("reward_router_address", "reward_model_tokenizer")  # verl's arguments about a judge that it serves
VERL_ARGUMENTS = 4
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Form:
    """Reads from a reward function's signature how it is called.

    Attributes:
        takes_one_response: whether it is called for each response; else once for all, in lists or in a DataProto.
        columns: arguments that it may name, and the columns of the view that hold them; {} for one of a DataProto.
        takes_every_column: whether it is given all columns of the data set: TRL's, with **kwargs.
        given: all that it is given; of_data: columns of the data set among these; needed: those without a default.
        needs_ground_truth: whether it cannot be called without one.
    """

    def __init__(self, function: Callable, reward_kwargs: dict[str, Any]) -> None:
        signature = inspect.signature(function)
        kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
        takes_data = next(iter(kinds), None) == "data"
        self.takes_one_response = not kinds.keys().isdisjoint(("solution_str", "response", "environment"))
        takes_lists = not takes_data and not kinds.keys().isdisjoint(("solution_strs", "responses", "environments"))
        columns_of_trl = TRL if "completions" in kinds and not takes_data else {}
        self.columns = ARGUMENTS if self.takes_one_response else LISTS if takes_lists else columns_of_trl
        if not self.columns and not takes_data:
            names = ["solution_str", "solution_strs", "response", "responses", "completions"]
            near = [match for name in kinds for match in nearest_by_last_part(name, names)]
            guess = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"the reward function {callable_name(function)}{signature} has none of the known forms: {FORMS}.{guess}"
            )
        known, self.of_data = {"data", "tokenizer"}, set[str]()
        if self.columns:
            known = {*self.columns, *FACTS}
            unknown = {name for name, kind in kinds.items() if kind not in VARIADIC} - known - reward_kwargs.keys()
            self.of_data = {name for name in unknown if not is_setting(function, name)}
        self.argument_names = (known & kinds.keys()) | self.of_data
        has_kwargs = inspect.Parameter.VAR_KEYWORD in kinds.values()
        self.takes_every_column = has_kwargs and self.columns is TRL
        if has_kwargs:
            self.argument_names |= set(list(self.columns)[:VERL_ARGUMENTS])
        self.needed = self.of_data & set(required_arguments(function))
        ground_truth = "ground_truths" if self.columns is LISTS else "ground_truth"
        self.needs_ground_truth = ground_truth not in reward_kwargs and requires(signature, ground_truth)


class Caller(Protocol):
    """Makes the calls of a function, in this process or elsewhere."""

    def begin(self, calls: list[dict[str, Any]], rows: int) -> Callable[[], list[Any]]:
        """Starts calls by their arguments, of so many rows each; returns a function that waits for the results."""


class Here:
    """Calls a function in this process, an async one for several rows side by side; what it raises is raised."""

    def __init__(self, function: Callable, reward_kwargs: dict, max_concurrent: int, timeout: float | None) -> None:
        self.function, self.reward_kwargs = function, reward_kwargs
        self.max_concurrent, self.timeout = max_concurrent, timeout

    def begin(self, calls: list[dict[str, Any]], rows: int) -> Callable[[], list[Any]]:
        results = [self.function(**call | self.reward_kwargs) for call in calls]
        if results and inspect.isawaitable(results[0]):
            results = run_all(results, self.max_concurrent, self.timeout)
        return lambda: results


class FunctionReward:
    """A reward from a function, sync or async; its `form` is read from its signature.

    A function of one response is given what it names among `ARGUMENTS`, `FACTS` and the columns of the data set; one of
    lists among `LISTS` (or `TRL`), `FACTS` and those columns. With **kwargs it gets all of verl's four, TRL's all
    columns. An argument whose default is a value is a setting, and no column.

    Args:
        function: in one of the `FORMS`.
        reward_kwargs: passed on to every call; they win over what the caller passes.
        max_concurrent, timeout: limits of an async function that is called in this process.
        key: the setting that names it.
    """

    def __init__(
        self,
        function: Callable,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reward_kwargs: dict | None = None,
        *,
        max_concurrent: int = ScoringConfig.max_concurrent,
        timeout: float | None = None,
        key: str = "reward.custom_reward_function",
    ) -> None:
        self.function, self.tokenizer, self.reward_kwargs = function, tokenizer, reward_kwargs or {}
        self.caller: Caller = Here(function, self.reward_kwargs, max_concurrent, timeout)
        self.form = Form(function, self.reward_kwargs)
        settings = f"{key}.reward_kwargs"
        if missing := [name for name in SERVED if name in self.form.needed]:
            raise ValueError(
                f"{key}: {callable_name(function)} needs {' and '.join(missing)}: serve a judge yourself "
                f"(python -m extras.server), and set {settings}.reward_router_address=HOST:PORT."
            )
        arguments = dict.fromkeys(sorted(self.form.argument_names))
        bind(function, arguments, self.reward_kwargs, "the reward function", settings=settings)

    @property
    def title(self) -> str:
        return callable_name(self.function)

    def __call__(self, data: DataProto) -> Any:
        """Returns the function's results, a list or one for all; NotScored for a row that could not be scored."""
        return self.begin(data)()

    def begin(self, data: DataProto) -> Callable[[], Any]:
        """Starts scoring, and returns a function that waits for the results."""
        if self.form.takes_one_response:
            return self.caller.begin(self._calls(data), rows=1)
        wait = self.caller.begin(self._calls(data), len(data))

        def result_of_all() -> Any:
            [result] = wait()
            return [result] * len(data) if isinstance(result, NotScored) else result

        return result_of_all

    def check(self, rows: Mapping[int, Row]) -> None:
        """Raises ConfigError if the function needs ground_truth, or a column, that none of the rows has."""
        columns = {name for row in rows.values() for name in row}
        if missing := sorted(self.form.needed - columns):
            raise ConfigError(
                f"the reward {self.title} needs {', '.join(missing)}, which the data does not have; its columns are "
                f"{', '.join(sorted(columns))}."
            )
        labels = [row["reward_model"] for row in rows.values() if isinstance(row.get("reward_model"), dict)]
        if self.form.needs_ground_truth and all(label.get("ground_truth") is None for label in labels):
            raise ConfigError(
                f"the reward {self.title} needs ground_truth, and none of {len(rows)} rows has one: name its column by "
                f"data.ground_truth_key, or any column as an argument: {', '.join(sorted(columns))}."
            )

    def _calls(self, data: DataProto) -> list[dict[str, Any]]:
        """Returns the arguments that the function names: of a call for every response, or of one for all."""
        names = self.form.argument_names
        if not self.form.columns:
            offered = {"data": data, "tokenizer": self.tokenizer}
            return [{name: offered[name] for name in names}]
        if missing := sorted(name for name in self.form.needed if name not in data):
            raise ValueError(
                f"{callable_name(self.function)} cannot be called: there is no column {missing[0]!r}. It may name "
                f"{', '.join([*self.form.columns, *sorted(FACTS)])} and the columns of the data set."
            )
        if self.form.takes_every_column:
            names = names | (data.non_tensor_batch.keys() - NO_COLUMN)
        present = [name for name in names - {"split"} if name not in self.form.of_data or name in data]
        columns = {name: self._column(name, data) for name in present}
        split = {"split": "val" if data.meta_info.get("validate") else "train"} if "split" in names else {}
        if not self.form.takes_one_response:
            return [columns | split]
        return [{name: column[row] for name, column in columns.items()} | split for row in range(len(data))]

    def _column(self, name: str, data: DataProto) -> list[Any]:
        """Returns an argument's value for every response."""
        if name == "messages":  # of the prompt, and all that followed
            nothing = [None] * len(data)
            conversations = data.get("__messages__", nothing)
            prompts = data.get("raw_prompt", data.get("prompts", nothing))
            return [
                messages or [*as_messages(prompt), {"role": "assistant", "content": answer}]
                for messages, prompt, answer in zip(conversations, prompts, data.responses, strict=True)
            ]
        if name == "completions":  # of a chat its messages after the prompt, else a text
            prompts, chats = data.get("raw_prompt", [None] * len(data)), self._column("messages", data)
            rows = zip(prompts, chats, data.responses, strict=True)
            return [chat[len(prompt) :] if isinstance(prompt, list) else text for prompt, chat, text in rows]
        if name == "group":
            groups = defaultdict(list)
            uids = list(data.get("uid", range(len(data))))
            for uid, text in zip(uids, data.responses, strict=True):
                groups[uid].append(text)
            return [groups[uid] for uid in uids]
        return list(data.get(self.form.columns.get(name, name), [None] * len(data)))


def requires(signature: inspect.Signature, argument: str) -> bool:
    """Says whether an argument has no default and, as far as is written there, may not be None."""
    parameter = signature.parameters.get(argument)
    if parameter is None or parameter.default is not parameter.empty:
        return False
    return not re.search("None|Optional", str(parameter.annotation))


def load_function(
    entry: RewardFunctionConfig,
    config: ScoringConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    key: str = "reward.custom_reward_function",
    *,
    kind: type[FunctionReward] = FunctionReward,
    computes: bool = False,
) -> FunctionReward:
    """Loads the function that `entry` names under the setting `key`, to be called by the limits of `config`.

    One that takes a DataProto is called in this process. `computes`: each call takes a core. Raises ValueError if it
    has none of the forms, and whatever loading the file raises.
    """
    function = load_extern_object(entry.path, entry.name, f"{key}.path")
    limits = {"max_concurrent": config.max_concurrent, "timeout": config.timeout, "key": key}
    reward = kind(function, tokenizer, entry.reward_kwargs, **limits)
    if reward.form.columns and config.caller != "here":
        reward.caller = find("caller", config.caller)(function, entry, config, computes)
    return reward


def reward_by(function: Callable, config: ScoringConfig, tokenizer: PreTrainedTokenizerBase | None) -> FunctionReward:
    """Makes a reward of a function, which is called in this process, by the limits of `config`."""
    limits = {"max_concurrent": config.max_concurrent, "timeout": config.timeout, "key": "reward"}
    return FunctionReward(function, tokenizer, config.custom_reward_function.reward_kwargs, **limits)


def load(settings: ScoringConfig, run: RewardRun) -> FunctionReward:
    """Loads the function of a run (the entry of the table)."""
    return load_function(settings.custom_reward_function, settings, run.tokenizer)
