"""Arithmetic for a small language model: questions made from a seed, and what an answer earns (`make smollm2`).

A row has verl's columns, so files of rows are ordinary data files. A question is held out, or never is, whatever the
seed: training and validation rows have none in common, not even with its terms in another order.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from data.seeding import derive_seed, numpy_generator

HELD_OUT_OF = 2  # one question of so many is held out
PATIENCE = 10_000  # draws for one more question
NUMBER = re.compile(r"(?:(?<!\d)-)?\d+(?:,\d{3})*(?:\.\d+)?")  # the minus of 12-7 is no sign


@dataclass(frozen=True)
class Question:
    """Terms to add up, a subtracted one negative; of a product, its factors."""

    kind: str
    terms: tuple[int, ...]

    @property
    def expression(self) -> str:
        if self.kind == "product":
            return " * ".join(map(str, self.terms))
        signed = "".join(f" {'-' if term < 0 else '+'} {abs(term)}" for term in self.terms)
        return signed.removeprefix(" + ")

    @property
    def answer(self) -> int:
        return math.prod(self.terms) if self.kind == "product" else sum(self.terms)

    @property
    def worked_out(self) -> str:
        """A sum term by term: "5 + 4 = 9, 9 - 2 = 7."."""
        totals = [sum(self.terms[:count]) for count in range(1, len(self.terms) + 1)]
        steps = zip(totals, self.terms[1:], totals[1:], strict=False)
        return (
            ", ".join(f"{Question(self.kind, (total, term)).expression} = {then}" for total, term, then in steps) + "."
        )

    @property
    def is_held_out(self) -> bool:
        return derive_seed(0, self.kind, *sorted(self.terms)) % HELD_OUT_OF == 0


def two_terms(rng: np.random.Generator) -> Question:
    """A sum or a difference of numbers up to 15, which is not negative, or a product of 2 to 9 and 2 to 12."""
    kind = ("sum", "difference", "product")[rng.integers(3)]
    if kind == "product":
        return Question(kind, (int(rng.integers(2, 10)), int(rng.integers(2, 13))))
    a, b = (int(number) for number in rng.integers(1, 16, size=2))
    return Question(kind, (a, b) if kind == "sum" else (max(a, b), -min(a, b)))


def chain_sum(rng: np.random.Generator) -> Question:
    """Three numbers of up to 9 to add or subtract in turn; what is left never falls below 0."""
    terms = [int(rng.integers(1, 10))]
    for _ in range(2):
        term = int(rng.integers(1, 10))
        subtracted = rng.random() < 0.5 and term <= sum(terms)
        terms.append(-term if subtracted else term)
    return Question("chain_sum", tuple(terms))


@dataclass(frozen=True)
class Task:
    """Describes a task: questions, the prompt with {} for the expression, and turns before it that show how."""

    draw: Callable[[np.random.Generator], Question]
    wording: str
    examples: tuple[Question, ...] = ()  # worked out

    def messages(self, question: Question) -> list[dict[str, str]]:
        shown = [
            message
            for example in self.examples
            for message in (
                {"role": "user", "content": self.wording.format(example.expression)},
                {"role": "assistant", "content": example.worked_out},
            )
        ]
        return [*shown, {"role": "user", "content": self.wording.format(question.expression)}]


TASKS = {
    "arithmetic": Task(two_terms, "What is {}?"),
    "chain_sum": Task(chain_sum, "What is {}?", (Question("chain_sum", (5, 4, -2)), Question("chain_sum", (8, -3, 6)))),
}


def make_rows(task: str, split: str, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` rows of the `split` "train" (questions may come again) or "val" (held-out ones, each once).

    Raises:
        ValueError: the task has fewer held-out questions.
    """
    rng, held_out = numpy_generator(seed, task, split), split == "val"
    questions: list[Question] = []
    in_vain = 0
    while len(questions) < count:
        question = TASKS[task].draw(rng)
        if question.is_held_out == held_out and not (held_out and question in questions):
            questions.append(question)
            in_vain = 0
        elif (in_vain := in_vain + 1) == PATIENCE:
            raise ValueError(
                f"task {task!r}: {count} held-out questions are asked for, and after {len(questions)} of them "
                f"{PATIENCE} draws brought no further one. Let it draw from more."
            )
    return [
        {
            "data_source": task,
            "prompt": TASKS[task].messages(question),
            "reward_model": {"style": "rule", "ground_truth": str(question.answer)},
            "extra_info": {"split": split, "index": index, "kind": question.kind},
        }
        for index, question in enumerate(questions)
    ]


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """1 if the last number of the answer is the right one, else 0; `acc` is what validation calls success."""
    numbers = NUMBER.findall(solution_str)
    right = bool(numbers) and float(numbers[-1].replace(",", "")) == float(ground_truth)
    return {"score": float(right), "acc": float(right)}
