"""A box B on 5 × 5 cells: push it to the goal G, which pays 1; it cannot be pulled. It starts where pulling led it."""

import gymnasium as gym
from gymnasium import spaces

MOVES = (-1, 0), (1, 0), (0, -1), (0, 1)  # up, down, left, right
CELLS = [(row, column) for row in range(5) for column in range(5)]


def behind(cell, move, steps=1):
    return cell[0] + steps * MOVES[move][0], cell[1] + steps * MOVES[move][1]


class Sokoban(gym.Env):
    action_space = spaces.Discrete(4)
    observation_space = spaces.Text(29, charset="PpBG.\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.goal, self.player = (CELLS[cell] for cell in self.np_random.permutation(25)[:2])
        self.box, pulled = self.goal, 0
        while pulled < 40 or self.box == self.goal:
            move, pulls, pulled = int(self.np_random.integers(4)), self.np_random.random() < 0.7, pulled + 1
            before, there = self.player, behind(self.player, move)
            if there in CELLS and there != self.box:
                self.box, self.player = before if pulls and behind(before, move, -1) == self.box else self.box, there
        return self.view(), {}

    def step(self, action):
        there, beyond = (behind(self.player, int(action), steps) for steps in (1, 2))
        if there in CELLS and (there != self.box or beyond in CELLS):
            self.player, self.box = there, beyond if there == self.box else self.box
        return self.view(), float(self.box == self.goal), self.box == self.goal, False, {}

    def view(self):
        marks = {self.goal: "G", self.box: "B", self.player: "p" if self.player == self.goal else "P"}
        return "\n".join("".join(marks.get(cell, ".") for cell in CELLS[row : row + 5]) for row in range(0, 25, 5))


gym.register("Sokoban-v0", Sokoban, max_episode_steps=30)
