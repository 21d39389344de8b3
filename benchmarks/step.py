"""Times the phases of a GRPO step: python -m benchmarks.step [--steps K] [--answers R] [--json FILE] [key=value …]

The quickstart's model size, batch and environment (configs/frozenlake.yaml), from random weights, in a temporary
folder. Prints the median seconds of each phase over K steps; a first step, which warms up, is not counted. Phases that
a step does not need are not there: old_log_prob comes with actor_rollout_ref.actor.ppo_mini_batch_size=32.

--answers R: as many prompts, samples and tokens of a prompt as in `make reasoning` instead, of random tokens, for a
Llama of 1 M; no answer ends before R tokens.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

import main as rl
from benchmarks.models import save_model
from benchmarks.ours_arm import config_of
from benchmarks.workload import Workload
from configs.checks import check_config
from configs.loader import CONFIG_DIR, Arguments, load_config
from configs.schema import Config
from custom.tiny_model import save_tiny_model
from data.files import read_metrics
from workers.ray_group import start_command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps that are counted")
    parser.add_argument("--answers", type=int, metavar="R", help="tokens of each answer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_args()
    figures = measure(arguments.steps, arguments.overrides, arguments.answers)
    total = figures["seconds"]["step"]
    for phase, seconds in figures["seconds"].items():
        print(f"{phase:<16}{seconds:8.3f} s {seconds / total:6.1%}")
    print(f"{figures['tokens']:.0f} tokens a step, {figures['tokens_per_second']:.0f} tokens a second")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(steps: int, overrides: list[str], answers: int | None = None) -> dict:
    """Median seconds of each phase, tokens a step (prompts and responses) and tokens a second."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={steps + 1}", *overrides]
        config = with_answers(answers, steps, folder, settings) if answers else quickstart(folder, settings)
        start_command(config)
        rl.run(config)
        counted = [entry["data"] for entry in read_metrics(f"{folder}/metrics.jsonl")][1:]
    names = [name for name in counted[0] if name.startswith("timing_s/")]
    seconds = {name.removeprefix("timing_s/"): median(step[name] for step in counted) for name in names}
    tokens = median(step["perf/total_num_tokens"] for step in counted)
    return {"seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds["step"], "steps": steps}


def quickstart(folder: str, settings: list[str]) -> Config:
    defaults = [f"actor_rollout_ref.model.path={folder}/model", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    defaults += ["trainer.val_before_train=false", "trainer.logger=[]"]
    config = load_config(Arguments("frozenlake", CONFIG_DIR, defaults + settings, print_config=False), Config)
    check_config(config)
    save_tiny_model(f"{folder}/model", config.trainer.seed)
    return config


def with_answers(tokens: int, steps: int, folder: str, settings: list[str]) -> Config:
    save_model("1m", Path(folder, "model"), seed=0)
    sizes = {"size": "1m", "prompts": 8, "samples": 16, "prompt_tokens": 104, "response_tokens": tokens}
    workload = Workload(
        **sizes, steps=steps + 1, seed=0, ragged=False, replay=False, model=f"{folder}/model", folder=folder
    )
    return config_of(workload, settings)


if __name__ == "__main__":
    main()
