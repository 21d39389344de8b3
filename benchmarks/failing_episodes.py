"""Plays 300 steps of eight episodes, of which a quarter raise and one in fifty hangs, and prints what is left of them.

Each environment holds an open file. Open files, threads and memory are to be equal at step 50 and at step 300, with
environments in threads (they hang in Python code, which can be interrupted) and in processes (they sleep, and are
killed).

    python -m benchmarks.failing_episodes [--processes 2] [--steps 300]
"""

import argparse
import gc
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym

from configs.loader import CONFIG_DIR, Arguments, load_config
from configs.schema import Config
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import make_env
from custom.reward_manager import CustomRewardManager
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from data.types import Completion, Request, SamplingParams
from training.environment import ENVIRONMENT, EnvSetup, begin_episodes
from workers.agent_loop import AgentLoop
from workers.agents.user_code import alive, stuck
from workers.rollout import Rollout

EPISODES, FIRST_SEED = 8, 1000  # seeds below are those of the trial, which nothing disturbs


class Failing(gym.Env):
    """Counts to 5; its seed says whether it raises or hangs."""

    observation_space, action_space = gym.spaces.Discrete(9), gym.spaces.Discrete(3)

    def __init__(self, sleeps: bool = False) -> None:
        self.sleeps, self.file = sleeps, Path(__file__).open()  # noqa: SIM115

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict]:
        super().reset(seed=seed)
        self.seed, self.count = seed, 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict]:
        self.count += 1
        if self.count == 3 and self.seed >= FIRST_SEED:
            while self.seed % 50 == 7:
                time.sleep(3600 if self.sleeps else 0)
            if self.seed % 4 == 0:
                raise OSError("the board fell")
        return self.count, 1.0, self.count == 5, False, {}

    def close(self) -> None:
        self.file.close()


gym.register("Failing-v0", Failing)


class Ones(Rollout):
    """Answers 1 to everything."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        ids = [*self.ids, self.pad_token_id]
        return [Completion(request.id, ids[:1], [-1.0], "length", 0) for request in requests]


def figures() -> dict[str, int]:
    """Open files, threads (and those of user code, and stuck ones), and MB of memory of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "of user code": len(alive),
        "stuck": len(stuck),
        "MB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
    }


def build(config: Config) -> AgentLoop:
    tokenizer = build_tokenizer()
    settings = {"processes": config.env.processes, "timeout": config.env.timeout, "sleeps": config.env.processes > 0}
    environment = make_env("benchmarks/failing_episodes.py:Failing-v0", instruction="", **settings)
    dataset = CustomEnvDataset(environment, tokenizer, config.data, size=2)
    engine = Ones(config.actor_rollout_ref.rollout, tokenizer, None)
    engine.ids = tokenizer.encode("1")
    return AgentLoop(config, tokenizer, engine, EnvSetup(environment, dataset, CustomRewardManager(environment)))


def play(loop: AgentLoop, step: int) -> Counter[str]:
    """Plays a step's episodes; how they ended."""
    game = loop.game
    states = [game.environment.start_state(FIRST_SEED + EPISODES * step + place) for place in range(EPISODES)]
    rows = {
        "raw_prompt_ids": [game.dataset.encode_state(state) for state in states],
        "extra_info": [{"state": state} for state in states],
        "uid": [str(state.seed) for state in states],
    }
    prompts = begin_episodes(DataProto.from_single_dict(rows), ENVIRONMENT)
    sampling = SamplingParams(True, 1.0, -1, 1.0, 400)
    return Counter(loop.generate_sequences(prompts, sampling, seed=step, first_row=0).end_reason.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    asked = parser.parse_args()
    lengths = ["data.max_prompt_length=32", "data.max_response_length=400", "env.timeout=2"]
    overrides = ["env.mode=episode", f"env.processes={asked.processes}", *lengths]
    loop = build(load_config(Arguments("frozenlake", CONFIG_DIR, overrides, print_config=False), Config))
    ends: Counter[str] = Counter()
    for step in range(1, asked.steps + 1):
        ends += play(loop, step)
        if step % 50 == 0 or step == asked.steps:
            print(f"step {step:4}: {figures()}  {dict(ends)}", flush=True)
    loop.close()
    print(f"closed:    {figures()}")


if __name__ == "__main__":
    main()
