"""GSM8K as rows to train on: python -m scripts.gsm8k TRAIN TEST [--to ~/data/gsm8k]

TRAIN and TEST are the public files (github.com/openai/grade-school-math, or the parquet files of the hub's
openai/gsm8k, configuration main): .jsonl, .json or .parquet with the columns `question` and `answer`, whose last line
is "#### 72". Writes train.parquet and test.parquet in verl's form; configs/gsm8k.yaml reads them.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas

from configs.errors import refusals
from data.rows import read_rows
from training.reward_score.gsm8k import extract_answer

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", metavar="TRAIN", help="the public train file")
    parser.add_argument("test", metavar="TEST", help="the public test file")
    parser.add_argument("--to", default="~/data/gsm8k", metavar="FOLDER", help="where the rows go (~/data/gsm8k)")
    arguments = parser.parse_args(argv)
    folder = Path(arguments.to).expanduser()
    with refusals():
        for split, file in (("train", arguments.train), ("test", arguments.test)):
            rows = list(gsm8k_rows(file, split))
            folder.mkdir(parents=True, exist_ok=True)
            pandas.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
            print(f"{len(rows)} rows in {folder / f'{split}.parquet'}")


def gsm8k_rows(file: str | Path, split: str) -> Iterator[dict[str, Any]]:
    """Rows in verl's form, one for each of `file`.

    Raises:
        ValueError: a row has no question, or no answer with a number after ####; names file and row.
    """
    for index, (origin, row) in enumerate(read_rows(file)):
        question, answer = row.get("question"), row.get("answer")
        number = extract_answer(answer, "strict") if isinstance(answer, str) else None
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
