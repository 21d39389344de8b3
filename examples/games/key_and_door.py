"""A grid of 5 × 5 with a key and a door: take the key, then leave by the door. Only that pays, 1."""

import gymnasium as gym
from gymnasium import spaces

MOVES = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}  # up, down, left, right


class KeyAndDoor(gym.Env):
    action_space = spaces.Discrete(4)
    observation_space = spaces.Text(30, charset="PKD.*\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        cells = self.np_random.permutation(25)[:3].tolist()
        self.player, self.key, self.door = (divmod(cell, 5) for cell in cells)
        self.has_key = False
        return self.view(), {}

    def step(self, action):
        row, column = (place + step for place, step in zip(self.player, MOVES[int(action)], strict=True))
        self.player = min(max(row, 0), 4), min(max(column, 0), 4)
        self.has_key |= self.player == self.key
        done = self.has_key and self.player == self.door
        return self.view(), float(done), done, False, {}

    def view(self):
        def cell(place):
            if place == self.player:
                return "*" if self.has_key else "P"
            return "D" if place == self.door else "K" if place == self.key and not self.has_key else "."

        return "\n".join("".join(cell((row, column)) for column in range(5)) for row in range(5))


gym.register("KeyAndDoor-v0", KeyAndDoor, max_episode_steps=40)
