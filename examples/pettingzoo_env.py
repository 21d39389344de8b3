"""PettingZoo's connect four against an opponent that plays at random.

    python main.py env.id=examples/pettingzoo_env.py:ConnectFour-v0 …

Needs the packages pettingzoo and pygame (requirements-envs.txt). A win is 1, a draw 0, a defeat or a full column -1.
"""

import gymnasium as gym

from custom.env_wrapper import ENVIRONMENTS

try:
    from pettingzoo.classic import connect_four_v3
    from pettingzoo.utils.env_logger import EnvLogger
except ImportError as error:
    raise ImportError(
        f"ConnectFour needs the package pettingzoo: pip install -c constraints.txt -r requirements-envs.txt ({error})"
    ) from error

EnvLogger.suppress_output()  # a warning at each full column


class ConnectFour(gym.Env):
    """The policy is X; the reset's seed says who begins. PettingZoo's other games for two are played alike."""

    def __init__(self) -> None:
        self.game = connect_four_v3.env()
        self.player, self.other = self.game.possible_agents
        self.action_space = self.game.action_space(self.player)
        self.observation_space = self.game.observation_space(self.player)["observation"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.game.reset(seed=int(self.np_random.integers(2**31)))
        self.player, self.other = self.np_random.permutation(self.game.possible_agents).tolist()
        return self._after_the_opponent()[0], {}

    def step(self, action):
        self.game.step(int(action))
        return self._after_the_opponent()

    def _after_the_opponent(self):
        game = self.game
        if game.agent_selection == self.other and not game.terminations[self.other]:
            game.step(int(self.np_random.choice(game.observe(self.other)["action_mask"].nonzero()[0])))
        board, is_over = game.observe(self.player)["observation"], game.terminations[self.player]
        return board, float(game.rewards[self.player]), is_over, False, {}


def board_text(env: ConnectFour, board) -> str:
    """Writes rows of X (the policy), O and free cells, above the numbers of the columns."""
    return "\n".join(["".join("XO."[mark] for mark in row) for row in (2 - board @ (2, 1)).tolist()] + ["0123456"])


gym.register("ConnectFour-v0", ConnectFour, max_episode_steps=22)
ENVIRONMENTS["ConnectFour-v0"] = {
    "observation_to_text": board_text,
    "instruction": "You are X: four in a line win. Answer with the number of a column that is not full.",
    "success": {"last_reward_above": 0.0},
}
