"""Calls a reward function as a reward manager.

A function's form is read from its signature, and it is given the arguments that it names. They come from a
`reward_view` (training/reward.py), a row for each response.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError, nearest_by_last_part, notice_once
from configs.import_utils import (
    bind,
    callable_name,
    find,
    is_setting,
    load_extern_object,
    load_module,
    required_arguments,
)
from configs.schema import RewardFunctionConfig, ScoringConfig
from data.chat import as_messages
from data.concurrency import run_all
from data.protocol import DataProto
from data.rows import RUN_COLUMNS
from data.types import Message, NotScored, Row
from training.reward import RewardRun

FORMS = (
    "compute_score(data_source, solution_str, ground_truth, extra_info=None), "
    "compute_score(data_sources, solution_strs, ground_truths, extra_infos) for a whole batch in lists, "
    "reward(prompts, completions, **columns) of TRL, in lists too, "
    "compute_reward(data, tokenizer=None) for one in a DataProto, or "
    "compute_reward(prompt, response, ground_truth) with those of the three that it needs"
)
Caller = Callable[[list[dict], int], Callable[[], list]]  # starts calls of so many rows each; its result waits for them
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

# What a function of one response may name, and the column of the view that holds it. The first four are verl's.
ARGUMENTS = {
    "data_source": "data_source", "solution_str": "responses", "ground_truth": "ground_truths",
    "extra_info": "extra_info", "prompt": "prompts", "response": "responses", "environment": "__environment__",
}  # fmt: skip
LISTS = {f"{name}s": column for name, column in ARGUMENTS.items()}  # the same of a function of a whole batch
TRL = {  # the same of TRL's form: in lists too, and prompts as they are in the data
    "prompts": "raw_prompt", "completions": "completions", "completion_ids": "response_ids",
    "ground_truth": "ground_truths",
}  # fmt: skip
FORM_OF = {  # by the argument that tells a form, the first that is there: what such a function may name
    **dict.fromkeys(("solution_str", "response", "environment"), ARGUMENTS),
    "data": {},
    **dict.fromkeys(("solution_strs", "responses", "environments"), LISTS),
    "completions": TRL,
}
FACTS = frozenset(("split", "messages", "response_ids", "end_reason", "group", "uid"))  # of every form
TRUTHS = frozenset(("ground_truth", "ground_truths"))
PAID = ("tool_rewards", "turn_scores")  # on the way of an episode, which a reward may add
NO_COLUMN = RUN_COLUMNS | {"prompt", "raw_prompt", "raw_prompt_ids", "response_ids"}  # what TRL's **kwargs do not hold
SERVED = ("reward_router_address", "reward_model_tokenizer")  # verl's arguments about a judge that it serves
VERL_ARGUMENTS = 4


class FunctionReward:
    """A reward from a function, sync or async, whose form is read from its signature.

    It is given what it names among the arguments of its form, `FACTS` and the columns of the data set: of a response,
    or lists. With **kwargs it gets all of verl's four, TRL's all columns. An argument whose default is a value is a
    setting, and no column.

    Args:
        function: in one of the `FORMS`.
        reward_kwargs: passed on to every call; they win over what the caller passes.
        config: has the limits of an async function that is called in this process.
        key: the setting that names it.

    Attributes:
        columns: arguments of its form, and the columns of the view that hold them; {}: it takes a DataProto.
        takes_one_response: whether it is called for each response; else once for all.
        names: of all arguments that it is given; `needed`: columns and ground truths that the data must have.
    """

    def __init__(
        self,
        function: Callable,
        tokenizer: PreTrainedTokenizerBase | None = None,
        reward_kwargs: dict | None = None,
        config: ScoringConfig | None = None,
        key: str = "reward.custom_reward_function",
    ) -> None:
        self.function, self.tokenizer, self.reward_kwargs = function, tokenizer, reward_kwargs or {}
        self.config = config or ScoringConfig()
        self.caller: Caller = self.call_here
        parameters = inspect.signature(function).parameters
        self.columns = form_of(function)
        self.takes_one_response = self.columns is ARGUMENTS
        known = {*self.columns, *FACTS} if self.columns else {"data", "tokenizer", *FACTS}
        named = {name for name, p in parameters.items() if p.kind not in VARIADIC} - self.reward_kwargs.keys()
        of_data = {name for name in named - known if not is_setting(function, name)}
        self.names = named & known | of_data
        has_kwargs = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self.takes_every_column = has_kwargs and self.columns is TRL
        if has_kwargs:
            self.names |= {*[*self.columns][:VERL_ARGUMENTS]}
        self.required = named & {*required_arguments(function)}
        optional = {name for name, p in parameters.items() if re.search("None|Optional", str(p.annotation))}
        self.needed = self.required & (of_data | TRUTHS - optional)
        settings = f"{key}.reward_kwargs"
        if missing := self.needed.intersection(SERVED):
            raise ValueError(
                f"{key}: {self.title} needs {' and '.join(sorted(missing))}: serve a judge yourself "
                f"(python -m extras.server), and set {settings}.reward_router_address=HOST:PORT."
            )
        arguments = dict.fromkeys(sorted(self.names))
        bind(function, arguments, self.reward_kwargs, "the reward function", settings=settings)

    @property
    def title(self) -> str:
        return callable_name(self.function)

    def __call__(self, data: DataProto) -> Any:
        """Returns the function's results, a list or one for all; NotScored for a row that could not be scored."""
        return self.begin(data)()

    def begin(self, data: DataProto) -> Callable[[], Any]:
        """Starts scoring, and returns a function that waits for the results."""
        if self.takes_one_response:
            return self.caller(self._calls(data), 1)
        wait = self.caller(self._calls(data), len(data))

        def result_of_all() -> Any:
            [result] = wait()
            return [result] * len(data) if isinstance(result, NotScored) else result

        return result_of_all

    def call_here(self, calls: list[dict[str, Any]], rows: int) -> Callable[[], list[Any]]:
        """Calls the function in this process, an async one for several rows side by side; what it raises is raised."""
        results = [self.function(**call | self.reward_kwargs) for call in calls]
        if results and inspect.isawaitable(results[0]):
            results = run_all(results, self.config.max_concurrent, self.config.timeout)
        return lambda: results

    def check(self, rows: Mapping[int, Row]) -> None:
        """Raises ConfigError if the function needs a ground truth, or a column, that none of the rows has."""
        columns = {name for row in rows.values() for name in row} - TRUTHS
        labels = [row["reward_model"] for row in rows.values() if isinstance(row.get("reward_model"), dict)]
        has_truths = any(label.get("ground_truth") is not None for label in labels)
        if missing := sorted(self.needed - columns - (TRUTHS if has_truths else set())):
            raise ConfigError(
                f"the reward {self.title} needs {', '.join(missing)}, and none of {len(rows)} rows has one: they have "
                f"{', '.join(sorted(columns))}; data.ground_truth_key names the column of ground_truth."
            )

    def _calls(self, data: DataProto) -> list[dict[str, Any]]:
        """Returns the arguments of a call for every response, or of one for all; the default of one that is not there
        counts, or None."""
        if paid := [name for name in PAID if name in data and any(map(any, filter(None, data.get(name))))]:
            self._tell_of_unread(paid)
        shared: dict[str, Any] = {"split": "val" if data.meta_info.get("validate") else "train"}
        if not self.columns:
            shared |= {"data": data, "tokenizer": self.tokenizer}
        columns, names = {}, self.names
        if self.takes_every_column:
            names = names | (data.non_tensor_batch.keys() - NO_COLUMN)
        for name in names - shared.keys():
            source = self.columns.get(name, name)
            if name in COMPUTED:
                columns[name] = COMPUTED[name](data)
            elif source in data or name in self.required:
                columns[name] = list(data.get(source, [None] * len(data)))
        shared = {name: value for name, value in shared.items() if name in names}
        if not self.takes_one_response:
            return [columns | shared]
        return [dict(zip(columns, row, strict=True)) | shared for row in zip(*columns.values(), strict=True)]

    def _tell_of_unread(self, paid: list[str]) -> None:
        """Says once which of these rewards of tools and users earn nothing, unless the function's file names them."""
        text = ""
        with suppress(OSError, TypeError):  # there is no file
            text = inspect.getsource(inspect.getmodule(self.function))
        if unread := [name for name in paid if name not in text]:
            terms = " + ".join(f'sum(extra_info["{name}"])' for name in unread)
            notice_once(
                f"{' and '.join(unread)} are not 0, and earn nothing unless the reward adds them, {self.title} or one "
                f"of yours: def compute_score(data_source, solution_str, ground_truth, extra_info): … and return score "
                f"+ {terms}"
            )


