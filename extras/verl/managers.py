"""Loads and calls reward managers in verl's contracts: a class that scores a batch, or, async, a row.

    @register("mine")
    class Mine:
        def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"): ...
        def __call__(self, data, return_dict=False): ...   # [B, R], or {"reward_tensor", "reward_extra_info"}
        async def run_single(self, data): ...              # or this one: {"reward_score", "reward_extra_info"} of a row

reward.reward_manager.name=mine chooses it, from a file that actor_rollout_ref.model.external_lib or
reward.reward_manager.path names. It may be a subclass of the classes below; the naive ones call the run's function.
"""

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from configs.import_utils import bind, find, load_extern_object, load_module
from configs.schema import Config, RewardConfig, RewardManagerConfig
from data.concurrency import run_all
from data.padding import last_token
from data.protocol import DataProto
from data.types import NotScored
from training.reward import extra_columns, place_scores, read_results
from training.reward_function import FunctionReward

REWARD_MANAGER_REGISTRY: dict[str, type] = {}
Class = TypeVar("Class", bound=type)


def register(name: str) -> Callable[[Class], Class]:
    """Registers a class of reward managers under `name`. Raises ValueError if another class has it."""

    def add(manager_class: Class) -> Class:
        known = REWARD_MANAGER_REGISTRY.get(name, manager_class)
        if (known.__module__, known.__qualname__) != (manager_class.__module__, manager_class.__qualname__):
            raise ValueError(f"the reward manager {name!r} is {known.__qualname__} already: choose another name.")
        REWARD_MANAGER_REGISTRY[name] = manager_class
        return manager_class

    return add


def get_reward_manager_cls(name: str) -> type:
    """Returns the class registered under `name`. Raises ValueError if there is none."""
    if name not in REWARD_MANAGER_REGISTRY:
        known = ", ".join(sorted(REWARD_MANAGER_REGISTRY)) or "none"
        raise ValueError(
            f"Unknown reward manager: {name}; registered: {known}. Write @register({name!r}) in the file of "
            "reward.reward_manager.path."
        )
    return REWARD_MANAGER_REGISTRY[name]


class AbstractRewardManager(ABC):
    """The base of managers that score a batch at once."""

    @abstractmethod
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score: Callable | None, reward_fn_key: str = "data_source"
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Returns scores [B, R], or with `return_dict` {"reward_tensor", "reward_extra_info"}: B values a key."""


class NaiveRewardManager(AbstractRewardManager):
    """Scores each row by the function that it is given, and puts the score on the last token of the policy."""

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: Callable | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        self.tokenizer, self.num_examine, self.reward_fn_key = tokenizer, num_examine, reward_fn_key
        self.compute_score = compute_score

    def verify(self, data: DataProto) -> Any:
        """Returns a number or a dict for each row; what verl's managers of batches have their subclasses override."""
        return FunctionReward(self.compute_score, self.tokenizer)(data)

    def __call__(self, data: DataProto, return_dict: bool = False) -> Tensor | dict[str, Any]:
        mask, name = data.batch["response_mask"], type(self).__name__
        results = read_results(self.verify(data), mask.shape, name)
        placed = place_scores(results, mask, name)
        return {"reward_tensor": placed, "reward_extra_info": extra_columns(results)} if return_dict else placed


