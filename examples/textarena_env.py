"""TextArena's tic-tac-toe against an opponent that is part of the environment.

    python main.py env.id=examples/textarena_env.py:TicTacToe-v0 …

Needs the package textarena (requirements-envs.txt), which keeps the board and the rules: an occupied cell is an error
that is forgiven once, and lost by the second time. A win is 1, a draw 0, a defeat -1.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import gymnasium as gym
import numpy as np

from custom.env_wrapper import ENVIRONMENTS

try:
    import textarena
except ImportError as error:
    raise ImportError(
        f"TicTacToe-v0 needs the package textarena: pip install -c constraints.txt -r requirements-envs.txt ({error})"
    ) from error

LINES = ("012", "345", "678", "036", "147", "258", "048", "246")
Opponent = Callable[[str, np.random.Generator], int]  # board, draws → cell; it plays O


def at_random(board: str, rng: np.random.Generator) -> int:
    """Any free cell."""
    return int(rng.choice([cell for cell, mark in enumerate(board) if mark.isdigit()]))


def greedily(board: str, rng: np.random.Generator) -> int:
    """The cell that wins at once, else the one that keeps X from winning at once, else any."""
    for mark in "OX":
        for line in LINES:
            marks = [board[int(cell)] for cell in line]
            if marks.count(mark) == 2 and any(map(str.isdigit, marks)):
                return int(next(filter(str.isdigit, marks)))
    return at_random(board, rng)


OPPONENTS: dict[str, Opponent] = {"random": at_random, "greedy": greedily}


class TicTacToe(gym.Env):
    """The policy is always X; the reset's seed says who begins. Observations are boards: a row of nine marks."""

    observation_space = gym.spaces.Text(9, charset="XO012345678")
    action_space = gym.spaces.Discrete(9)

    def __init__(self, opponent: str = "random") -> None:
        if opponent not in OPPONENTS:
            raise ValueError(f"opponent={opponent!r}: one of {', '.join(OPPONENTS)}")
        self.opponent = OPPONENTS[opponent]
        self.game, self._drawn = textarena.make("TicTacToe-v0-raw"), random.getstate()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.player = int(self.np_random.integers(2))
        with self._own_draws():
            self.game.reset(num_players=2, seed=int(self.np_random.integers(2**31)))
            self._opponents_turn()
        return self.board, {}

    def step(self, action):
        with self._own_draws():
            done, _ = self.game.step(f"[{action}]")
            done = done or self._opponents_turn()
        reward = self.game.close()[0][self.player] if done else 0
        return self.board, float(reward), done, False, {}

    @property
    def board(self) -> str:
        """The nine cells: X (the policy), O, or the number of a free one."""
        marks = {"": None, "O": "O" if self.player else "X", "X": "X" if self.player else "O"}  # there, player 1 is X
        cells = [marks[mark] for row in self.game.state.game_state["board"] for mark in row]
        return "".join(str(number) if mark is None else mark for number, mark in enumerate(cells))

    def _opponents_turn(self) -> bool:
        done = False
        while not done and self.game.state.current_player_id != self.player:
            done, _ = self.game.step(f"[{self.opponent(self.board, self.np_random)}]")
        return done

    @contextmanager
    def _own_draws(self) -> Iterator[None]:
        """TextArena draws from Python's global generator: that is lent to it, and given back."""
        ours = random.getstate()
        random.setstate(self._drawn)
        try:
            yield
        finally:
            self._drawn = random.getstate()
            random.setstate(ours)


def board_text(env: TicTacToe, board: str) -> str:
    return "\n".join(board[row : row + 3] for row in (0, 3, 6))


gym.register("TicTacToe-v0", TicTacToe, max_episode_steps=10)
ENVIRONMENTS["TicTacToe-v0"] = {
    "observation_to_text": board_text,
    "instruction": "You are X: three in a row win. Answer with the number of a free cell.",
    "success": {"last_reward_above": 0.0},
}
