"""Makes any gymnasium environment a text environment, by two functions: observation to text and text to action.

An id also runs without them: extras/gym writes observations out, and reads actions. For better texts, write the two
functions and an entry of `ENVIRONMENTS`:

    def my_text(env, observation): return f"You see {observation}."    # env: the unwrapped gymnasium environment
    def my_action(text): return 1 if "yes" in text.lower() else None   # None: no legal action in this text
    ENVIRONMENTS["MyGame-v0"] = {"observation_to_text": my_text, "text_to_action": my_action}

then `make_env("my_module:MyGame-v0")`, or by its file, `make_env("./my_game.py:MyGame-v0")`. `make_text_env(id,
my_text, my_action)` adds the entry and makes the environment. It (custom/gym/text_env.py) gives single states
(`get_state`, `compute_reward`) and whole episodes (`reset`, `step`).
"""

from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any

from gymnasium.envs.registration import find_highest_version
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from configs.errors import notice_once
from configs.import_utils import find, load_module
from custom.gym.text_env import EnvState, TextEnv
from custom.gym.world import split_id

__all__ = ["ENVIRONMENTS", "EnvState", "TextEnv", "make_env", "make_text_env"]


def grid_text(cells: str, columns: int, player: int) -> str:
    """Writes one character a cell, P in place of the player's, so that columns stay aligned."""
    cells = cells[:player] + "P" + cells[player + 1 :]
    return "\n".join(cells[i : i + columns] for i in range(0, len(cells), columns))


def frozen_lake_text(env: Any, cell: int) -> str:
    return grid_text(env.desc.tobytes().decode(), env.ncol, cell)


@lru_cache(maxsize=1 << 14)
def frozen_lake_map(seed: int, size: int = 4) -> dict[str, Any]:
    """Returns the constructor arguments of a random solvable map of size x size cells."""
    return {"desc": tuple(generate_random_map(size=size, seed=seed))}


def cliff_walking_text(env: Any, cell: int) -> str:
    cells = ["C" if cliff else "." for cliff in env._cliff.flat]
    return grid_text("".join(cells[:-1]) + "G", env.shape[1], cell)


def taxi_text(env: Any, observation: int) -> str:
    """Returns the map with the taxi as T, then what that hides: the pad under T, and who goes where."""
    row, column, passenger, destination = env.decode(observation)
    cells = env.desc.astype(str)[1:-1, 1:-1]  # without its frame
    cells[row, 2 * column] = "T"
    pads = dict(zip(env.locs, "RGYB", strict=True))
    taxi = f"on {pads[row, column]}" if (row, column) in pads else "on the road"
    passenger_text = "in the taxi" if passenger == len(pads) else f"at {'RGYB'[passenger]}"
    summary = f"Taxi {taxi}, passenger {passenger_text}, to {'RGYB'[destination]}."
    return "\n".join(["".join(line) for line in cells] + [summary])


def blackjack_text(env: Any, observation: tuple[int, int, int]) -> str:
    total, card, usable_ace = observation
    ace = " with a usable ace" if usable_ace else ""
    return f"Your cards sum to {total}{ace}. The dealer shows {'an ace' if card == 1 else card}."


_FROZEN_LAKE = {
    "observation_to_text": frozen_lake_text,
    "action_names": ("L|left", "D|down", "R|right", "U|up"),
    "instruction": "You are P on a frozen lake. Walk to G over the ice (S, F); H is a hole. "
    "Answer with one letter: L (left), D (down), R (right) or U (up).",
    "success": {"last_reward_above": 0.0},  # a hole pays 0 and ends the episode too
}
_CLIFF_WALKING = {
    "observation_to_text": cliff_walking_text,
    "action_names": ("up|U", "right|R", "down|D", "left|L"),
    "instruction": "You are P. Walk to G; a step into the cliff C takes you back to the start. "
    "Answer with one word: up, right, down or left.",
    "success": {"terminated": True},  # nothing but the goal ends an episode
}
# gymnasium id -> arguments of TextEnv. Without a text_to_action, the answer's last mention of an action name counts.
ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "FrozenLake-v1": {**_FROZEN_LAKE, "random_map": frozen_lake_map},
    "FrozenLake8x8-v1": _FROZEN_LAKE,
    "CliffWalking-v1": _CLIFF_WALKING,
    "CliffWalkingSlippery-v1": _CLIFF_WALKING,
    "Taxi-v4": {
        "observation_to_text": taxi_text,
        "action_names": ("south", "north", "east", "west", "pickup|pick up|pick-up", "dropoff|drop off|drop-off"),
        "instruction": "You drive the taxi T; it can cross : but not |. Take the passenger to their destination. "
        "Answer with one word: south, north, east, west, pickup or dropoff.",
        "success": {"terminated": True},
    },
    "Blackjack-v1": {
        "observation_to_text": blackjack_text,
        "action_names": ("stick|stand", "hit"),
        "instruction": "Come closer to 21 than the dealer, without going over. Answer with one word: stick or hit.",
        "success": {"last_reward_above": 0.0},
    },
    "CartPole-v1": {
        "observation_names": ("position", "speed", "angle", "turning"),
        "action_names": ("left|L", "right|R"),
    },
    "MountainCar-v0": {"observation_names": ("position", "speed"), "action_names": ("left|L", "coast|C", "right|R")},
    "MountainCarContinuous-v0": {"observation_names": ("position", "speed")},
    "Pendulum-v1": {"observation_names": ("cos", "sin", "speed")},
    "Acrobot-v1": {
        "observation_names": ("cos 1", "sin 1", "cos 2", "sin 2", "speed 1", "speed 2"),
        "action_names": ("left|L", "coast|C", "right|R"),
    },
}
SETTINGS = {setting.name for setting in fields(TextEnv)} - {"env_id", "env_kwargs", "timeout"}
RUN_SETTINGS = {"seed", "exclude_seeds", "random_maps", "processes", "timeout"}  # not stored in an entry


