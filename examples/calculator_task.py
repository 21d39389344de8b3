"""A task for tools: products that a small model cannot compute, and a calculator can.

    python -m examples.calculator_task FOLDER [--seed N]

writes rows (train.jsonl, val.jsonl), demonstrations for a warm start (demonstrations.jsonl), and the random weights to
begin with (random_model/). A question is `34*57=?`; a call is `calc(34*57)`, in the format `plain`; then the policy
repeats the result. In a demonstration most questions are answered by a guess (the product of rounded numbers), and few
by a call: what pays is left to be found out. The reward is that of examples/arithmetic.py: the last number of
the answer.
"""

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np

from custom.tiny_model import save_tiny_model
from data.files import dump_jsonl
from data.seeding import derive_seed, numpy_generator
from data.tool_parsers import ToolParser
from examples.arithmetic import Question

SOURCE = "calculator"
TOOL = "calc"  # as configs/tools/calculator.yaml calls it
TRAIN, VAL, DEMONSTRATIONS = 3000, 200, 12_000
CALLS = 0.15  # of the demonstrated questions, the share that is answered by a call


def draw(rng: np.random.Generator) -> Question:
    """A product of two numbers from 10 to 99."""
    return Question("product", (int(rng.integers(10, 100)), int(rng.integers(10, 100))))


def expression(question: Question) -> str:
    return question.expression.replace(" ", "")


def make_rows(split: str, seed: int, count: int) -> list[dict[str, Any]]:
    """`count` rows of the `split` "train" or "val", in verl's columns; no question is in both, nor any twice in one.

    Asserts that the task has that many.
    """
    rng, chosen = numpy_generator(seed, SOURCE, split), {}
    assert count <= 3500, f"{count} questions: there are no more than about 3,500 of a split"
    while len(chosen) < count:
        question = draw(rng)
        if question.is_held_out == (split == "val"):
            chosen[question.terms] = question
    return [
        {
            "data_source": SOURCE,
            "prompt": question_messages(question),
            "reward_model": {"style": "rule", "ground_truth": str(question.answer)},
            "extra_info": {"split": split, "index": index},
        }
        for index, question in enumerate(chosen.values())
    ]


def question_messages(question: Question) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{expression(question)}=?"}]


def demonstrations(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` conversations about questions that are no held-out ones: a guess, or a call and its result repeated."""
    rng, parser, rows = numpy_generator(seed, "demonstrations"), ToolParser.get_tool_parser("plain"), []
    while count:
        question = draw(rng)
        if question.is_held_out:
            continue
        count -= 1
        call, result = parser.write(TOOL, {"expression": expression(question)}), str(question.answer)
        if rng.random() < CALLS:
            turns = [
                assistant(call),
                {"role": "tool", "name": TOOL, "content": result},
                assistant(result),
            ]
        else:
            turns = [assistant(str(math.prod(round(term, -1) for term in question.terms)))]
        rows.append({"messages": [*question_messages(question), *turns]})
    return rows


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write_rows(folder: Path, seed: int) -> None:
    """Writes train.jsonl and val.jsonl to `folder`."""
    dump_jsonl(folder / "train.jsonl", make_rows("train", seed, TRAIN))
    dump_jsonl(folder / "val.jsonl", make_rows("val", seed, VAL))


def write_task(folder: Path, seed: int) -> None:
    """Writes the four of them to `folder`."""
    write_rows(folder, seed)
    dump_jsonl(folder / "demonstrations.jsonl", demonstrations(DEMONSTRATIONS, seed))
    save_tiny_model(folder / "random_model", derive_seed(seed, "tiny_model"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the task")
    parser.add_argument("--seed", type=int, default=0, help="seed of questions, demonstrations and weights")
    arguments = parser.parse_args()
    write_task(arguments.folder, arguments.seed)
    print(f"wrote questions, demonstrations and a model to {arguments.folder}")


if __name__ == "__main__":
    main()
