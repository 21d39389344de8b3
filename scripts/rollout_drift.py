"""Compares training on rollouts from the wrong weights, with and without rollout correction.

    python -m scripts.rollout_drift [--seed N] [key=value …]

The task is to count, 1234567, and stop. A response that counts right as far as it goes earns its share of the seven
digits, and one slip loses everything. The policy can count from the start; what it has to learn is to go on. Rollouts
come from weights with fresh noise (scripts/perturbed_rollout.py), which slip now and then. Learning from them as if
they were the policy's own teaches it to stop early, for fear of slips that it would not make.
Weights of each token do not help, as none of the tokens before a slip is to blame for it; weights of the whole
sequence do. Writes outputs/rollout_drift/table.md and curves.png.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()  # before torch is loaded

import shutil

import main as rl
from configs.errors import refusals
from configs.schema import Config
from custom.tiny_model import save_tiny_model
from data.files import dump_jsonl
from data.seeding import derive_seed
from extras.report.lines import plot_curves, read_curve
from extras.sft import trainer as sft_trainer
from extras.sft.settings import SFTConfig
from scripts.quickstart import compose, new_run, script_parser
from workers.ray_group import start_command

FOLDER = Path("outputs/rollout_drift")
COUNT = "1234567"
PROMPT = "count:"
REWARD = "val-core/unknown/reward/mean@128"
ROWS = 7 * 1024  # of the warm start
SUMMARY_STEPS = 5  # validations at the end whose mean and worst are reported

NOISY = "actor_rollout_ref.rollout.name=scripts/perturbed_rollout.py"
RUNS = {
    "exact rollouts": [],
    "perturbed": [NOISY],
    "perturbed, token weights": [NOISY, "algorithm.rollout_correction=decoupled_token_is"],
    "perturbed, sequence weights": [NOISY, "algorithm.rollout_correction=decoupled_seq_is"],
    "perturbed, bypass mode": [NOISY, "algorithm.rollout_correction=bypass_pg_is"],
}


def main() -> None:
    parser = script_parser(__doc__, "weights, noise, sampling")
    arguments = parser.parse_intermixed_args()
    warm_start(arguments.seed)
    with refusals():
        configs = {name: run_config(name, arguments.seed, arguments.overrides) for name in RUNS}
    start_command(configs["exact rollouts"])
    for name, config in configs.items():
        print(name)
        rl.run(config)
    report({name: Path(config.trainer.default_local_dir) / "metrics.jsonl" for name, config in configs.items()})


def compute_score(solution_str: str) -> float:
    """The share of the count, if it is right as far as it goes."""
    return len(solution_str) / len(COUNT) if COUNT.startswith(solution_str) else 0.0


def warm_start(seed: int) -> None:
    """A tiny model that counts to anywhere from 1 to 7."""
    save_tiny_model(FOLDER / "random_model", derive_seed(seed, "tiny_model"))
    rows = [{"prompt": PROMPT, "response": COUNT[: 1 + i % len(COUNT)]} for i in range(ROWS)]
    dump_jsonl(FOLDER / "counts.jsonl", rows)
    overrides = [
        f"data.train_files={FOLDER}/counts.jsonl",
        f"model.path={FOLDER}/random_model",
        f"trainer.default_local_dir={FOLDER}/sft",
        "trainer.resume_mode=disable",
        f"trainer.seed={seed}",
        "trainer.total_epochs=4",
        "data.train_batch_size=32",
        "optim.lr=1e-3",
    ]
    shutil.rmtree(FOLDER / "warm_start", ignore_errors=True)
    shutil.copytree(sft_trainer.run(compose(SFTConfig, "frozenlake_sft", overrides)), FOLDER / "warm_start")
    dump_jsonl(FOLDER / "prompts.jsonl", [{"prompt": PROMPT}] * 8)
    dump_jsonl(FOLDER / "held_out.jsonl", [{"prompt": PROMPT}])


def run_config(name: str, seed: int, overrides: list[str]) -> Config:
    settings = [
        f"data.train_files={FOLDER}/prompts.jsonl",
        f"data.val_files={FOLDER}/held_out.jsonl",
        "data.train_batch_size=8",
        "data.max_prompt_length=8",
        f"data.max_response_length={len(COUNT) + 1}",
        f"actor_rollout_ref.model.path={FOLDER}/warm_start",
        "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.rollout.n=16",
        "actor_rollout_ref.rollout.val_kwargs={do_sample: true, n: 128}",
        "algorithm.adv_estimator=grpo",
        "reward.custom_reward_function.path=scripts/rollout_drift.py",
        "trainer.total_training_steps=60",
        "trainer.total_epochs=100",
        "trainer.test_freq=5",
        "trainer.logger=[]",
        "trainer.log_val_generations=0",
        f"trainer.default_local_dir={FOLDER}/{name.replace(', ', '_').replace(' ', '_')}",
    ]
    return new_run("ppo_trainer", seed, [*settings, *RUNS[name]], overrides)


def report(records: dict[str, Path]) -> None:
    """The mean reward of the true policy over the last validations, and the lowest from the tenth step on."""
    curves = {name: read_curve(record, REWARD) for name, record in records.items()}
    lines = ["| rollouts | reward at the end | lowest after step 10 | tokens a response |", "|---|---|---|---|"]
    for name, curve in curves.items():
        lengths = read_curve(records[name], "response_length/mean")[-SUMMARY_STEPS:, 1]
        late = curve[curve[:, 0] > 10, 1]
        lines.append(f"| {name} | {late[-SUMMARY_STEPS:].mean():.2f} | {late.min():.2f} | {lengths.mean():.1f} |")
    (FOLDER / "table.md").write_text("\n".join([*lines, ""]))
    title = "Learning to count from rollouts of the wrong weights"
    plot_curves(curves, "reward of the true policy", FOLDER / "curves.png", title)
    print((FOLDER / "table.md").read_text() + f"wrote {FOLDER}/table.md and {FOLDER}/curves.png")


if __name__ == "__main__":
    main()
