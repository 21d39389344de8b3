"""Shows states of an environment as pictures, one move a prompt, and in episodes one turn a prompt.

    data.custom_cls.path=extras/images/env_dataset.py data.custom_cls.name=PictureDataset
    'data.custom_cls.kwargs={picture: my_file.py:my_picture}'

A picture is what the function makes of (environment, state), or else what the environment renders (rgb_array).
"""

from typing import Any

import gymnasium as gym
import numpy as np

from configs.import_utils import load_extern_object, load_named
from data.padding import PromptIds
from extras.images.media import MARK

CustomEnvDataset = load_extern_object("custom/env_dataset.py", "CustomEnvDataset")
CELL = 4  # pixels
COLOURS = {"S": (160, 160, 160), "F": (255, 255, 255), "H": (0, 0, 160), "G": (0, 200, 0), "P": (220, 40, 0)}


def lake_picture(environment: Any, state: Any) -> np.ndarray:
    """Draws FrozenLake with a colour a cell, [4 · rows, 4 · columns, 3]."""
    cells = np.array([[COLOURS[cell] for cell in row] for row in state.text.split("\n")], dtype=np.uint8)
    return cells.repeat(CELL, axis=0).repeat(CELL, axis=1)


def render_state(environment: Any, state: Any) -> np.ndarray:
    """Replays `state` in an environment of its own, whose actions are numbered, and renders it."""
    name = environment.env_id.rpartition(":")[2]
    settings = {**environment.env_kwargs, **dict(environment.layout(state.seed)), "render_mode": "rgb_array"}
    world = gym.make(name, **settings)
    try:
        world.reset(seed=state.seed)
        for action in state.actions:
            world.step(action)
        return world.render()
    finally:
        world.close()


class PictureDataset(CustomEnvDataset):
    """The states of an environment as pictures, for a model that reads images.

    Args:
        picture: a function, as file.py:name.

    Raises:
        ValueError: the model reads text alone.
    """

    def __init__(self, *arguments: Any, picture: str | None = None, **sizes: Any) -> None:
        self.picture = load_named(picture, "data.custom_cls.kwargs.picture") if picture else render_state
        super().__init__(*arguments, **sizes)

    def messages(self, state: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{MARK}{self.environment.instruction or ''}"}]

    def turn_messages(self, state: Any) -> list[dict[str, Any]]:
        raise ValueError("a picture is shown in a prompt of its own: set env.history=turns")

    def columns(self, state: Any, position: int) -> dict[str, Any]:
        return {**super().columns(state, position), self.image_key: self.pictures(state)}

    def pictures(self, state: Any) -> list[np.ndarray]:
        return [self.picture(self.environment, state)]

    def _encode_whole(self, state: Any) -> PromptIds:
        if self.images is None:
            raise ValueError("PictureDataset shows images, and actor_rollout_ref.model.path reads text alone.")
        columns = {self.config.prompt_key: self.messages(state), self.image_key: self.pictures(state)}
        return self._encode(columns, self._origin(state))
