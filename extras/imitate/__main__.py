"""Writes rows for extras.sft to imitate: an environment as the policy is shown it, and the answers of a player.

    python -m extras.imitate --player best --rows 4000 --output rows.jsonl env.id=my_game:MyGame-v0 [key=value …]

Players: random, any legal action; best, what env.kwargs.reward=search, playouts or progress calls best;
file.py:player, a function player(environment, state) -> action. A row is a state and an answer, or, as episodes with
env.history=transcript are shown, a whole episode.
"""

from configs.errors import refusals  # isort: skip

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rich.progress import track

from configs.checks import check_output_folder
from configs.errors import ConfigError, notice
from configs.import_utils import find
from configs.loader import compose
from configs.schema import Config
from data.files import dump_jsonl
from data.seeding import seed_everything
from data.types import Row
from extras.imitate.crew import helpers_of, make_rows
from extras.imitate.demonstrations import demonstrations_of

OFTEN, ALIKE = 10, 0.25  # rows of a text, and the share of them that its commonest answer has


def tell_of_secrets(demonstrations: Iterator[Row], rows: int) -> Iterator[Row]:
    """Yields so many rows, and says at the end if texts that repeat were mostly answered in other ways."""
    answers: dict[str, Counter[str]] = defaultdict(Counter)
    for row in islice(demonstrations, rows):
        answers[str(row["prompt"])][row["response"]] += 1
        yield row
    often = [each for each in answers.values() if each.total() >= OFTEN]
    if often and sum(max(each.values()) for each in often) < ALIKE * sum(each.total() for each in often):
        most = max(often, key=len)
        notice(
            f"demonstrations: one text was answered in {len(most)} ways, {most.total()} times. The player goes by what "
            "the text does not show, such as a secret or chance to come: what it earns may be out of reach."
        )


def write_demonstrations(
    config: Config,
    player: str,
    rows: int,
    output: Path,
    history: str = "turns",
    number: int = 1,
    *,
    by_policy: float | None = None,
) -> int:
    """Writes `rows` rows of a player in the environment of `config`, as JSON lines with prompt and response, or, of
    the history `transcript`, with messages; each round `number` has others. Returns how many: fewer where the model of
    `config` plays playouts on, and has spent `by_policy` seconds."""
    if config.env.id is None:
        raise ConfigError("env.id is not set: name the environment that the player plays, as in env.id=FrozenLake-v1.")
    demonstrations = demonstrations_of(config, player, number)
    environment, dataset = demonstrations.environment, demonstrations.dataset
    if by_policy:
        resets = find("environment", "policy")(config, environment, dataset).settle(demonstrations.rows_of, by_policy)
    else:
        helpers = helpers_of(config, player, number) if environment.repeatable else []
        resets = make_rows(demonstrations, helpers)
    turns = tell_of_secrets(demonstrations.turns(resets), rows)
    written = turns if history == "turns" else demonstrations.transcripts()
    written = [*track(islice(written, rows), "writing demonstrations", total=rows)]
    dump_jsonl(output, demonstrations.settle(written) if history == "turns" else written)
    return len(written)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--player", default="random", help="random, best, or file.py:player (random)")
    parser.add_argument("--rows", type=int, default=1500, metavar="N", help="how many (1500)")
    parser.add_argument(
        "--history", choices=("turns", "transcript"), default="turns", help="a turn a row, or an episode"
    )
    parser.add_argument(
        "--by-policy", type=float, metavar="SECONDS", help="actor_rollout_ref.model.path plays playouts on, so long"
    )
    parser.add_argument("--round", type=int, default=1, metavar="N", help="each round has other states (1)")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="a .jsonl file to write")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of main.py, env.id first of all")
    arguments = parser.parse_intermixed_args()
    with refusals():
        config = compose("ppo_trainer", arguments.overrides, takes_objects=True)
        check_output_folder(str(arguments.output.parent), "--output")
        seed_everything(config.trainer.seed)
        options = arguments.player, arguments.rows, arguments.output, arguments.history, arguments.round
        rows = write_demonstrations(config, *options, by_policy=arguments.by_policy)
    print(f"{arguments.output} has {rows} rows: python -m extras.sft data.train_files={arguments.output} …")


if __name__ == "__main__":
    main()
