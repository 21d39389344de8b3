"""MiniGrid's worlds as text: the whole grid, a character a cell, and the mission.

    python main.py env.id=examples/minigrid_env.py:MiniGrid-Empty-5x5-v0 …

Needs the package minigrid (requirements-envs.txt). Unlike MiniGrid's own observation, the text shows all of the grid.
"""

from typing import Any

import gymnasium as gym

from custom.env_wrapper import ENVIRONMENTS

try:
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT  # importing any of it registers the ids
except ImportError as error:
    raise ImportError(
        f"MiniGrid-… needs the package minigrid: pip install -c constraints.txt -r requirements-envs.txt ({error})"
    ) from error

SYMBOLS = {"empty": ".", "floor": ".", "wall": "#", "key": "K", "ball": "O", "box": "B", "goal": "G", "lava": "~"}
DOORS, AGENT = ("/", "D", "L"), (">", "v", "<", "^")  # by state: open, closed, locked; by direction
PLAIN = {"empty", "floor", "wall", "goal", "lava"}  # whose colour says nothing


def minigrid_text(env: Any, observation: dict[str, Any]) -> str:
    """Rows of characters, then the mission, the coloured things by their characters, and what the agent carries."""
    cells, things = [["."] * env.width for _ in range(env.height)], []
    for column, line in enumerate(env.grid.encode().tolist()):
        for row, (kind, colour, state) in enumerate(line):
            name = IDX_TO_OBJECT[kind]
            cells[row][column] = DOORS[state] if name == "door" else SYMBOLS[name]
            if name not in PLAIN:
                things.append(f"{cells[row][column]} {IDX_TO_COLOR[colour]} {name}")
    column, row = env.agent_pos
    cells[row][column] = AGENT[env.agent_dir]
    words = [f"Mission: {observation['mission']}."]
    words += [", ".join(things)] if things else []
    words += [f"You carry a {env.carrying.color} {env.carrying.type}."] if env.carrying else []
    return "\n".join(["".join(line) for line in cells] + words)


MINIGRID = {
    "observation_to_text": minigrid_text,
    "action_names": ("left", "right", "forward", "pickup|pick up", "drop", "toggle|open", "done"),
    "instruction": "You are the arrow > v < ^, # is a wall. Answer with one word: left or right (to turn), forward, "
    "pickup, drop, toggle (a door or box before you) or done.",
    "success": {"last_reward_above": 0.0},
}
ENVIRONMENTS |= {name: MINIGRID for name in gym.registry if name.startswith("MiniGrid-")}
