"""A reward for `recipe=fapo` on FrozenLake: a move that is right may be flawed, because it passes by a hole.

python main.py --config-name frozenlake recipe=fapo \
  reward.reward_manager.path=examples/careful_lake.py reward.reward_manager.name=CarefulWalk
"""

from custom.env_wrapper import EnvState
from custom.reward_manager import CustomRewardManager
from data.types import Score

STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # rows and columns, by action: left, down, right, up


class CarefulWalk(CustomRewardManager):
    """Scores as the environment pays, and marks as `flawed` an optimal move next to a hole, where another optimal move
    keeps further from holes."""

    def score(self, response: str, state: EnvState) -> Score:
        result, action = super().score(response, state), self.extract_action(response)
        optimal = self.environment.optimal_actions(state)
        fewest = min((holes_beside(state.text, other) for other in optimal), default=0)
        return result | {"flawed": action in optimal and holes_beside(state.text, action) > fewest}


def holes_beside(text: str, action: int) -> int:
    """Counts the holes beside the cell that an action leads to."""
    lines = text.split()
    row, column = next((row, line.index("P")) for row, line in enumerate(lines) if "P" in line)
    row, column = row + STEPS[action][0], column + STEPS[action][1]
    beside = [(row + down, column + right) for down, right in STEPS]
    return sum(lines[y][x] == "H" for y, x in beside if 0 <= y < len(lines) and 0 <= x < len(lines[0]))
