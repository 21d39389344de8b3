"""MATH as rows to train on: python -m scripts.competition_math TRAIN TEST [--to ~/data/math]

TRAIN and TEST are the public files (github.com/hendrycks/math: the folders train and test; or the parquet files of the
hub's DigitalLearningGmbH/MATH-lighteval), whose rows have `problem`, `level` and a `solution` with the answer in
\\boxed{}. Writes train.parquet and test.parquet in verl's form; extra_info.difficulty is the level, 1 to 5.
"""

from scripts.gsm8k import convert  # isort: skip

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data.rows import read_rows
from extras.rules.math_reward import boxed_content

INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."


def main(argv: list[str] | None = None) -> None:
    convert(argv, __doc__, "~/data/math", math_rows)


def math_rows(source: str | Path, split: str) -> Iterator[dict[str, Any]]:
    """Rows in verl's form, one for each of `source`.

    Raises:
        ValueError: a row has no problem, or no solution with an answer in a box; names file and row.
    """
    for index, (origin, row) in enumerate(read_rows(source)):
        problem, solution = row.get("problem"), row.get("solution")
        answer = boxed_content(solution) if isinstance(solution, str) else None
        if not isinstance(problem, str) or answer is None:
            raise ValueError(
                f"{origin}: a row of MATH has a text `problem` and a text `solution` with its answer in \\boxed{{}}; "
                f"this one has {sorted(name for name, value in row.items() if value is not None)}."
            )
        level = re.search(r"\d", str(row.get("level")))
        yield {
            "data_source": "DigitalLearningGmbH/MATH-lighteval",
            "prompt": [{"role": "user", "content": f"{problem} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index, "difficulty": int(level[0]) if level else None},
        }


if __name__ == "__main__":
    main()
