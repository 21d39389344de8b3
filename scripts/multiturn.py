"""Whole episodes: a model made here learns a game that gymnasium ships, or to use a calculator, turn by turn.

    python -m scripts.multiturn [--task frozenlake_multiturn] [--seed N] [key=value …]

1. A tiny language model with random weights.
2. Warm start: it imitates players who know the rules and not the art (`TASKS`).
3. Reinforcement learning in whole episodes (the task's yaml in configs/; key=value overrides go there).
The held-out episodes are measured before and after 3.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()  # before torch is loaded

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.progress import track

import main as rl
from configs.errors import late_refusals, refusals
from configs.schema import Config
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import EnvState, TextEnv
from data.files import sole_run
from data.pretrained import load_tokenizer
from data.seeding import derive_seed, numpy_generator
from examples import calculator_task
from scripts.quickstart import (
    WANDERERS_LESSON,
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

CALCULATOR_ROWS = Path("outputs/calculator")
DOWN, RIGHT = 1, 2  # FrozenLake's actions
STICK, HIT = 0, 1  # Blackjack's
Player = Callable[[TextEnv, EnvState, np.random.Generator], int]


def drifter(environment: TextEnv, state: EnvState, rng: np.random.Generator) -> int:
    """Any move that neither falls into a hole nor runs into the edge; down and right are twice as likely."""
    moves = safe_moves(state)
    weights = np.array([2.0 if move in (DOWN, RIGHT) else 1.0 for move in moves])
    return int(rng.choice(moves, p=weights / weights.sum()))


def guesser(environment: TextEnv, state: EnvState, rng: np.random.Generator) -> int:
    """Any action."""
    return int(rng.choice(environment.actions))


def gambler(environment: TextEnv, state: EnvState, rng: np.random.Generator) -> int:
    """Blackjack by feeling: hits on 11 or less in seven hands of ten, on 17 or more in three, else in every other."""
    [total] = re.findall(r"sum to (\d+)", state.text)
    hits = 0.7 if int(total) <= 11 else 0.3 if int(total) >= 17 else 0.5
    return HIT if rng.random() < hits else STICK


def learner(environment: TextEnv, state: EnvState, rng: np.random.Generator) -> int:
    """An optimal action in seven turns of ten, else any."""
    best = environment.optimal_actions(state)
    return int(rng.choice(best)) if rng.random() < 0.7 else guesser(environment, state, rng)


def demonstrations_of(player: Player, episodes: int, config: Config) -> Iterator[dict[str, Any]]:
    """Whole episodes in the words that the policy is shown and will have to say, as rows or as conversations."""
    seed = config.trainer.seed
    rng = numpy_generator(seed, "demonstrations")
    environment = dataclasses.replace(build_environment(config), seed=derive_seed(seed, "demonstrated_states"))
    dataset = CustomEnvDataset(environment, load_tokenizer(config.actor_rollout_ref.model), config.data, size=episodes)
    for i in track(range(episodes), "playing episodes to imitate"):
        moves = [*play(environment, environment.get_state(i), player, rng)]
        if config.env.history == "turns":
            yield from ({"prompt": dataset.messages(state), "response": answer} for state, answer in moves)
        else:
            yield {"messages": conversation(dataset, moves)}


def calculator_demonstrations(config: Config) -> list[dict[str, Any]]:
    return calculator_task.demonstrations(calculator_task.DEMONSTRATIONS, config.trainer.seed)


def play(
    environment: TextEnv, start: EnvState, player: Player, rng: np.random.Generator
) -> Iterator[tuple[EnvState, str]]:
    """Plays an episode, and yields its states with the answer of `player` to each."""
    environment.reset(start.seed)
    end_reason = None
    while end_reason is None:
        state = environment.state
        action = player(environment, state, rng)
        yield state, environment.action_to_text(action)
        end_reason = environment.act(action)[-1]["end_reason"]


def conversation(dataset: CustomEnvDataset, moves: list[tuple[EnvState, str]]) -> list[dict[str, Any]]:
    """The messages of an episode, up to its last answer."""
    [(start, _), *_] = moves
    messages = dataset.messages(start)
    for number, (state, answer) in enumerate(moves):
        turn = dataset.turn_messages(state) if number else []
        messages += [*turn, {"role": "assistant", "content": answer}]
    return messages


@dataclass(frozen=True)
class Task:
    """A game: the demonstrations to imitate first, and the metric of the held-out episodes.

    `files` writes, by a seed, the data files that the task's config names, where it names any.
    """

    lessons: Sequence[Lesson]
    metric: str
    files: Callable[[int], None] | None = None


def lesson_of(player: Player, episodes: int, batch: int) -> Lesson:
    rows = partial(demonstrations_of, player, episodes)
    return Lesson(rows, "multiturn_sft", [f"data.train_batch_size={batch}"])


TASKS = {
    # Single maps first: a model that cannot read one yet is slow to learn it among the many of an episode.
    "frozenlake_multiturn": Task([WANDERERS_LESSON, lesson_of(drifter, 4800, 8)], "val-core/FrozenLake-v1/acc/mean@1"),
    "blackjack": Task([lesson_of(gambler, 4800, 16)], "val-aux/Blackjack-v1/return/mean@1"),
    "cliffwalking": Task([lesson_of(learner, 600, 16)], "val-aux/CliffWalking-v1/return/mean@1"),
    "taxi": Task([lesson_of(learner, 400, 16)], "val-aux/Taxi-v4/return/mean@1"),
    "calculator_tool": Task(
        [Lesson(calculator_demonstrations, "calculator_tool_sft")],
        f"val-core/{calculator_task.SOURCE}/acc/mean@1",
        partial(calculator_task.write_rows, CALCULATOR_ROWS),
    ),
}


def main() -> None:
    parser = script_parser(__doc__, "weights, games, sampling")
    parser.add_argument("--task", default="frozenlake_multiturn", choices=TASKS, help="a config of its name")
    arguments = parser.parse_intermixed_args()
    task = TASKS[arguments.task]
    with refusals():
        if task.files:
            task.files(arguments.seed)  # first: that they are there is checked with the config
        config = new_run(arguments.task, arguments.seed, [], arguments.overrides)
    start_command(config)
    with late_refusals():
        summary = learn(config, task)
    print_outcome(task.metric, summary, config)


def learn(config: Config, task: Task) -> dict[str, Any]:
    """Runs all stages anew; returns the summary, and writes it to summary.json in the run's folder."""
    folder = Path(config.trainer.default_local_dir)
    started = time.monotonic()
    with sole_run(folder):
        print("stage 1 of 2: a tiny model learns to imitate a player who knows the rules and not the art")
        imitate(config, folder, task.lessons)
        print(f"stage 2 of 2: reinforcement learning ({config.algorithm.adv_estimator})")
        rl.build(config).fit()
    return write_summary(config, task.metric, time.monotonic() - started)


if __name__ == "__main__":
    main()
