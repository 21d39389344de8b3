"""A task of several tokens that is scored as a whole: eight digits are to be written backwards, without a mistake."""

from typing import Any

import numpy as np

from data.seeding import numpy_generator

DIGITS = 8

Rows = list[dict[str, Any]]


def draw(rng: np.random.Generator) -> str:
    return "".join(map(str, rng.integers(10, size=DIGITS)))


def question(digits: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": digits}]


def make_rows(split: str, seed: int, count: int) -> Rows:
    """Makes `count` rows of the `split` "train" or "val", in verl's columns."""
    rng = numpy_generator(seed, "reversal", split)
    drawn = [draw(rng) for _ in range(count)]
    return [
        {
            "data_source": "reversal",
            "prompt": question(digits),
            "reward_model": {"style": "rule", "ground_truth": digits[::-1]},
        }
        for digits in drawn
    ]


def demonstrations(seed: int, count: int, slip: float) -> Rows:
    """Makes `count` answers to imitate, of which each digit is another one with a chance of `slip`."""
    rng, rows = numpy_generator(seed, "demonstrations"), []
    for _ in range(count):
        digits = draw(rng)
        moved = [(int(digit) + (rng.random() < slip) * rng.integers(1, 10)) % 10 for digit in digits[::-1]]
        rows.append({"prompt": question(digits), "response": "".join(map(str, moved))})
    return rows


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 if the answer is right as a whole, else 0; `digits` is the share of right ones, which nobody learns from."""
    right = sum(map(str.__eq__, solution_str, ground_truth)) / DIGITS
    return {"score": float(solution_str == ground_truth), "digits": right}
