"""The quickstart: a model made here learns FrozenLake, from random weights to nearly every held-out map.

    python -m scripts.quickstart [--seed N] [key=value …]

1. A tiny language model with random weights.
2. Warm start: it imitates a careful wanderer, who never steps into a hole but does not know where the goal is.
3. GRPO on random maps (configs/frozenlake.yaml; key=value overrides go there).
Success on 200 held-out maps is measured before and after 3, in whole episodes of the real environment.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()  # before torch is loaded

import argparse
import json
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import main as rl
from configs.checks import check_config
from configs.errors import late_refusals, refusals
from configs.loader import Arguments, load_config, yaml_folder
from configs.schema import Config
from custom.env_wrapper import EnvState, TextEnv
from custom.tiny_model import save_tiny_model
from data.files import dump_jsonl, read_metrics, sole_run
from data.seeding import derive_seed, numpy_generator
from extras.report.__main__ import write_report
from extras.report.charts import plot_metric
from extras.sft import trainer as sft_trainer
from extras.sft.settings import SFTConfig
from training.environment import build_environment
from workers.ray_group import start_command

SUCCESS = "val-core/FrozenLake-v1/acc/mean@1"
DEMONSTRATIONS = 16000


@dataclass(frozen=True)
class Lesson:
    """Demonstrations to imitate, with `sft`, a config of supervised training, and `overrides` of it."""

    rows: Callable[[Config], Iterable[dict[str, Any]]]
    sft: str
    overrides: Sequence[str] = ()


def main() -> None:
    parser = script_parser(__doc__, "weights, maps, sampling")
    parser.add_argument("--config-name", default="frozenlake", help="frozenlake (GRPO) or frozenlake_ppo")
    arguments = parser.parse_intermixed_args()
    with refusals():
        config = rl_config(arguments.config_name, arguments.seed, arguments.overrides)
    start_command(config)
    with late_refusals():
        summary = quickstart(config)
    print_outcome("success on 200 held-out maps", summary, config)


def script_parser(description: str | None, seeded: str) -> argparse.ArgumentParser:
    """Makes the command line of a script that trains; `seeded` lists what the seed decides."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help=f"seed of everything: {seeded}")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser


def new_run(config_name: str, seed: int, presets: Sequence[str], overrides: Sequence[str]) -> Config:
    """Returns the checked config of a new run, with a script's `presets` and over them the user's `overrides`."""
    config = compose(Config, config_name, [f"trainer.seed={seed}", "trainer.resume_mode=disable", *presets, *overrides])
    check_config(config)
    return config


def print_outcome(measure: str, summary: dict[str, Any], config: Config) -> None:
    """Prints the figures of a run, writes its report, and prints the path of that."""
    print(
        f"{measure}: {summary['before']:.3f} before RL, {summary['after']:.3f} after "
        f"({summary['train_seconds']:.0f} s of training)"
    )
    print(f"all about the run, to open in a browser: {write_report([Path(config.trainer.default_local_dir)])}")


def rl_config(config_name: str, seed: int, overrides: list[str]) -> Config:
    name = config_name.replace("frozenlake", "quickstart")
    return new_run(config_name, seed, [f"trainer.experiment_name={name}"], overrides)


def quickstart(config: Config) -> dict[str, Any]:
    """Runs all stages anew; returns the summary, and writes it to summary.json in the run's folder."""
    folder = Path(config.trainer.default_local_dir)
    started = time.monotonic()
    with sole_run(folder):
        print("stage 1 of 2: a tiny model learns to imitate a careful wanderer, who does not know the goal")
        warm_start(config, folder)
        print(f"stage 2 of 2: reinforcement learning ({config.algorithm.adv_estimator}) in {config.env.id}")
        rl.build(config).fit()
    return write_summary(config, SUCCESS, time.monotonic() - started)


