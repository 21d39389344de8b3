"""Reasoning: a model that answers at once and is seldom right learns to work out its answers, in more than 100 tokens.

    python -m scripts.reasoning [--task shell_game] [--seed N] [key=value …]

1. A tiny language model with random weights (shell_game), or SmolLM2-135M-Instruct (long_sum).
2. Warm start: it imitates right answers given at once, and fewer that are worked out.
3. GRPO (configs/reasoning.yaml or reasoning_long_sum.yaml; key=value overrides go there), rewarded for right answers
   (examples/shell_game.py, examples/long_sum.py).
4. The control: the same from the same start, with room for an answer at once only.
All three models are measured on 200 held-out rows.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()  # before torch is loaded

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import main as rl
from configs.errors import late_refusals, refusals
from configs.schema import Config
from custom.tiny_model import save_tiny_model
from data.files import dump_jsonl, read_metrics, sole_run
from examples import long_sum, shell_game
from scripts.quickstart import Lesson, imitate, new_run, script_parser
from scripts.smollm2 import copy_smollm2
from workers.ray_group import start_command

TRAIN_ROWS, HELD_OUT_ROWS = 4096, 200
HELD_OUT_SEED = 0  # whatever the run's: every seed is measured on the same rows
ROWS_AT_ONCE = 50  # when measuring: 200 rows of SmolLM2's and what the run still holds took 14 GB

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """Describes a task: the module of its rows, the config of its run, the model that starts, and its warm start."""

    rows: ModuleType
    config: str
    save_model: Callable[..., None]
    lessons: Sequence[Lesson]
    at_once_tokens: int  # of an answer at once and its end


def lesson(task: ModuleType, count: int, at_once: float, slip: float, *overrides: str) -> Lesson:
    def rows(config: Config) -> list[Row]:
        return task.demonstrations(config.trainer.seed, count, at_once, slip)

    return Lesson(rows, "multiturn_sft", overrides)


SHELL_GAME_LESSONS = [  # first a step, for which all is worked out; then to answer at once more often than not
    lesson(shell_game, 4800, 0, 0, "data.train_batch_size=16", "optim.lr=1.5e-3"),
    lesson(shell_game, 2000, 0.6, 0.02, "data.train_batch_size=40", "optim.lr=3e-4", "optim.lr_warmup_steps=5"),
]
LONG_SUM_LESSONS = [
    lesson(long_sum, 560, 0, 0, "data.train_batch_size=16", "optim.lr=1e-4", "optim.lr_warmup_steps=3"),
    lesson(long_sum, 192, 0.7, 0, "data.train_batch_size=16", "optim.lr=3e-5", "optim.lr_warmup_steps=3"),
]
TASKS = {
    "shell_game": Task(shell_game, "reasoning", save_tiny_model, SHELL_GAME_LESSONS, at_once_tokens=3),
    "long_sum": Task(long_sum, "reasoning_long_sum", copy_smollm2, LONG_SUM_LESSONS, at_once_tokens=6),
}


def main() -> None:
    parser = script_parser(__doc__, "weights, rows, sampling")
    parser.add_argument("--task", default="shell_game", choices=TASKS, help="what is asked (%(default)s)")
    arguments = parser.parse_intermixed_args()
    task = TASKS[arguments.task]
    with refusals():
        write_rows(task, arguments.seed)  # first: that they are there is checked with the config
        config, control = configs(task, arguments.seed, arguments.overrides)
    start_command(config)
    with late_refusals():
        learn(task, config, control)


def rows_folder(task: Task) -> Path:
    return Path("outputs", task.config, "rows")


def write_rows(task: Task, seed: int) -> None:
    dump_jsonl(rows_folder(task) / "train.jsonl", task.rows.make_rows("train", seed, TRAIN_ROWS))
    dump_jsonl(rows_folder(task) / "val.jsonl", task.rows.make_rows("val", HELD_OUT_SEED, HELD_OUT_ROWS))


def configs(task: Task, seed: int, overrides: Sequence[str]) -> tuple[Config, Config]:
    """Returns the config of the run, and that of its control, in a folder inside the run's."""
    config = new_run(task.config, seed, [], overrides)
    changes = [
        f"trainer.default_local_dir={config.trainer.default_local_dir}/at_once",
        f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}",
        f"data.max_response_length={task.at_once_tokens}",
    ]
    return config, new_run(task.config, seed, [], [*overrides, *changes])


