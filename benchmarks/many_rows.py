"""Times the start of a run on many rows: python -m benchmarks.many_rows [ROWS …] [--sft] [--plain] [--model FOLDER]

Each row is two chat messages of about 136 tokens, in parquet. A start is a process of its own, and counted from the
moment in which the tokenizer is loaded until the first batch could be drawn: the first start, the second, one that
resumes in the middle of an epoch; and the drawing of 256 rows. Prints seconds, and the most memory of a process in GB.
--plain: rows are read and measured one by one, as without extras/many_rows.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
from transformers import AutoTokenizer

from configs.schema import DataConfig
from custom.tiny_model import build_tokenizer
from data.pretrained import as_users_read
from data.rl_dataset import create_rl_dataset
from data.sampler import PromptLoader, RandomSampler
from extras.many_rows import parquet_rows
from extras.sft.dataset import create_sft_dataset
from extras.sft.settings import SFTDataConfig

LINE = "{:>9} rows  {:<7} {:8.2f} s {:6.2f} GB   256 rows {:5.2f} s"


def write_rows(path: Path, count: int, model: str | None) -> None:
    words, rng = Path("docs/data.md").read_text().split(), random.Random(f"rows {count}")
    with pyarrow.parquet.ParquetWriter(path, pyarrow.Table.from_pylist([row_of(0, "a")]).schema) as writer:
        for start in range(0, count, 50_000):
            texts = [" ".join(rng.choices(words, k=60)) for _ in range(start, min(start + 50_000, count))]
            rows = [row_of(start + number, text[: 450 if model else 78]) for number, text in enumerate(texts)]
            writer.write_table(pyarrow.Table.from_pylist(rows))


def row_of(number: int, text: str) -> dict:
    prompt = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": text}]
    labels = {"style": "rule", "ground_truth": str(number)}
    return {"prompt": prompt, "response": text[:9], "reward_model": labels, "extra_info": {"index": number}}


def start(path: str, arguments: argparse.Namespace, epoch_index: int) -> dict[str, float]:
    parquet_rows.MANY = float("inf") if arguments.plain else parquet_rows.MANY
    tokenizer = as_users_read(AutoTokenizer.from_pretrained(arguments.model) if arguments.model else build_tokenizer())
    began = time.monotonic()
    if arguments.sft:
        rows = create_sft_dataset(path, tokenizer, config := SFTDataConfig(), tokenizer.eos_token_id)
    else:
        rows = create_rl_dataset(path, config := DataConfig(), tokenizer)
    loader = PromptLoader(rows, 256, RandomSampler(rows, config, seed=0))
    loader.load_state_dict({"epoch": 0, "index": epoch_index, "num_rows": len(rows)})
    ready = time.monotonic()
    loader.next_batch()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"start": ready - began, "GB": memory, "draw": time.monotonic() - ready}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--sft", action="store_true", help="rows of supervised training")
    parser.add_argument("--plain", action="store_true", help="one by one")
    parser.add_argument("--model", help="a folder with a tokenizer; default: the tiny model's, of characters")
    parser.add_argument("--start", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps(start(arguments.start[0], arguments, int(arguments.start[1]))))
        return
    for count in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            write_rows(Path(folder) / "rows.parquet", count, arguments.model)
            for name, index in (("first", 0), ("second", 0), ("resume", count // 512 * 256)):
                again = [*sys.argv[1:], "--start", f"{folder}/rows.parquet", str(index)]
                command = [sys.executable, "-m", "benchmarks.many_rows", *again]
                printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
                print(LINE.format(count, name, *json.loads(printed.splitlines()[-1]).values()), flush=True)


if __name__ == "__main__":
    main()
