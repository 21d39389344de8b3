"""FrozenLake by pixels: a model made here that reads images learns it, from random weights.

    python -m scripts.pixels [--seed N] [key=value …]

1. A tiny Qwen2-VL with random weights.
2. Warm start: it writes down maps that it sees, and imitates a careful wanderer, who does not know the goal.
3. GRPO on random maps (configs/frozenlake_pixels.yaml; key=value overrides go there).
Success on 200 held-out maps is measured before and after 3, in whole episodes of the real environment.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()  # before torch is loaded

import io
import time
from base64 import b64encode
from dataclasses import replace
from typing import Any

from PIL import Image

import main as rl
from configs.errors import late_refusals, refusals
from configs.schema import Config
from custom.env_wrapper import EnvState
from data.files import sole_run
from data.seeding import derive_seed, numpy_generator
from extras.images.env_dataset import lake_picture
from extras.images.tiny_model import save_tiny_model
from scripts.quickstart import (
    SUCCESS,
    Lesson,
    imitate,
    new_run,
    print_outcome,
    safe_moves,
    script_parser,
    write_summary,
)
from training.environment import build_environment
from workers.ray_group import start_command

STATES = 20000  # each is written down, or answered with a move
LESSON = "data.train_batch_size=64", "data.max_length=48", "optim.lr=1e-3", "optim.lr_warmup_steps=30"


def main() -> None:
    arguments = script_parser(__doc__, "weights, maps, sampling").parse_intermixed_args()
    with refusals():
        config = new_run("frozenlake_pixels", arguments.seed, [], arguments.overrides)
    start_command(config)
    with late_refusals():
        folder, started = Path(config.trainer.default_local_dir), time.monotonic()
        with sole_run(folder):
            print("stage 1 of 2: a tiny model learns to write down maps, and imitates a careful wanderer")
            imitate(config, folder, [Lesson(demonstrations, "frozenlake_sft", LESSON)], save_tiny_model)
            print(f"stage 2 of 2: reinforcement learning ({config.algorithm.adv_estimator}) in {config.env.id}")
            rl.build(config).fit()
        summary = write_summary(config, SUCCESS, time.monotonic() - started)
    print_outcome("success on 200 held-out maps", summary, config)


def demonstrations(config: Config) -> list[dict[str, Any]]:
    """Makes rows with a picture each, half of them maps to be written down, half moves of the careful wanderer."""
    rng = numpy_generator(config.trainer.seed, "demonstrations")
    environment = build_environment(replace(config, env=replace(config.env, mode="step")))
    environment = replace(environment, seed=derive_seed(config.trainer.seed, "demonstrated_states"))
    states = [environment.get_state(number) for number in range(STATES)]
    moves = [environment.action_to_text(int(rng.choice(safe_moves(state)))) for state in states]
    maps = [state.text.replace("\n", "") for state in states]
    return [
        row(state, "<image>map", text) if number % 2 else row(state, "<image>", move)
        for number, (state, text, move) in enumerate(zip(states, maps, moves, strict=True))
    ]


def row(state: EnvState, question: str, response: str) -> dict[str, Any]:
    file = io.BytesIO()
    Image.fromarray(lake_picture(None, state)).save(file, "PNG")
    images = [{"bytes": b64encode(file.getvalue()).decode()}]
    return {"prompt": [{"role": "user", "content": question}], "images": images, "response": response}


if __name__ == "__main__":
    main()
