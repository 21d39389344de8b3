"""A task that needs its reasoning: a ball under one of eight cups in a ring, 52 swaps of neighbours: where is the ball?

The prompt names the swaps by letters: "a4b0c7…" swaps the cups 4 and 5, then 0 and 1, then 7 and 0. The ball begins
under cup 0. An answer may follow it, "0a0b1c1…#3", with its cup after each swap, or guess at once, "#3". In the end all
eight cups are equally likely. The whole product of so many swaps is hard for one pass of a small network, while a step
of a worked answer is one look at the prompt.
"""

import re
import string
from typing import Any

import numpy as np

from data.seeding import numpy_generator

CUPS = 8
LETTERS = string.ascii_letters  # the names of the swaps: there are as many
AT_ONCE, WORKED = "#", "0"  # how the two kinds of answers begin

Rows = list[dict[str, Any]]


def draw(rng: np.random.Generator) -> str:
    return "".join(f"{letter}{rng.integers(CUPS)}" for letter in LETTERS)


def swapped(cup: int, swap: int) -> int:
    """Returns where a ball under `cup` is after the cups `swap` and the next of the ring are swapped."""
    return {swap: (swap + 1) % CUPS, (swap + 1) % CUPS: swap}.get(cup, cup)


def work_out(swaps: str, cup: int = 0, slip: float = 0.0, rng: np.random.Generator | None = None) -> str:
    """Follows the ball from `cup` through `swaps`; with a chance of `slip` a step ends at a wrong cup of `rng`'s."""
    worked = str(cup)
    for letter, swap in zip(swaps[::2], swaps[1::2], strict=True):
        cup = swapped(cup, int(swap))
        if rng is not None and slip and rng.random() < slip:
            cup = (cup + int(rng.integers(1, CUPS))) % CUPS
        worked += f"{letter}{cup}"
    return f"{worked}#{cup}"


def with_wrong_step(worked: str) -> str:
    """Returns the first half of a worked answer, its last cup replaced by another."""
    half = worked[: len(LETTERS) + 1]
    return re.sub(r"(\d)\D*$", lambda last: str((int(last[1]) + 3) % CUPS), half)


def make_rows(split: str, seed: int, count: int) -> Rows:
    """Makes `count` rows of the `split` "train" or "val", in verl's columns."""
    rng = numpy_generator(seed, "shell_game", split)
    games = [draw(rng) for _ in range(count)]
    return [
        {
            "data_source": "shell_game",
            "prompt": question(swaps),
            "reward_model": {"style": "rule", "ground_truth": work_out(swaps)[-1]},
            "extra_info": {"split": split, "index": index},
        }
        for index, swaps in enumerate(games)
    ]


def question(swaps: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": swaps}]


def demonstrations(seed: int, count: int, at_once: float, slip: float) -> Rows:
    """Makes `count` answers to imitate: a share is given `at_once`, and right; in the others each step may `slip`."""
    rng, rows = numpy_generator(seed, "demonstrations", str(at_once)), []
    for _ in range(count):
        swaps = draw(rng)
        answer = work_out(swaps)[-2:] if rng.random() < at_once else work_out(swaps, slip=slip, rng=rng)
        rows.append({"prompt": question(swaps), "response": answer})
    return rows


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 if the answer ends with # and the right cup, else 0; `worked` tells answers that do not begin with it."""
    right = float(solution_str.endswith(f"#{ground_truth}"))
    return {"score": right, "acc": right, "worked": float(not solution_str.startswith(AT_ONCE))}
