"""A reward function as a reward manager: its form is read from its signature, and it is given what it names.

What it is given comes from a `reward_view` (training/reward.py), a row for each response; what it returns is checked
there.
"""

import inspect
import re
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from configs.schema import RewardFunctionConfig, ScoringConfig
from data.concurrency import run_all
from data.import_utils import callable_name, load_extern_object
from training.scorer_process import is_async
from training.scorers import NotScored, Scorers

if TYPE_CHECKING:  # a reward is tried without them (training/try_reward.py)
    from transformers import PreTrainedTokenizerBase

    from data.protocol import DataProto

FORMS = (
    "compute_score(data_source, solution_str, ground_truth, extra_info=None), "
    "compute_score(data_sources, solution_strs, ground_truths, extra_infos) for a whole batch in lists, "
    "compute_reward(data, tokenizer=None) for one in a DataProto, or "
    "compute_reward(prompt, response, ground_truth)"
)
# What a function of one response may name, and the column of the view that holds it. The first four are verl's.
ARGUMENTS = {
    "data_source": "data_source",
    "solution_str": "responses",
    "ground_truth": "ground_truths",
    "extra_info": "extra_info",
    "prompt": "prompts",
    "response": "responses",
}
LISTS = {f"{name}s": column for name, column in ARGUMENTS.items()}  # the same of a function of a whole batch
VERL_ARGUMENTS = 4


class FunctionReward:
    """A reward manager from a function, sync or async; its form is read from its signature.

    A function of one response is given exactly what it names among `ARGUMENTS` and `split` ("train" or "val"); one of
    lists, each with an element for every response, among `LISTS` and `split`. With **kwargs it gets all of verl's four.

    Args:
        function: in one of the four `FORMS`.
        reward_kwargs: passed on to every call; they win over what the caller passes.
        max_concurrent, timeout: limits of an async function that is called in this process.
        scorers: processes that call it; None: it is called here, and what it raises is raised.
        key: the setting that names it.

    Raises:
        ValueError: the signature has none of the forms, or does not go with `reward_kwargs`.
    """

    def __init__(
        self,
        function: Callable,
        tokenizer: "PreTrainedTokenizerBase | None" = None,
        reward_kwargs: dict | None = None,
        *,
        max_concurrent: int = ScoringConfig.max_concurrent,
        timeout: float | None = None,
        scorers: Scorers | None = None,
        key: str = "reward.custom_reward_function",
    ) -> None:
        self.function = function
        self.tokenizer = tokenizer
        self.reward_kwargs = reward_kwargs or {}
        self.max_concurrent, self.timeout, self.scorers = max_concurrent, timeout, scorers
        signature = inspect.signature(function)
        self.takes_one_response = bool({"solution_str", "response"} & set(signature.parameters))
        takes_data = next(iter(signature.parameters), None) == "data"
        takes_lists = not takes_data and bool({"solution_strs", "responses"} & set(signature.parameters))
        self.columns = ARGUMENTS if self.takes_one_response else LISTS if takes_lists else {}
        if not self.columns and not takes_data:
            raise ValueError(
                f"the reward function {callable_name(function)}{signature} has none of the known forms: {FORMS}."
            )
        known = [*self.columns, "split"] if self.columns else ["data", "tokenizer"]
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
        self.wanted = {name for name in known if name in signature.parameters}
        ground_truth = "ground_truths" if self.columns is LISTS else "ground_truth"
        given = ground_truth in self.reward_kwargs
        self.needs_ground_truth = not given and cannot_do_without(signature, ground_truth)
        if takes_all:
            self.wanted |= set(list(self.columns)[:VERL_ARGUMENTS])
        try:
            signature.bind(**dict.fromkeys(self.wanted) | self.reward_kwargs)
        except TypeError as error:
            raise ValueError(
                f"the reward function {callable_name(function)}{signature} cannot be called: {error}. It is given "
                f"{sorted(self.wanted)} and {key}.reward_kwargs={self.reward_kwargs}."
            ) from error

    def __call__(self, data: "DataProto") -> Any:
        """What the function returns for each row, or for all; NotScored for a row that its process could not score."""
        return self.begin(data)()

    def begin(self, data: "DataProto") -> Callable[[], Any]:
        """Starts scoring; what is returned waits for the results, if they come from elsewhere."""
        calls = [{name: call[name] for name in self.wanted} for call in self._calls(data)]
        if self.scorers is None:
            results = self._called_here(calls)
            return lambda: results
        rows = 1 if self.takes_one_response else len(data)
        return partial(self._joined, [self.scorers.submit(call, rows) for call in calls], len(data))

    def scores_rows(self) -> bool:
        """Whether a row can be scored in a process before the others are there."""
        return self.takes_one_response and self.scorers is not None

    def of_rows(self, begun: list[list[Any]]) -> list[Any]:
        """The results for a batch, from what `begin` had for each of its rows alone."""
        return [result for [result] in begun]

    def _called_here(self, calls: list[dict[str, Any]]) -> Any:
        results = [self.function(**call | self.reward_kwargs) for call in calls]
        if results and inspect.isawaitable(results[0]):
            results = run_all(results, self.max_concurrent, self.timeout)
        return results if self.takes_one_response else results[0]

    def _joined(self, futures: list[Future], rows: int) -> Any:
        results = results_of(futures)
        if self.takes_one_response:
            return results
        [result] = results
        return [result] * rows if isinstance(result, NotScored) else result

    def _calls(self, data: "DataProto") -> list[dict[str, Any]]:
        """What each call of the function may name: a call for every response, or one for all."""
        if not self.columns:
            return [{"data": data, "tokenizer": self.tokenizer}]
        split = "val" if data.meta_info.get("validate") else "train"
        columns = {name: list(data.get(column, [None] * len(data))) for name, column in self.columns.items()}
        if not self.takes_one_response:
            return [columns | {"split": split}]
        return [{"split": split} | {name: column[row] for name, column in columns.items()} for row in range(len(data))]


def cannot_do_without(signature: inspect.Signature, argument: str) -> bool:
    """Whether an argument has no default and, as far as is written there, may not be None."""
    parameter = signature.parameters.get(argument)
    if parameter is None or parameter.default is not parameter.empty:
        return False
    return not re.search("None|Optional", str(parameter.annotation))


def results_of(futures: list[Future]) -> list[Any]:
    """The results of calls, in their order; when waiting for them ends early, so do they."""
    try:
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


def load_function(
    entry: RewardFunctionConfig,
    config: ScoringConfig,
    tokenizer: "PreTrainedTokenizerBase | None",
    key: str = "reward.custom_reward_function",
) -> FunctionReward:
    """The function that `entry` names under the setting `key`, called as `config` says.

    One that takes a DataProto is called in this process: its rows cannot be scored one by one.

    Raises:
        ValueError: it has none of the forms; and whatever loading the file raises.
    """
    function = load_extern_object(entry.path, entry.name)
    limits = {"max_concurrent": config.max_concurrent, "timeout": config.timeout, "key": key}
    reward = FunctionReward(function, tokenizer, entry.reward_kwargs, **limits)
    if reward.columns and not config.in_process:
        reward.scorers = Scorers(entry.path, entry.name, reward.reward_kwargs, is_async(function), config)
    return reward
