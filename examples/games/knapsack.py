"""Six things, each a weight and a value, come one by one: take or leave them. In the end the values taken are paid.

What finds no room is left.
"""

import gymnasium as gym
from gymnasium import spaces

THINGS = 6


class Knapsack(gym.Env):
    action_space = spaces.Discrete(2)  # leave, take
    observation_space = spaces.Text(40, charset="0123456789 .\nroomhave")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        weights, values = self.np_random.integers(1, 10, (2, THINGS)).tolist()
        self.things = list(zip(weights, values, strict=True))
        self.room, self.value = sum(weights) // 2, 0
        return self.view(), {}

    def step(self, action):
        weight, value = self.things.pop(0)
        if int(action) == 1 and weight <= self.room:
            self.room, self.value = self.room - weight, self.value + value
        done = not self.things
        return self.view(), float(self.value) if done else 0.0, done, False, {}

    def view(self):
        things = " ".join(f"{weight}{value}" for weight, value in self.things)  # the one on offer first
        return f"room {self.room:02} have {self.value:02}\n{things.ljust(3 * THINGS - 1, '.')}"


gym.register("Knapsack-v0", Knapsack, max_episode_steps=THINGS)
