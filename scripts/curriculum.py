"""FrozenLake from 2x2 to 5x5, of which only the goal pays: with a curriculum, and with all sizes drawn alike.

    python -m scripts.curriculum [--arms curriculum,uniform] [--seed N] [key=value …]

1. A tiny language model with random weights imitates a wanderer on maps of all sizes, who hardly ever gets through 5x5:
   single moves first, then whole episodes.
2. GRPO in whole episodes (configs/curriculum.yaml), an arm after the other, from that one model.
Writes outputs/curriculum/table.md: each arm's success on 200 held-out maps of 5x5, after equal seconds of training.
An arm that is asked for replaces its earlier result; the other stays.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()  # before torch is loaded


import numpy as np

import main as rl
from configs.errors import late_refusals, refusals
from configs.schema import Config
from custom.env_wrapper import EnvState, TextEnv
from data.files import sole_run
from extras.report.lines import read_curve
from scripts.multiturn import lesson_of
from scripts.quickstart import Lesson, imitate, new_run, safe_moves, script_parser, wanderers_moves
from workers.ray_group import start_command

FOLDER = Path("outputs/curriculum")
SUCCESS = "val-core/examples/lakes.py:FrozenLakes-v0/acc/mean@1"
ARMS = {"curriculum": [], "uniform": ["data.sampler.class_path=null"]}
ROWS = 10  # of the table


def main() -> None:
    parser = script_parser(__doc__, "weights, maps, sampling")
    parser.add_argument("--arms", default=",".join(ARMS), help="names, joined by a comma; both of them")
    arguments = parser.parse_intermixed_args()
    with refusals():
        configs = {name: arm_config(name, arguments.seed, arguments.overrides) for name in arguments.arms.split(",")}
    first = next(iter(configs.values()))
    start_command(first)
    with late_refusals(), sole_run(FOLDER):
        print("a tiny model learns to imitate a wanderer on lakes of all sizes")
        imitate(first, FOLDER, LESSONS)
        for name, config in configs.items():
            print(f"arm: {name}")
            rl.run(config)
        (FOLDER / "table.md").write_text(table({name: curve(FOLDER / name / "metrics.jsonl") for name in ARMS}))
    print((FOLDER / "table.md").read_text() + f"wrote {FOLDER}/table.md")


def arm_config(name: str, seed: int, overrides: list[str]) -> Config:
    """The run of an arm; its model is that of both."""
    folders = [f"trainer.default_local_dir={FOLDER / name}", f"actor_rollout_ref.model.path={FOLDER / 'warm_start'}"]
    return new_run("curriculum", seed, [*ARMS[name], *folders], overrides)


def wanderer(environment: TextEnv, state: EnvState, rng: np.random.Generator) -> int:
    """Any move that neither falls into a hole nor runs into the edge, all alike."""
    return int(rng.choice(safe_moves(state)))


LESSONS = [
    Lesson(wanderers_moves, "frozenlake_sft", ["data.max_length=40", "data.train_batch_size=32", "optim.lr=1e-3"]),
    lesson_of(wanderer, 1200, 4),
]


def curve(record: Path) -> np.ndarray:
    """Seconds of training and success, [validations, 2] float64; validating does not count. [0, 2] without a run."""
    if not record.exists():
        return np.zeros((0, 2))
    steps = read_curve(record, "timing_s/step")
    return np.array([(steps[steps[:, 0] <= step, 1].sum(), success) for step, success in read_curve(record, SUCCESS)])


def table(curves: dict[str, np.ndarray]) -> str:
    """The best success of each arm up to some times, which end where the first of them ends."""
    curves = {name: points for name, points in curves.items() if len(points)}
    times = np.linspace(0, min(points[-1, 0] for points in curves.values()), ROWS + 1)
    rows = [
        " | ".join([f"| {time:.0f}", *(f"{p[p[:, 0] <= time + 1e-6, 1].max():.3f}" for p in curves.values())]) + " |"
        for time in times
    ]
    return "\n".join([f"| seconds | {' | '.join(curves)} |", "|---" * (len(curves) + 1) + "|", *rows, ""])


if __name__ == "__main__":
    main()
