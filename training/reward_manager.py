"""Loads and calls the user's reward managers, in verl's contracts: a class that scores a batch, or, async, a row.

    @register("mine")
    class Mine:
        def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"): ...
        def __call__(self, data, return_dict=False): ...   # [B, R], or {"reward_tensor", "reward_extra_info"}
        async def run_single(self, data): ...              # or this one: {"reward_score", "reward_extra_info"} of a row

reward.reward_manager.name=mine chooses it, from a file that actor_rollout_ref.model.external_lib or
reward.reward_manager.path names. It is the place for what is no function: a reward model, a judge with a queue.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

from transformers import PreTrainedTokenizerBase

from configs.schema import RewardConfig, RewardManagerConfig
from data.concurrency import run_all
from data.import_utils import bind, load_extern_object, load_module
from data.protocol import DataProto

REWARD_MANAGER_REGISTRY: dict[str, type] = {}
Class = TypeVar("Class", bound=type)


@runtime_checkable
class ScoresRows(Protocol):
    """A manager of verl's reward loop."""

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """`reward_score` of the one row in `data`, and `reward_extra_info`, a dict."""


def register(name: str) -> Callable[[Class], Class]:
    """Registers a class of reward managers under `name`. Raises ValueError if another class has it."""

    def add(found: Class) -> Class:
        known = REWARD_MANAGER_REGISTRY.setdefault(name, found)
        if known is not found:
            raise ValueError(f"the reward manager {name!r} is {known.__qualname__} already: choose another name.")
        return found

    return add


def get_reward_manager_cls(name: str) -> type:
    """Returns the class registered under `name`. Raises ValueError if there is none."""
    if name not in REWARD_MANAGER_REGISTRY:
        known = ", ".join(sorted(REWARD_MANAGER_REGISTRY)) or "none"
        raise ValueError(
            f"Unknown reward manager: {name}. Registered are: {known}; one of yours stands under @register({name!r}) "
            "(training/reward_manager.py) in a file that actor_rollout_ref.model.external_lib names, or is the class "
            "of this name in the file reward.reward_manager.path. verl's naive, batch, dapo, prime, remote and "
            "rate_limited need no name here."
        )
    return REWARD_MANAGER_REGISTRY[name]


def load_manager_class(chosen: RewardManagerConfig) -> type | None:
    """Loads the class of a manager that needs no environment; returns None if the settings are an environment's."""
    default = RewardManagerConfig()
    if chosen.path != default.path:
        load_module(chosen.path)
        if chosen.name not in REWARD_MANAGER_REGISTRY:
            return load_extern_object(chosen.path, chosen.name)
    return None if chosen.name == default.name else get_reward_manager_cls(chosen.name)


class UsersManager:
    """A manager of verl's contracts as one of ours, which is called with a `reward_view`.

    The constructor is given what it names of tokenizer, config (the reward section), num_examine (0), compute_score
    (the function of the config, or None), reward_fn_key, max_resp_len and overlong_buffer_cfg.
    """

    def __init__(
        self,
        manager_class: type,
        config: RewardConfig,
        tokenizer: PreTrainedTokenizerBase,
        compute_score: Callable | None,
    ) -> None:
        offered = {
            "config": config,
            "tokenizer": tokenizer,
            "num_examine": 0,
            "compute_score": compute_score,
            "reward_fn_key": "data_source",
            **vars(config.reward_kwargs),
        }
        self.config = config
        self.manager = bind(manager_class, offered, key="reward.reward_manager")()

    def __call__(self, data: DataProto) -> Any:
        if not isinstance(self.manager, ScoresRows):
            return bind(self.manager, {"return_dict": True}, key="reward.reward_manager", positional={"data": data})()
        calls = [self.manager.run_single(data[row : row + 1]) for row in range(len(data))]
        found = run_all(calls, self.config.max_concurrent, self.config.timeout)
        return [{"score": one["reward_score"], **one.get("reward_extra_info", {})} for one in found]