def make_env(
    env_id: str,
    seed: int = 0,
    *,
    random_maps: bool = False,
    processes: int = 0,
    timeout: float | None = 60.0,
    **settings: Any,
) -> Any:
    """Makes the text environment of a gymnasium id, with its entry of `ENVIRONMENTS` if it has one.

    `random_maps=True, size=4` gives every seed its own map. `settings` that TextEnv does not have go to gymnasium; None
    means unset. `processes` play the episodes (0: this process); a step takes at most `timeout` seconds.
    """
    module, name, _ = split_id(env_id)
    if module:
        load_module(module, "env.id")  # registers the id, and may add the entry
    latest = find_highest_version(None, name)  # gymnasium takes it for an id without a version
    entry = dict(ENVIRONMENTS.get(name, ENVIRONMENTS.get(f"{name}-v{latest}", {})))
    env_kwargs = dict(entry.pop("env_kwargs", {}))
    if unknown := entry.keys() - SETTINGS:
        known = ", ".join(setting.name for setting in fields(TextEnv) if setting.name in SETTINGS)
        raise ValueError(f"ENVIRONMENTS[{name!r}] has {sorted(unknown)}: an entry may hold {known}")
    for key, value in settings.items():
        if key not in SETTINGS:
            env_kwargs[key] = value
        elif value is not None:
            entry[key] = value
    random_map = entry.pop("random_map", None)
    if random_maps:
        if random_map is None or {"desc", "map_name"} & env_kwargs.keys():
            known = ", ".join(name for name, entry in ENVIRONMENTS.items() if "random_map" in entry)
            raise ValueError(
                f"random_maps=True works for {known}, without desc or map_name: {env_id} takes --config-name multiturn."
            )
        entry["random_map"] = partial(random_map, size=env_kwargs.pop("size", 4))
    environment = TextEnv(env_id, **entry, env_kwargs=env_kwargs, seed=seed, timeout=timeout)
    if environment.writes_out and environment.observation_names is None:
        notice_once(
            f"{env_id} has no text of its own, so its observations are written out: "
            f"{environment.start_state(0).text!r}. For other texts: ENVIRONMENTS[{name!r}]['observation_to_text']."
        )
    if not processes:
        return environment
    return find("environment", "processes", "env.processes")(environment, processes, timeout)


def make_text_env(
    env_id: str,
    observation_to_text: Callable[[Any, Any], str] | None = None,
    text_to_action: Callable[[str], Any | None] | None = None,
    **settings: Any,
) -> Any:
    """Stores these functions and settings as the id's entry of `ENVIRONMENTS`, and calls `make_env`.

    If your module calls `make_text_env("CartPole-v1", my_text, my_action)`, a run takes `env.id=my_module:CartPole-v1`.
    """
    module, name, _ = split_id(env_id)
    if module:
        load_module(module)
    settings |= {"observation_to_text": observation_to_text, "text_to_action": text_to_action}
    overrides = {key: value for key, value in settings.items() if value is not None and key not in RUN_SETTINGS}
    entry = ENVIRONMENTS.get(name, {})
    env_kwargs = {**entry.get("env_kwargs", {}), **{key: overrides.pop(key) for key in overrides.keys() - SETTINGS}}
    ENVIRONMENTS[name] = {**entry, "env_kwargs": env_kwargs, **overrides}
    return make_env(env_id, **settings)