def write_summary(config: Config, success: str, seconds: float) -> dict[str, Any]:
    """Writes the metric `success` before and after training to summary.json in the run's folder, and its curve."""
    folder = Path(config.trainer.default_local_dir)
    record = read_metrics(folder / "metrics.jsonl")
    measured = [entry["data"][success] for entry in record if success in entry["data"]]
    outcome = {"before": measured[0], "after": measured[-1]}
    summary = {**outcome, "train_seconds": round(seconds, 1), "seed": config.trainer.seed}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot_metric(folder / "metrics.jsonl", ["critic/score/mean", success], folder / "reward_curve.png")
    print(f"wrote {folder / 'summary.json'} and {folder / 'reward_curve.png'}")
    return summary


def warm_start(config: Config, folder: Path) -> None:
    """Makes the model that RL starts from, where the RL config expects it."""
    imitate(config, folder, [WANDERERS_LESSON])


def imitate(
    config: Config, folder: Path, lessons: Sequence[Lesson], save_model: Callable[..., None] = save_tiny_model
) -> None:
    """Trains a new model on one lesson after another, and saves it where the RL config expects it."""
    seed, target = config.trainer.seed, Path(config.actor_rollout_ref.model.path)
    model = folder / "random_model"
    save_model(model, seed=derive_seed(seed, "tiny_model"))
    for number, lesson in enumerate(lessons, start=1):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(model, target)  # whose tokenizer the rows may need
        rows = folder / f"demonstrations_{number}.jsonl"
        dump_jsonl(rows, lesson.rows(config))
        shutil.rmtree(target)  # a lesson that is cut short leaves no untrained model under the warm start's name
        settings = [
            f"trainer.seed={seed}",
            f"data.train_files={rows}",
            f"model.path={model}",
            f"model.kernels={config.actor_rollout_ref.model.kernels}",
            f"fsdp_config.dtype={config.actor_rollout_ref.actor.fsdp_config.dtype}",
            f"trainer.default_local_dir={folder}/sft_{number}",
            "trainer.resume_mode=disable",
        ]
        model = sft_trainer.run(compose(SFTConfig, lesson.sft, [*settings, *lesson.overrides]))
    shutil.copytree(model, target)


def wanderers_moves(config: Config) -> list[dict[str, Any]]:
    """Makes demonstrations of the careful wanderer in states from all over the maps, for whole episodes, too."""
    environment = build_environment(replace(config, env=replace(config.env, mode="step")))
    return demonstrations(environment, DEMONSTRATIONS, config.trainer.seed)


WANDERERS_LESSON = Lesson(wanderers_moves, "frozenlake_sft")


def demonstrations(environment: TextEnv, count: int, seed: int) -> list[dict[str, Any]]:
    """Makes moves of the careful wanderer: any that avoids holes and the edge, all equally likely."""
    rng = numpy_generator(seed, "demonstrations")
    environment = replace(environment, seed=derive_seed(seed, "demonstrated_states"))
    states = (environment.get_state(i) for i in range(count))
    return [
        {
            "prompt": [{"role": "user", "content": environment.state_to_text(state)}],
            "response": environment.action_to_text(int(rng.choice(safe_moves(state)))),
        }
        for state in states
    ]


def safe_moves(state: EnvState) -> list[int]:
    """Lists FrozenLake's actions (0 left, 1 down, 2 right, 3 up) from the player's cell P onto ice or the goal."""
    rows = state.text.split("\n")
    [(y, x)] = [(y, row.index("P")) for y, row in enumerate(rows) if "P" in row]
    cells = {action: (y + dy, x + dx) for action, (dy, dx) in enumerate([(0, -1), (1, 0), (0, 1), (-1, 0)])}
    inside = {action: (r, c) for action, (r, c) in cells.items() if 0 <= r < len(rows) and 0 <= c < len(rows[0])}
    return [action for action, (r, c) in inside.items() if rows[r][c] != "H"]


def compose(schema: type, name: str, overrides: list[str]) -> Any:
    return load_config(Arguments(name, yaml_folder(schema), overrides, print_config=False), schema)


if __name__ == "__main__":
    main()
