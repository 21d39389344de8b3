"""The games of examples/games: what each earns when played well, and how well one command learns it.

    python -m scripts.games [--games nim,maze] [--players-only] [key=value …] [--seeds 0 1 2]

1. For each game the mean return of the random player, and of the best that could be written (`PLAYERS`), who knows the
   rules but neither what is hidden nor what chance will bring, in the 100 held-out episodes.
2. For each game and seed `python -m scripts.learn`, one run after the other, in outputs/games/GAME_SEED; key=value goes
   there. A folder that has a summary.json is not run again.
3. A table: how far each came on the way from the random player to the best.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()

import argparse
import json
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from itertools import product
from statistics import fmean, median
from typing import Any

import gymnasium as gym

from examples.games.bandit import BOTH, PULLS
from examples.games.connect_three import drop, wins
from examples.games.dialogue import WORDS
from examples.games.mastermind import LENGTH, LETTERS, feedback
from examples.games.stock import KEPT, MISSED, SHELF
from examples.games.thermostat import LEAK, POWER, TARGET

FOLDER = Path("outputs/games")
EPISODES, HELD_OUT = 100, 1_000_000  # the first seed of those that no training sees
HEAD = "| game | random | best | before | after | share of the way | CPU seconds | judged by |\n" + "|---" * 8 + "|"
plans: dict[tuple[type, str], int] = {}  # moves of shortest ways, by game and what it shows


def by_shortest_way(env: Any) -> int:
    """Returns the next move of a shortest way to the reward, in a game without chance that shows all it is."""
    game, start = type(env), env.view()
    if (game, start) not in plans:
        came, queue = {start: None}, [env]
        for position in queue:
            for action in range(env.action_space.n):
                moved = deepcopy(position, {id(env.np_random): env.np_random})
                view, _, done, _, _ = moved.step(action)
                if view not in came:
                    came[view] = position.view(), action
                    queue.append(moved)
                if done:
                    while came[view] is not None:
                        view, plans[game, view] = came[view]
                    return plans[game, start]
    return plans[game, start]


def play_nim(env: Any) -> int:
    """Leaves a multiple of four, else one stick less: most chances for an error."""
    return env.sticks % 4 or 1


def play_thermostat(env: Any) -> list[float]:
    """Heats as much as leads to the target by the next step, but for chance."""
    power = (TARGET - env.inside - LEAK * (env.outside - env.inside)) / POWER
    return [min(max(power, -1.0), 1.0)]


@cache
def most_packed(things: tuple[tuple[int, int], ...], room: int) -> int:
    if not things:
        return 0
    (weight, value), rest = things[0], things[1:]
    left = most_packed(rest, room)
    return max(left, value + most_packed(rest, room - weight)) if weight <= room else left


def play_knapsack(env: Any) -> int:
    things = tuple(env.things)
    return int(most_packed(things, env.room) > most_packed(things[1:], env.room))


def play_mastermind(env: Any) -> str:
    """Guesses what may be the secret, and splits what else may be so most evenly."""
    texts = ["".join(letters) for letters in product(LETTERS, repeat=LENGTH)]
    possible = [text for text in texts if all(feedback(guess, text) == answer for guess, answer in env.guesses)]
    parts = {guess: Counter(feedback(guess, text) for text in possible) for guess in possible}
    return min(parts, key=lambda guess: max(parts[guess].values()))


@cache
def worth_of_columns(columns: tuple[str, ...], column: int, depth: int) -> float:
    """Returns the mean result of dropping into a column against a random player, looking `depth` more moves ahead."""
    if len(columns[column]) == 4:
        return -1.0
    columns = drop(columns, column, "X")
    answers = [drop(columns, each, "O") for each in range(4) if len(columns[each]) < 4]
    if wins(columns, "X") or not answers:
        return float(wins(columns, "X"))
    return fmean(-1.0 if wins(each, "O") else worth_of_all(each, depth) for each in answers)


def worth_of_all(columns: tuple[str, ...], depth: int) -> float:
    goes_on = depth and min(map(len, columns)) < 4
    return max(worth_of_columns(columns, each, depth - 1) for each in range(4)) if goes_on else 0.0


def play_connect_three(env: Any) -> int:
    return max(range(4), key=lambda column: worth_of_columns(env.columns, column, 2))


def play_stock(env: Any) -> int:
    """Orders what costs least tomorrow, on the mean."""

    def earned(order: int) -> float:
        mornings = [min(max(env.shelf - env.today - more, 0) + order, SHELF) for more in range(3)]
        nights = [morning - env.tomorrow - more for morning in mornings for more in range(3)]
        return fmean(KEPT * max(left, 0) + MISSED * max(-left, 0) for left in nights)

    return max(range(6), key=earned)


@cache
def worth_of_pulls(won: tuple[int, ...], lost: tuple[int, ...]) -> tuple[float, ...]:
    """Returns by machine what it and the best play after it pay on the mean."""
    if sum(won + lost) == PULLS:
        return (0.0,)
    worth = []
    for machine in range(3):
        one = tuple(int(each == machine) for each in range(3))
        paid, failed = (tuple(map(sum, zip(pulls, one, strict=True))) for pulls in (won, lost))
        chance = (won[machine] + BOTH) / (won[machine] + lost[machine] + 2 * BOTH)
        worth.append(chance * (1 + max(worth_of_pulls(paid, lost))) + (1 - chance) * max(worth_of_pulls(won, failed)))
    return tuple(worth)


def play_bandit(env: Any) -> int:
    worth = worth_of_pulls(tuple(env.won), tuple(env.lost))
    return worth.index(max(worth))


def play_dialogue(env: Any) -> int:
    """Asks for the first thing that has not been said, and books when all have been."""
    return next((topic for topic, words in enumerate(WORDS) if not {*words} & {*env.said}), len(WORDS))


PLAYERS: dict[str, Callable[[Any], Any]] = {  # of a game without wrappers, to an action
    "nim": play_nim, "thermostat": play_thermostat, "knapsack": play_knapsack, "mastermind": play_mastermind,
    "maze": by_shortest_way, "connect_three": play_connect_three, "stock": play_stock, "bandit": play_bandit,
    "blocks": by_shortest_way, "sokoban": by_shortest_way, "dialogue": play_dialogue, "key_and_door": by_shortest_way,
}  # fmt: skip


def name_of(game: str) -> str:
    return "".join(word.capitalize() for word in game.split("_")) + "-v0"


def mean_return(game: str, player: Callable | None, episodes: int = EPISODES) -> float:
    """Plays the first held-out episodes; without a player, at random."""
    env, total = gym.make(f"examples.games.{game}:{name_of(game)}", disable_env_checker=True), 0.0
    for seed in range(HELD_OUT, HELD_OUT + episodes):
        env.action_space.seed(seed)
        over, _ = False, env.reset(seed=seed)
        while not over:
            action = player(env.unwrapped) if player else env.action_space.sample()
            _, reward, terminated, truncated, _ = env.step(action)
            over, total = terminated or truncated, total + float(reward)
    return total / episodes


def learn(game: str, seed: int, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Runs the command that learns a game, unless it was run; returns its summary, None if it failed."""
    summary = FOLDER / f"{game}_{seed}" / "summary.json"
    if not summary.exists():
        command = ["-m", "scripts.learn", f"examples/games/{game}.py:{name_of(game)}", "--seed", str(seed), *overrides]
        subprocess.run([sys.executable, *command, f"trainer.default_local_dir={summary.parent}"], check=False)
    return json.loads(summary.read_text()) if summary.exists() else None


