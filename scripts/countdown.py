"""Countdown as rows to train on: python -m scripts.countdown [--to ~/data/countdown] [--train N] [--test N] [--seed N]

Each row asks for an expression of three or four numbers that comes to a target; one exists. Rows are made from the seed
alone, and none of train.parquet is in test.parquet. extras/rules/countdown.py scores the answers, and
extra_info.difficulty is how many numbers there are.
"""

from configs.errors import refusals  # isort: skip

import argparse
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from data.seeding import numpy_generator
from extras.rules.countdown import OPERATIONS

QUESTION = (
    "Use each of the numbers {numbers} exactly once, with + - * / and parentheses, to make {target}. "
    "Write the expression between <answer> and </answer>, for example <answer>(1 + 2) * 3</answer>."
)
LARGEST_TARGET = 100


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", default="~/data/countdown", metavar="FOLDER", help="where the rows go")
    parser.add_argument("--train", type=int, default=10000, metavar="N", help="rows of train.parquet (10000)")
    parser.add_argument("--test", type=int, default=500, metavar="N", help="rows of test.parquet (500)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the numbers and targets (0)")
    arguments = parser.parse_args(argv)
    folder = Path(arguments.to).expanduser()
    with refusals():
        folder.mkdir(parents=True, exist_ok=True)
        rows = countdown_rows(arguments.seed)
        for split, count in (("test", arguments.test), ("train", arguments.train)):
            entries = [{**next(rows), "extra_info": {"split": split, "index": index}} for index in range(count)]
            for row in entries:
                row["extra_info"]["difficulty"] = len(row["reward_model"]["ground_truth"]["numbers"])
            pandas.DataFrame(entries).to_parquet(folder / f"{split}.parquet")
            print(f"{count} rows in {folder / f'{split}.parquet'}")


def countdown_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Yields rows in verl's form, no two alike, without an end."""
    rng, seen = numpy_generator(seed, "countdown"), set()
    while True:
        numbers = sorted(rng.integers(1, 100, size=rng.integers(3, 5)).tolist())
        target = reachable(numbers, rng)
        if target.denominator != 1 or not 1 <= target <= LARGEST_TARGET or (*numbers, target) in seen:
            continue
        seen.add((*numbers, target))
        question = QUESTION.format(numbers=", ".join(map(str, numbers)), target=target)
        yield {
            "data_source": "countdown",
            "prompt": [{"role": "user", "content": question}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": {"target": int(target), "numbers": numbers}},
        }


def reachable(numbers: list[int], rng: np.random.Generator) -> Fraction:
    """Computes a random expression of all `numbers`; returns 0 if it divides by 0."""
    values = [Fraction(number) for number in numbers]
    while len(values) > 1:
        rng.shuffle(values)
        name, (right, left) = rng.choice([*OPERATIONS]), (values.pop(), values.pop())
        if name.__name__ == "Div" and right == 0:
            return Fraction(0)
        values.append(OPERATIONS[name](left, right))
    return values[0]


if __name__ == "__main__":
    main()