def conversations(data: DataProto) -> list[list[Message]]:
    """Returns the messages of each prompt, and all that followed."""
    nothing = [None] * len(data)
    prompts = data.get("raw_prompt", data.get("prompts", nothing))
    rows = zip(data.get("__messages__", nothing), prompts, data.responses, strict=True)
    return [chat or [*as_messages(prompt), {"role": "assistant", "content": text}] for chat, prompt, text in rows]


def completions(data: DataProto) -> list[str | list[Message]]:
    """Returns each response: of a chat the messages after its prompt, else a text."""
    rows = zip(data.get("raw_prompt", [None] * len(data)), conversations(data), data.responses, strict=True)
    return [chat[len(prompt) :] if isinstance(prompt, list) else text for prompt, chat, text in rows]


def groups(data: DataProto) -> list[list[str]]:
    """Returns, for each response, the texts of all responses to its prompt."""
    uids, texts = list(data.get("uid", range(len(data)))), defaultdict(list)
    for uid, text in zip(uids, data.responses, strict=True):
        texts[uid].append(text)
    return [texts[uid] for uid in uids]


COMPUTED = {"messages": conversations, "completions": completions, "group": groups}


def form_of(function: Callable) -> dict[str, str]:
    """Returns the arguments of a function's form. Raises ValueError if it has none of the known ones."""
    signature = inspect.signature(function)
    for mark, columns in FORM_OF.items():
        if mark in signature.parameters:
            return columns
    near = [match for name in signature.parameters for match in nearest_by_last_part(name, [*FORM_OF])]
    guess = f" Did you mean {near[0]!r}?" if near else ""
    name = f"{callable_name(function)}{signature}"
    raise ValueError(f"the reward function {name} has none of the known forms: {FORMS}.{guess}")