def row(game: str, random: float, best: float, summaries: Sequence[dict[str, Any]], shares: Sequence[float]) -> str:
    """Writes a game's line of the table; what differs from seed to seed is parted by slashes."""
    spent = Counter()  # by kind of stage
    for summary in summaries:
        for name, seconds in summary["cpu"].items():
            spent[name.split()[0]] += seconds / len(summaries)
    numbers = [random], [best], *([each[when] for each in summaries] for when in ("before", "after")), shares
    cells = [game, *(" / ".join(f"{number:.2f}" for number in each) for each in numbers)]
    cells += [", ".join(f"{stage} {seconds:.0f}" for stage, seconds in spent.items()), summaries[0].get("labels", "")]
    return f"| {' | '.join(cells)} |"


def learn_all(levels: dict[str, tuple[float, float]], seeds: Sequence[int], overrides: Sequence[str]) -> None:
    """Learns all games, then prints the table; a run that failed has no part in it."""
    lines, medians = [], []
    for game, (random, best) in levels.items():
        ran = [summary for seed in seeds if (summary := learn(game, seed, overrides))]
        shares = [(summary["after"] - random) / (best - random) for summary in ran]
        lines.append(row(game, random, best, ran, shares) if ran else f"| {game} | failed |")
        medians.append(median(shares) if len(ran) == len(seeds) else 0.0)
    print("\n".join(["", HEAD, *lines]))
    for goal in (0.5, 0.8):
        print(f"{goal} of the way in the median seed: {sum(each >= goal for each in medians)} of {len(medians)} games")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", default=",".join(PLAYERS), help="names, joined by commas; all of them")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of the runs of each game (0)")
    parser.add_argument("--players-only", action="store_true", help="learn nothing")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every run")
    arguments = parser.parse_intermixed_args()
    games = arguments.games.split(",")
    if unknown := sorted({*games} - {*PLAYERS}):
        parser.error(f"--games has {', '.join(unknown)}: there are {', '.join(PLAYERS)}")
    levels = {}
    print("| game | random | best |\n|---|---|---|")
    for game in games:
        levels[game] = mean_return(game, None), mean_return(game, PLAYERS[game])
        print(f"| {game} | {levels[game][0]:.2f} | {levels[game][1]:.2f} |", flush=True)
    if not arguments.players_only:
        learn_all(levels, arguments.seeds, arguments.overrides)


if __name__ == "__main__":
    main()
