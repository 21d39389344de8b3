"""A maze of 5 × 5 with walls of its own in each episode: walk to the exit E, far from the start. Only that pays, 1."""

import gymnasium as gym
from gymnasium import spaces

MOVES = (-1, 0), (1, 0), (0, -1), (0, 1)  # up, down, left, right
CELLS = [(row, column) for row in range(5) for column in range(5)]


class Maze(gym.Env):
    action_space = spaces.Discrete(4)
    observation_space = spaces.Text(29, charset="PE#.\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        reached = []  # from the start, the nearest cells first
        while len(reached) < 12:
            start, *walls = self.np_random.permutation(25)[:8].tolist()
            self.walls, reached = {CELLS[wall] for wall in walls}, [CELLS[start]]
            for cell in reached:
                reached += sorted({self.behind(cell, move) for move in range(4)} - {*reached})
        self.player, self.exit = reached[0], reached[-1]
        return self.view(), {}

    def behind(self, cell, move):
        there = cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
        return there if there in CELLS and there not in self.walls else cell

    def step(self, action):
        self.player = self.behind(self.player, int(action))
        return self.view(), float(self.player == self.exit), self.player == self.exit, False, {}

    def view(self):
        cells = ["P" if c == self.player else "E" if c == self.exit else "#" if c in self.walls else "." for c in CELLS]
        return "\n".join("".join(cells[row * 5 : row * 5 + 5]) for row in range(5))


gym.register("Maze-v0", Maze, max_episode_steps=30)
