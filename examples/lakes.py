"""FrozenLakes of several sizes in one environment, for a curriculum: configs/curriculum.yaml trains on them.

    env.id=examples/lakes.py:FrozenLakes-v0
    'env.kwargs={random_maps: true, size: [2, 3, 4, 5], is_slippery: false}'

A reset seed says which map, and of which size: the sizes take turns, `MAPS` seeds each. So env.val_seed chooses the
size that validation plays.
"""

from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np

from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import ENVIRONMENTS, EnvState, frozen_lake_map

MAPS = 1 << 24


def size_of(seed: int, sizes: list[int]) -> int:
    """The number of rows of the map of a reset seed."""
    return sizes[seed // MAPS % len(sizes)]


def lake_of_some_size(seed: int, size: list[int]) -> dict[str, Any]:
    """Constructor arguments of a random solvable map, of one of the sizes."""
    return frozen_lake_map(seed, size_of(seed, size))


gym.register("FrozenLakes-v0", "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv", max_episode_steps=100)
ENVIRONMENTS["FrozenLakes-v0"] = {**ENVIRONMENTS["FrozenLake-v1"], "random_map": lake_of_some_size}


class LakesDataset(CustomEnvDataset):
    """Starts of episodes whose sizes take turns: row i has the i-th size, and so on; extra_info.size says which."""

    def __init__(self, *args: Any, sizes: list[int], **places: Any) -> None:
        self.sizes = sizes
        super().__init__(*args, **places)

    def __getitem__(self, position: int) -> dict[str, Any]:
        state = self.environment.start_state(self.reset_seed(position))
        return self.make_row(self.columns(state, position), position, self.encode_state(state))

    def reset_seed(self, position: int) -> int:
        """Returns the reset seed of a row, fixed by (the environment's seed, the position); its map is not held out."""
        rng = np.random.default_rng((self.environment.seed, self.first + position))
        while True:
            seed = position % len(self.sizes) * MAPS + int(rng.integers(MAPS))
            if self.environment.layout(seed) not in self.held_out:
                return seed

    @cached_property
    def held_out(self) -> frozenset[Any]:
        """The maps of validation."""
        return frozenset(map(self.environment.layout, self.environment.exclude_seeds))

    def columns(self, state: EnvState, position: int) -> dict[str, Any]:
        row, size = super().columns(state, position), size_of(state.seed, self.sizes)
        return {**row, "data_source": f"lake {size}x{size}", "extra_info": {**row["extra_info"], "size": size}}

    def column(self, name: str) -> list[Any]:
        """Without making a state: all that a curriculum asks for is extra_info.size."""
        if name != "extra_info.size":
            return super().column(name)
        return [self.sizes[position % len(self.sizes)] for position in range(self.size)]
