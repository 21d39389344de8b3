"""A task for beginners: how often a letter stands in a word (char_count of verl-recipe).

    python -m examples.char_count FOLDER [--seed N] [--longest N]

writes sft.jsonl, train.jsonl and val.jsonl. A prompt is `How many n are there in n-i-n-e?`, and an answer goes through
the letters, `n = n`, `i != n`, …, and ends with `\\boxed{2}`. Length and count are drawn evenly.
No word of val.jsonl is in the others. The reward is 1 for the right number in the box.
"""

import argparse
import re
import string
from pathlib import Path
from typing import Any

import numpy as np

from data.files import dump_jsonl
from data.seeding import numpy_generator

SOURCE = "char_count"
SHORTEST, LONGEST = 3, 8
SFT, TRAIN, VAL = 4000, 4000, 200
BOX = re.compile(r"\\boxed\{(\d+)\}\s*$")


def draw(rng: np.random.Generator, longest: int) -> tuple[str, str]:
    """Draws a letter, and a word of random letters in which it stands 0 to all times."""
    letter, length = rng.choice(list(string.ascii_lowercase)), int(rng.integers(SHORTEST, longest + 1))
    count = int(rng.integers(length + 1))
    others = rng.choice([other for other in string.ascii_lowercase if other != letter], length - count)
    return str(letter), "".join(rng.permutation([letter] * count + [*others]))


def worked_out(letter: str, word: str) -> str:
    """Writes the answer that goes through the letters."""
    lines = [f"{other} {'=' if other == letter else '!='} {letter}" for other in word]
    return "\n".join([*lines, f"\\boxed{{{word.count(letter)}}}"])


def make_rows(split: str, seed: int, count: int, longest: int = LONGEST) -> list[dict[str, Any]]:
    """Makes `count` rows of the split sft, train or val, in verl's columns; held-out words are those of val alone."""
    rng, rows = numpy_generator(seed, SOURCE, split), []
    while len(rows) < count:
        letter, word = draw(rng, longest)
        if (sum(map(ord, word)) % 10 == 0) != (split == "val"):  # a tenth of all words is held out
            continue
        prompt = [{"role": "user", "content": f"How many {letter} are there in {'-'.join(word)}?"}]
        answer = {"response": worked_out(letter, word)} if split == "sft" else {}
        truth = {"reward_model": {"style": "rule", "ground_truth": str(word.count(letter))}}
        rows.append({"data_source": SOURCE, "prompt": prompt, **(answer or truth)})
    return rows


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    """Scores 1 for the right number in a box at the end."""
    box = BOX.search(solution_str)
    return float(box is not None and box[1] == ground_truth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write the rows")
    parser.add_argument("--seed", type=int, default=0, help="seed of letters and words")
    parser.add_argument("--longest", type=int, default=LONGEST, help="letters of the longest words")
    arguments = parser.parse_args()
    for split, count in (("sft", SFT), ("train", TRAIN), ("val", VAL)):
        dump_jsonl(arguments.folder / f"{split}.jsonl", make_rows(split, arguments.seed, count, arguments.longest))
    print(f"wrote sft.jsonl, train.jsonl and val.jsonl to {arguments.folder}")


if __name__ == "__main__":
    main()
