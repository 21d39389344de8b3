"""A task that needs its reasoning: nine numbers, named by letters, are added to a first one or taken from it.

An answer may work out the total after each of them and end with a line "Answer: 38", or give that line at once. A
language model knows how to add two numbers, and cannot add ten in one pass. The letters show it which number is next.
"""

import re
import string
from typing import Any

import numpy as np

from data.seeding import numpy_generator

TERMS = 10
AT_ONCE, WORKED = "Answer:", "A:"  # how the two kinds of answers begin

Rows = list[dict[str, Any]]


def draw(rng: np.random.Generator) -> list[int]:
    """Draws the first number and what is added to it; no total is negative."""
    terms = [int(rng.integers(1, 10))]
    while len(terms) < TERMS:
        term = int(rng.integers(1, 10))
        is_subtracted = rng.random() < 0.5 and term <= sum(terms)
        terms.append(-term if is_subtracted else term)
    return terms


def signed(term: int) -> str:
    return f"{'-' if term < 0 else '+'} {abs(term)}"


def question(terms: list[int]) -> list[dict[str, str]]:
    lines = [f"{letter}: {signed(term)}" for letter, term in zip(string.ascii_uppercase, terms[1:], strict=False)]
    return [{"role": "user", "content": "\n".join([f"Start with {terms[0]}.", *lines])}]


def work_out(terms: list[int], slip: float = 0.0, rng: np.random.Generator | None = None) -> str:
    """Works out a sum, a line for each total; with a chance of `slip` a total is off by one or two."""
    total, lines = terms[0], []
    for letter, term in zip(string.ascii_uppercase, terms[1:], strict=False):
        before, total = total, total + term
        if rng is not None and slip and rng.random() < slip:
            total += int(rng.choice([-2, -1, 1, 2]))
        lines.append(f"{letter}: {before} {signed(term)} = {total}")
    return "\n".join([*lines, f"{AT_ONCE} {total}"])


def with_wrong_step(worked: str) -> str:
    """Returns the first half of a worked answer, its last total made wrong by three."""
    half = "\n".join(worked.split("\n")[: TERMS // 2])
    return re.sub(r"\d+$", lambda total: str(int(total[0]) + 3), half)


def make_rows(split: str, seed: int, count: int) -> Rows:
    """Makes `count` rows of the `split` "train" or "val", in verl's columns."""
    rng = numpy_generator(seed, "long_sum", split)
    sums = [draw(rng) for _ in range(count)]
    return [
        {
            "data_source": "long_sum",
            "prompt": question(terms),
            "reward_model": {"style": "rule", "ground_truth": str(sum(terms))},
            "extra_info": {"split": split, "index": index},
        }
        for index, terms in enumerate(sums)
    ]


def demonstrations(seed: int, count: int, at_once: float, slip: float) -> Rows:
    """Makes `count` answers to imitate: a share is given `at_once`, and right; in the others each step may `slip`."""
    rng, rows = numpy_generator(seed, "demonstrations", str(at_once)), []
    for _ in range(count):
        terms = draw(rng)
        answer = f"{AT_ONCE} {sum(terms)}" if rng.random() < at_once else work_out(terms, slip, rng)
        rows.append({"prompt": question(terms), "response": answer})
    return rows


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 if the answer ends with "Answer:" and the right total; `worked` tells answers that do not begin with it."""
    right = float(solution_str.endswith(f"{AT_ONCE} {ground_truth}"))
    return {"score": right, "acc": right, "worked": float(not solution_str.startswith(AT_ONCE))}
