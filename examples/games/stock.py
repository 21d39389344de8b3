"""A shop that orders for tomorrow: each thing kept over night costs 0.1, each that a customer misses 0.3.

Customers want zero to two things more than the forecast, which is known for today and tomorrow.
"""

import gymnasium as gym
from gymnasium import spaces

SHELF, KEPT, MISSED = 12, -0.1, -0.3


class Stock(gym.Env):
    action_space = spaces.Discrete(6)  # how many to order
    observation_space = spaces.Text(31, charset="shelf#.\ntoday0123tomorrow ")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.shelf = int(self.np_random.integers(SHELF + 1))
        self.today, self.tomorrow = self.np_random.integers(4, size=2).tolist()
        return self.view(), {}

    def step(self, action):
        wanted, next_forecast = self.today + int(self.np_random.integers(3)), int(self.np_random.integers(4))
        kept = max(self.shelf - wanted, 0)
        reward = KEPT * kept + MISSED * max(wanted - self.shelf, 0)
        self.shelf = min(kept + int(action), SHELF)
        self.today, self.tomorrow = self.tomorrow, next_forecast
        return self.view(), reward, False, False, {}

    def view(self):
        return f"{('#' * self.shelf).ljust(SHELF, '.')}\ntoday {self.today}\ntomorrow {self.tomorrow}"


gym.register("Stock-v0", Stock, max_episode_steps=15)