def with_name(entry: RewardFunctionConfig, key: str) -> RewardFunctionConfig:
    """Returns `entry` with a name that its file has: where that lacks the default one, compute_reward or the only
    function that can be a reward. Raises ConfigError, which begins with `key`, if none or several can."""
    if entry.name != RewardFunctionConfig.name:
        return entry
    module = load_module(entry.path, f"{key}.path")
    functions = {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__  # and is not imported
    }
    if entry.name in vars(module) or not functions:
        return entry
    parameters = {name: inspect.signature(function).parameters for name, function in functions.items()}
    rewards = [name for name in functions if name[0] != "_" and FORM_OF.keys() & parameters[name]]
    chosen = [name for name in rewards if name == "compute_reward"] or rewards
    problem = f"{key}.path={entry.path} has no {entry.name}"
    if len(chosen) != 1:
        raise ConfigError(f"{problem}: set {key}.name to one of its functions, {', '.join(rewards or functions)}.")
    notice_once(f"{problem}: its function {chosen[0]} scores ({key}.name={chosen[0]}).")
    return replace(entry, name=chosen[0])


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
    entry = with_name(entry, key)
    function = load_extern_object(entry.path, entry.name, f"{key}.path")
    reward = kind(function, tokenizer, entry.reward_kwargs, config, key)
    if reward.columns and config.caller == "scorers":
        reward.caller = find("optional", "scorers")(function, entry, config, computes)
    return reward


def reward_by(reward: Callable, config: ScoringConfig, tokenizer: PreTrainedTokenizerBase | None) -> Callable:
    """Makes a reward of a caller's object, which is called in this process: a manager, any object that is called with
    a batch alone, is one already, and a function is called by the limits of `config`."""
    required = required_arguments(reward)
    if not inspect.isroutine(reward) and len(required) == 1 and FORM_OF.get(required[0], {}) == {}:
        return reward
    return FunctionReward(reward, tokenizer, config.custom_reward_function.reward_kwargs, config)


def load(settings: ScoringConfig, run: RewardRun) -> FunctionReward:
    """Loads the function of a run (the entry of the table)."""
    return load_function(settings.custom_reward_function, settings, run.tokenizer)