def learn(task: Task, config: Config, control: Config) -> None:
    """Runs all stages anew, prints the figures, and writes them to summary.json in the run's folder."""
    folder, seed = Path(config.trainer.default_local_dir), config.trainer.seed
    rows = [json.loads(line) for line in (rows_folder(task) / "val.jsonl").read_text().splitlines()]
    started = time.monotonic()
    with sole_run(folder):
        print("stage 1 of 3: a model learns to imitate answers, most of them given at once")
        imitate(config, folder, task.lessons, task.save_model)
        summary: Row = {"seed": seed, "minutes": {"warm start": round((time.monotonic() - started) / 60, 1)}}
        print("stage 2 of 3: reinforcement learning")
        rl.build(config).fit()
    print("stage 3 of 3: the control, which has to answer at once")
    rl.run(control)
    summary["minutes"] |= {phase: minutes_of(config, phase) for phase in ("gen", "update_actor", "step")}
    last = f"global_step_{config.trainer.total_training_steps}/actor/huggingface"
    models = {
        "warm start": (Path(config.actor_rollout_ref.model.path), config),
        "after RL": (folder / last, config),
        "control": (folder / "at_once" / last, control),
    }
    for name, (model, run_config) in models.items():
        summary[name] = measure(task, model, rows, run_config)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    table = Table("", *models)
    for figure in [figure for figure in summary["warm start"] if figure != "answers"]:
        table.add_row(figure, *(str(summary[name].get(figure, "")) for name in models))
    Console().print(table)
    print(f"minutes: {summary['minutes']}; wrote {folder / 'summary.json'}")


def minutes_of(config: Config, phase: str) -> float:
    record = read_metrics(Path(config.trainer.default_local_dir) / "metrics.jsonl")
    return round(sum(entry["data"].get(f"timing_s/{phase}", 0) for entry in record) / 60, 1)


def measure(task: Task, folder: Path, rows: Sequence[Row], config: Config) -> Row:
    """Measures a model on `rows`, in its run's dtype and length: its answers, and what comes of beginnings."""
    limit, dtype = config.data.max_response_length, config.actor_rollout_ref.actor.fsdp_config.dtype
    right = [row["reward_model"]["ground_truth"] for row in rows]
    at_once, worked_out = task.rows.AT_ONCE, task.rows.WORKED
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]

    def answers(begin: Sequence[str], **sampling: Any) -> list[str]:
        torch.manual_seed(config.trainer.seed)
        prompts = [*map(str.__add__, chats, begin)]
        batches = (prompts[first : first + ROWS_AT_ONCE] for first in range(0, len(prompts), ROWS_AT_ONCE))
        texts = chain.from_iterable(continued(batch, **sampling) for batch in batches)
        return [*map(str.__add__, begin, texts)]

    def continued(prompts: list[str], **sampling: Any) -> list[str]:
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        ids, mask = batch["input_ids"], batch["attention_mask"]
        sampling = sampling or {"do_sample": False}
        ended = model.generate(ids, attention_mask=mask, max_new_tokens=limit, **sampling)
        return tokenizer.batch_decode(ended[:, ids.shape[1] :], skip_special_tokens=True)

    def scores(texts: Sequence[str]) -> list[float]:
        return [task.rows.compute_score("", text, truth)["acc"] for text, truth in zip(texts, right, strict=True)]

    free = [""] * len(rows)
    greedy, sampled = answers(free), answers(free, do_sample=True, top_k=0)
    is_worked = [not text.startswith(at_once) for text in sampled]
    figures = {
        "parameters": model.num_parameters(),
        "greedy: accuracy": mean(scores(greedy)),
        "greedy: tokens": mean(len(tokenizer(text)["input_ids"]) + 1 for text in greedy),  # the text's, and the end
        "sampled: accuracy": mean(scores(sampled)),
        "sampled: share worked out": mean(is_worked),
        "sampled: right if worked out": mean(compress(scores(sampled), is_worked)),
        f"begun with {at_once}: accuracy": mean(scores(answers([at_once] * len(rows)))),
        "answers": [*zip(greedy[:2], sampled[:2], right[:2], strict=True)],
    }
    if limit <= task.at_once_tokens:
        return figures
    worked = answers([worked_out] * len(rows))
    changed = answers([*map(task.rows.with_wrong_step, worked)])
    ends = [[text.rpartition(at_once)[2] for text in texts] for texts in (worked, changed)]
    return figures | {
        f"begun with {worked_out}: accuracy": mean(scores(worked)),
        "a step changed: answer moves": mean(old != new for old, new in zip(*ends, strict=True)),
        "a step changed: accuracy": mean(scores(changed)),
    }


def mean(values: Iterable[float]) -> float:
    values = [*values]
    return round(sum(values) / len(values), 3) if values else 0.0


if __name__ == "__main__":
    main()
