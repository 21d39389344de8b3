"""Writes rows for extras.sft to imitate: states of an environment as the policy is shown them, and answers of a player.

    python -m extras.imitate --player best --rows 4000 --output rows.jsonl env.id=my_game:MyGame-v0 [key=value …]

Players: random, any legal action; best, what env.kwargs.reward=search, playouts or progress calls best;
file.py:player, a function player(environment, state) -> action.
"""

from configs.errors import refusals  # isort: skip

import argparse
from dataclasses import replace
from pathlib import Path

from configs.checks import check_output_folder
from configs.loader import compose
from configs.schema import Config
from configs.settings import with_settings
from data.files import dump_jsonl
from data.seeding import derive_seed, seed_everything
from extras.imitate.rows import demonstrations, load_player
from training.environment import build_environment, data_settings, env_dataset


def write_demonstrations(config: Config, player: str, rows: int, output: Path, number: int = 1) -> None:
    """Writes `rows` rows of a player in the environment of `config`, as JSON lines with prompt and response; others in
    each round `number`."""
    seed = derive_seed(config.trainer.seed, f"round {number}")
    environment = build_environment(with_settings(config, {"env.mode": "step"}))
    environment = replace(environment, seed=derive_seed(seed, "demonstrated_states"))
    dataset = env_dataset(data_settings(config), environment, None, size=1)
    dump_jsonl(output, demonstrations(environment, dataset.messages, load_player(player, seed), rows, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--player", default="random", help="random, best, or file.py:player (random)")
    parser.add_argument("--rows", type=int, default=1500, metavar="N", help="how many (1500)")
    parser.add_argument("--round", type=int, default=1, metavar="N", help="each round has other states (1)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a .jsonl file to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of main.py, env.id first of all")
    arguments = parser.parse_intermixed_args()
    with refusals():
        config = compose("ppo_trainer", arguments.overrides, takes_objects=True)
        check_output_folder(str(arguments.output.parent), "--output")
        seed_everything(config.trainer.seed)
        write_demonstrations(config, arguments.player, arguments.rows, arguments.output, arguments.round)
    print(f"{arguments.output} has {arguments.rows} rows: python -m extras.sft data.train_files={arguments.output} …")


if __name__ == "__main__":
    main()
