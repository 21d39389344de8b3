"""A heap of 5 to 15 sticks: take one to three in turn; who takes the last wins. The other player errs half the time."""

import gymnasium as gym
from gymnasium import spaces

MOST = 15


class Nim(gym.Env):
    action_space = spaces.Discrete(3, start=1)  # how many to take
    observation_space = spaces.Text(MOST, charset="|.")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.sticks = int(self.np_random.integers(5, MOST + 1))
        return self.view(), {}

    def step(self, action):
        self.sticks -= min(int(action), self.sticks)
        if self.sticks == 0:
            return self.view(), 1.0, True, False, {}
        knows, other = self.np_random.random() < 0.5, int(self.np_random.integers(1, 4))
        taken = self.sticks % 4 if knows and self.sticks % 4 else other
        self.sticks -= min(taken, self.sticks)
        return self.view(), -1.0 if self.sticks == 0 else 0.0, self.sticks == 0, False, {}

    def view(self):
        return ("|" * self.sticks).ljust(MOST, ".")


gym.register("Nim-v0", Nim, max_episode_steps=8)
