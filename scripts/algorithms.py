"""Every recipe of configs/recipe/ on FrozenLake, from one warm start, in about a minute each.

    python -m scripts.algorithms [--recipes grpo,rloo] [--seed N] [key=value …]

Writes outputs/algorithms/table.md (success before and after, seconds a step), results.json and curves.png. A recipe
that is asked for replaces its earlier result; the others stay.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()  # before torch is loaded

import json
from statistics import median
from typing import Any

import main as rl
from configs.errors import late_refusals, refusals
from configs.loader import options
from configs.schema import Config
from data.files import sole_run
from extras.report.charts import plot_curves, read_curve
from scripts.quickstart import SUCCESS, new_run, script_parser, warm_start
from workers.ray_group import start_command

FOLDER = Path("outputs/algorithms")
RECIPES = [name for name in options("recipe") if name != "opd"]  # which needs a teacher: docs/distillation.md
REWARDS = {"fapo": ["reward.reward_manager={path: examples/careful_lake.py, name: CarefulWalk}"]}  # it marks flaws


def main() -> None:
    parser = script_parser(__doc__, "weights, maps, sampling")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="names, joined by commas; all of them")
    arguments = parser.parse_intermixed_args()
    recipes = arguments.recipes.split(",")
    with refusals():
        configs = {name: recipe_config(name, arguments.seed, arguments.overrides) for name in recipes}
    start_command(configs[recipes[0]])
    with late_refusals(), sole_run(FOLDER):
        print("a tiny model learns to imitate a careful wanderer, who does not know the goal")
        warm_start(configs[recipes[0]], FOLDER)
        for number, (name, config) in enumerate(configs.items(), start=1):
            print(f"{number} of {len(configs)}: {name}")
            rl.run(config)
        report()


def recipe_config(name: str, seed: int, overrides: list[str]) -> Config:
    settings = [f"recipe={name}", f"trainer.default_local_dir={FOLDER / name}", *REWARDS.get(name, ())]
    return new_run("frozenlake_short", seed, settings, overrides)


def report() -> None:
    """Table, figures and curves of all recipes that have been run."""
    records = {name: FOLDER / name / "metrics.jsonl" for name in RECIPES}
    records = {name: record for name, record in records.items() if record.exists()}
    results = {name: outcome(record) for name, record in records.items()}
    (FOLDER / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (FOLDER / "table.md").write_text(table(results))
    plot_curves(
        {name: read_curve(record, SUCCESS) for name, record in records.items()},
        "success",
        FOLDER / "curves.png",
        title="FrozenLake: held-out maps that each recipe solves",
    )
    print((FOLDER / "table.md").read_text() + f"wrote {FOLDER}/table.md, results.json and curves.png")


def outcome(record: Path) -> dict[str, Any]:
    success = read_curve(record, SUCCESS)[:, 1]
    seconds = read_curve(record, "timing_s/step")[:, 1]
    return {"before": success[0], "after": success[-1], "seconds_a_step": round(median(seconds), 3)}


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        f"| {name} | {r['before']:.3f} | {r['after']:.3f} | {r['seconds_a_step']:.2f} |" for name, r in results.items()
    ]
    return "\n".join(["| recipe | success before | after | seconds a step |", "|---|---|---|---|", *rows, ""])


if __name__ == "__main__":
    main()
