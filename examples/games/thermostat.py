"""A room to keep at 20 degrees: heat or cool it, while the weather outside pulls it away. Each degree off costs 0.1."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces

TARGET, POWER, LEAK = 20.0, 2.0, 0.06


class Thermostat(gym.Env):
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)  # full cooling to full heating
    observation_space = spaces.Box(-50.0, 90.0, (2,), np.float32)  # inside, outside

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.inside, self.outside = self.np_random.uniform([12, 5], [28, 35]).tolist()
        return self.view(), {}

    def step(self, action):
        power = min(max(float(action[0]), -1.0), 1.0)
        self.inside += POWER * power + LEAK * (self.outside - self.inside) + self.np_random.normal(0, 0.2)
        self.outside = min(max(self.outside + self.np_random.normal(0, 1), 0.0), 40.0)
        return self.view(), -0.1 * abs(self.inside - TARGET), False, False, {}

    def view(self):
        return np.array([self.inside, self.outside], np.float32)


gym.register("Thermostat-v0", Thermostat, max_episode_steps=20)
