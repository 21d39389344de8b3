"""GSM8K as rows to train on: python -m scripts.gsm8k TRAIN TEST [--to ~/data/gsm8k]

TRAIN and TEST are the public files (github.com/openai/grade-school-math, or the parquet files of the hub's
openai/gsm8k, configuration main): .jsonl, .json or .parquet with the columns `question` and `answer`, whose last line
is "#### 72". Writes train.parquet and test.parquet in verl's form; configs/gsm8k.yaml reads them.
"""

from configs.errors import refusals  # isort: skip

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas

from data.rows import read_rows
from extras.rules.gsm8k import extract_solution

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def main(argv: list[str] | None = None) -> None:
    convert(argv, __doc__, "~/data/gsm8k", gsm8k_rows)


def convert(
    argv: list[str] | None,
    description: str | None,
    folder: str,
    rows_of: Callable[[str, str], Iterable[dict[str, Any]]],
) -> None:
    """Writes train.parquet and test.parquet, into `folder` unless told otherwise, from the public files of a data set.

    Args:
        rows_of: the rows in verl's form, of a file and the name of its split.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", metavar="TRAIN", help="the public training rows")
    parser.add_argument("test", metavar="TEST", help="the public test rows")
    parser.add_argument("--to", default=folder, metavar="FOLDER", help=f"where the rows go ({folder})")
    arguments = parser.parse_args(argv)
    target = Path(arguments.to).expanduser()
    with refusals():
        for split, source in (("train", arguments.train), ("test", arguments.test)):
            rows = list(rows_of(source, split))
            target.mkdir(parents=True, exist_ok=True)
            pandas.DataFrame(rows).to_parquet(target / f"{split}.parquet")
            print(f"{len(rows)} rows in {target / f'{split}.parquet'}")


def gsm8k_rows(file: str | Path, split: str) -> Iterator[dict[str, Any]]:
    """Rows in verl's form, one for each of `file`.

    Raises:
        ValueError: a row has no question, or no answer with a number after ####; names file and row.
    """
    for index, (origin, row) in enumerate(read_rows(file)):
        question, answer = row.get("question"), row.get("answer")
        number = extract_solution(answer) if isinstance(answer, str) else None
        if not isinstance(question, str) or number is None:
            raise ValueError(
                f"{origin}: a row of GSM8K has a text `question` and a text `answer` with a number after '#### '; this "
                f"one has {sorted(name for name, value in row.items() if value is not None)}."
            )
        yield {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{question} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": number},
            "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
        }


if __name__ == "__main__":
    main()