class RewardManagerBase(ABC):
    """The base of managers that score a row at a time, side by side; `config` is the whole config of the run."""

    _class_initialized = False

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Callable | None = None) -> None:
        self.config, self.tokenizer, self.compute_score = config, tokenizer, compute_score
        self.is_async_reward_score = inspect.iscoroutinefunction(compute_score)
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: DictConfig, tokenizer: Any) -> None:
        """Prepares what all objects of a class share, once."""
        cls._class_initialized = True

    def __getattr__(self, name: str) -> Any:
        if name == "loop":  # of the moment: each batch is scored in an event loop of its own
            return asyncio.get_running_loop()
        raise AttributeError(f"{type(self).__name__} has no {name!r}")

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Returns `reward_score` of the one row in `data`, and `reward_extra_info`, a dict."""

    async def run_batch(self, data: DataProto) -> list[dict[str, Any]]:
        """Scores all rows; a subclass that overrides it is called so, once a batch, such as to rank them."""
        return await asyncio.gather(*(self.run_single(data[row : row + 1]) for row in range(len(data))))


class NaiveLoopManager(RewardManagerBase):
    """Scores a row by the function that it is given; a lone number comes as the column `acc` too."""

    def __init__(self, config: DictConfig, tokenizer: Any, compute_score: Callable, **kwargs: Any) -> None:
        super().__init__(config, tokenizer, compute_score)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        [result] = await asyncio.to_thread(FunctionReward(self.compute_score, self.tokenizer), data)
        columns = result if isinstance(result, dict) else {"score": result, "acc": result}
        return {"reward_score": columns["score"], "reward_extra_info": dict(columns)}


class UsersManager:
    """A manager of verl's contracts as one of ours, which is called with a `reward_view`.

    The constructor is given what it names of tokenizer, config (the whole, see `verls_view`), num_examine (0),
    compute_score (the run's function, or the rules of public data sets), reward_fn_key, reward_router_address and
    reward_model_tokenizer (None), and of reward.reward_kwargs; a manager of batches must take all keys of yours there.
    """

    def __init__(self, manager_class: type, config: RewardConfig, compute_score: Callable, run: Any) -> None:
        offered = {"config": verls_view(config, run.config), "tokenizer": run.tokenizer, "compute_score": compute_score}
        offered |= {"num_examine": 0, "reward_fn_key": "data_source"}
        offered |= {"reward_router_address": None, "reward_model_tokenizer": None, **kwargs_of(config)}
        methods = dir(manager_class)
        self.config, self.scores_rows = config, "run_single" in methods
        required = None if self.scores_rows else config.reward_kwargs.extras
        key, settings = "reward.reward_manager", "reward.reward_kwargs"
        self.manager = bind(manager_class, offered, required, key, settings=settings)()
        has_batch = "run_batch" in methods and manager_class.run_batch is not RewardManagerBase.run_batch
        self.scores_batches = self.scores_rows and has_batch

    def __call__(self, data: DataProto) -> Any:
        if not self.scores_rows:
            call = bind(self.manager, {"return_dict": True}, key="reward.reward_manager", positional={"data": data})
            return move_to_policy(call(), data)
        rows, seconds = len(data), self.config.timeout
        if self.scores_batches:
            late = NotScored("timeout", f"run_batch was not done after reward.timeout={seconds} seconds a row")
            [results] = run_all([self.manager.run_batch(data)], 1, seconds and seconds * rows, [late] * rows)
        else:
            calls = [self.manager.run_single(data[row : row + 1]) for row in range(rows)]
            late = NotScored("timeout", f"run_single was not done after reward.timeout={seconds} seconds")
            results = run_all(calls, self.config.max_concurrent, seconds, late)
        return [
            row if isinstance(row, NotScored) else (row.get("reward_extra_info") or {}) | {"score": row["reward_score"]}
            for row in results
        ]


def load(settings: RewardConfig, run: Any) -> UsersManager:
    """Loads the manager that reward.reward_manager names, with the run's function or the rules of public data sets."""
    function = settings.custom_reward_function
    if function.path:
        scores, kwargs = load_extern_object(function.path, function.name), function.reward_kwargs
    else:
        rules = find("reward", "rules")(settings, run)
        scores, kwargs = rules.function, rules.reward_kwargs
    return UsersManager(load_manager_class(settings.reward_manager), settings, partial(scores, **kwargs), run)


def load_manager_class(chosen: RewardManagerConfig) -> type:
    """Loads the class of a manager: registered under its name, or of that name in the user's file."""
    if chosen.path != RewardManagerConfig().path:
        load_module(chosen.path, "reward.reward_manager.path")
        if chosen.name not in REWARD_MANAGER_REGISTRY:
            return load_extern_object(chosen.path, chosen.name)
    return get_reward_manager_cls(chosen.name)


def kwargs_of(config: RewardConfig) -> dict[str, Any]:
    """Returns reward.reward_kwargs in one dict, those of the user's beside ours."""
    kwargs = asdict(config.reward_kwargs)
    return kwargs.pop("extras") | kwargs


def verls_view(config: RewardConfig, run_config: Config | None) -> DictConfig:
    """Returns the config as managers of verl read it, in which rewards stand in their older sections too."""
    plain = {**(asdict(run_config) if run_config is not None else {}), "reward": asdict(config)}
    reward = plain["reward"]
    reward["reward_kwargs"] = kwargs_of(config)
    older = {"reward_kwargs": reward["reward_kwargs"], "reward_manager": config.reward_manager.name}
    plain |= {"reward_model": reward["reward_model"] | older}
    return OmegaConf.create(plain | {"custom_reward_function": reward["custom_reward_function"]})


def move_to_policy(result: Any, data: DataProto) -> Any:
    """Moves a row's only score from its last token to the policy's last, where the row ends in a tool's answer; a row
    in which the policy wrote nothing has no score. Other results stay as they are."""
    scores = result.get("reward_tensor") if isinstance(result, dict) else result
    if not isinstance(scores, Tensor) or scores.ndim != 2 or scores.shape != data.batch["response_mask"].shape:
        return result
    mask, shown = data.batch["response_mask"], data.batch["attention_mask"][:, -scores.shape[1] :]
    lone = ((scores != 0).sum(1) == 1) & ((scores != 0) & (last_token(shown) == 1)).any(1) | (mask.sum(1) == 0)
    moved = torch.where(last_token(mask) == 1, scores.sum(1, keepdim=True), 0.0)
    scores = torch.where(lone[:, None], moved.to(scores.dtype), scores)
    return result | {"reward_tensor": scores} if isinstance(result, dict) else scores
