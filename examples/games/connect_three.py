"""Four columns of four: three in a row win, 1 or -1, against a player who drops anywhere. A full column loses."""

import gymnasium as gym
from gymnasium import spaces

WAYS = (0, 1), (1, 0), (1, 1), (1, -1)  # in which lines run
LINES = [[(r + n * y, c + n * x) for n in range(3)] for r in range(4) for c in range(4) for y, x in WAYS]


def drop(columns, column, piece):
    return tuple(pieces + piece * int(number == column) for number, pieces in enumerate(columns))


def wins(columns, piece):
    return any(all(c in range(4) and columns[c][r : r + 1] == piece for r, c in line) for line in LINES)


class ConnectThree(gym.Env):
    action_space = spaces.Discrete(4)
    observation_space = spaces.Text(19, charset="XO.\n")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.columns = drop([""] * 4, self.np_random.integers(8), "O")  # in half of the games the other begins
        return self.view(), {}

    def step(self, action):
        if len(self.columns[int(action)]) == 4:
            return self.view(), -1.0, True, False, {}
        self.columns = drop(self.columns, int(action), "X")
        if not (won := wins(self.columns, "X")) and (free := [c for c in range(4) if len(self.columns[c]) < 4]):
            self.columns = drop(self.columns, self.np_random.choice(free), "O")
        reward = float(won) - float(wins(self.columns, "O"))
        return self.view(), reward, reward != 0 or min(map(len, self.columns)) == 4, False, {}

    def view(self):
        return "\n".join("".join(column.ljust(4, ".")[row] for column in self.columns) for row in (3, 2, 1, 0))


gym.register("ConnectThree-v0", ConnectThree, max_episode_steps=8)
