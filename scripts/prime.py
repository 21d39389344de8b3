"""GRPO and PRIME from one start, on answers of nine tokens that are scored as a whole (examples/reversal.py).

    python -m scripts.prime [--seed N] [key=value …]

1. A tiny language model imitates answers of which each digit has a slip in two of ten.
2. It is trained by each recipe, from the same start, for as many steps; key=value overrides go to both.
The share of right answers on held-out rows, sampled, is printed as they train, and written to summary.json.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()  # before torch is loaded

import json
from collections.abc import Sequence

import main as rl
from configs.errors import late_refusals, refusals
from configs.schema import Config
from data.files import dump_jsonl, read_metrics, sole_run
from examples import reversal
from scripts.quickstart import Lesson, imitate, new_run, script_parser
from workers.ray_group import start_command

FOLDER = Path("outputs/prime")
RECIPES = ("grpo", "prime")
SLIP, DEMONSTRATIONS = 0.2, 12_000
SUCCESS = "val-core/reversal/reward/mean@4"


def main() -> None:
    arguments = script_parser(__doc__, "weights, rows, sampling").parse_intermixed_args()
    folder = FOLDER / str(arguments.seed)
    with refusals():
        for split, count in (("train", 4096), ("val", 128)):
            dump_jsonl(folder / f"{split}.jsonl", reversal.make_rows(split, arguments.seed, count))
        configs = {name: recipe_config(name, folder, arguments.seed, arguments.overrides) for name in RECIPES}
    start_command(configs["grpo"])
    with late_refusals(), sole_run(folder):
        warm_start = Lesson(
            lambda config: reversal.demonstrations(config.trainer.seed, DEMONSTRATIONS, SLIP),
            "sft",
            ["data.train_batch_size=32", "data.max_length=32", "optim.lr=1e-3", "optim.lr_scheduler_type=cosine"],
        )
        imitate(configs["grpo"], folder, [warm_start])
        for name, config in configs.items():
            print(f"{name}, from a start whose digits are right in eight of ten")
            rl.run(config)
    report(folder)


def recipe_config(name: str, folder: Path, seed: int, overrides: Sequence[str]) -> Config:
    files = [f"data.{split}_files={folder}/{split}.jsonl" for split in ("train", "val")]
    no_kl = "actor_rollout_ref.actor.use_kl_loss=false"  # which recipe=grpo brings
    settings = [f"actor_rollout_ref.model.path={folder}/start", f"trainer.default_local_dir={folder / name}", no_kl]
    return new_run("reversal", seed, [f"recipe={name}", *files, *settings], overrides)


def report(folder: Path) -> None:
    """Prints the held-out success of both over the steps, and writes it to summary.json."""
    curves = {}
    for name in RECIPES:
        entries = read_metrics(folder / name / "metrics.jsonl")
        curves[name] = {entry["step"]: entry["data"][SUCCESS] for entry in entries if SUCCESS in entry["data"]}
        print(f"{name}: " + " ".join(f"{step}:{success:.3f}" for step, success in curves[name].items()))
    (folder / "summary.json").write_text(json.dumps(curves, indent=2) + "\n")


if __name__ == "__main__":
    main()
