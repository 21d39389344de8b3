"""Four blocks on three stacks: move the top of one to another. It pays 1 when the last stack is the tower shown."""

from itertools import permutations

import gymnasium as gym
from gymnasium import spaces

MOVES = [*permutations(range(3), 2)]  # from a stack to another


class Blocks(gym.Env):
    action_space = spaces.Discrete(len(MOVES))
    observation_space = spaces.Text(24, charset="ABCD.|\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tower = "".join(self.np_random.permutation([*"ABCD"]))
        self.stacks = ["", "", self.tower]
        while self.stacks[2] == self.tower:
            self.stacks = ["", "", ""]
            for block in self.np_random.permutation([*"ABCD"]):
                self.stacks[self.np_random.integers(3)] += str(block)
        return self.view(), {}

    def step(self, action):
        source, target = MOVES[int(action)]
        self.stacks[target] += self.stacks[source][-1:]
        self.stacks[source] = self.stacks[source][:-1]
        done = self.stacks[2] == self.tower
        return self.view(), float(done), done, False, {}

    def view(self):
        return "|".join(stack.ljust(4, ".") for stack in self.stacks) + f"\n{self.tower}"


gym.register("Blocks-v0", Blocks, max_episode_steps=20)
