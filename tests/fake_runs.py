"""Writes folders as training leaves them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

WORDS = ["the", " a", " sum", " of", " 3", " and", " 14", " is", ",", ".", "\n", " so", " we", " get", "<|im_end|>"]
ENDS = ("terminated", "max_tokens", "reward_timeout")


def write_run(folder: Path, steps: int = 12, samples: int = 96, tokens: int = 30, seed: int = 0, **extra) -> Path:
    """Writes a run of `steps` steps with `samples` samples of `tokens` tokens, spread over its steps in groups of 8.

    `extra` are settings of trainer. Returns the folder.
    """
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = {"experiment_name": folder.name, "default_local_dir": str(folder), "seed": seed, **extra}
    (folder / "config.yaml").write_text(json.dumps({"trainer": trainer, "algorithm": {"adv_estimator": "grpo"}}))
    (folder / "metrics.jsonl").write_text("".join(metric_lines(rng, steps)))
    (folder / "run.json").write_text(json.dumps({"kind": "ppo", "starts": [start(seed, steps)]}))
    event = {"time": "2026-01-23T22:00:00+00:00", "step": 3, "level": "notice", "logger": "a", "text": "a notice"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    kinds = [(step, "train") for step in range(1, steps + 1)] + [(step, "validation") for step in (0, steps)]
    bodies = [row(rng, tokens) for _ in range(250)]
    for place, (step, kind) in enumerate(kinds):
        path = folder / "samples" / kind / f"{step}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        count = (samples * (place + 1)) // len(kinds) // 8 * 8 - (samples * place) // len(kinds) // 8 * 8
        path.write_text("".join(sample(rng, step, kind, number, bodies) for number in range(count)))
    return folder


def change_samples(folder: Path, change: Callable[[dict], dict | None]) -> None:
    """Lets `change` alter, or replace, every record of a run's samples."""
    for path in (folder / "samples").rglob("*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(change(record) or record) + "\n" for record in records))


def start(seed: int, steps: int) -> dict:
    return {
        "command": ["python", "main.py", "--config-name", "fake"], "commit": "0123abc", "dirty": False,
        "versions": {"python": "3.11.2", "torch": "2.13.0"}, "threads": 1, "seed": seed, "total_steps": steps,
        "machine": {"host": "here", "cpu": "some", "cores": 2, "memory_gb": 8, "gpus": []}, "resumed_from": 0,
        "batch_arithmetic": ["64 prompts × 8 samples = 512 rows a step"], "started": "2026-01-23T21:59:00+00:00",
        "ended": "2026-01-23T22:05:00+00:00", "ending": "done", "reason": None, "step": steps,
    }  # fmt: skip


def metric_lines(rng: np.random.Generator, steps: int) -> list[str]:
    names = {"critic/score/mean": 0.05, "actor/entropy": -0.05, "actor/pg_loss": 0.0, "response_length/mean": 2.0}
    lines = []
    for step in range(steps + 1):
        data = {name: slope * step + 0.1 * rng.normal() for name, slope in names.items()} if step else {}
        data |= {"timing_s/gen": 1.5, "timing_s/update_actor": 0.8, "timing_s/step": 2.5} if step else {}
        data |= {"val-core/task/acc/mean@1": step / (steps + 1)} if step in (0, steps) else {}
        lines.append(json.dumps({"step": step, "data": data | {"training/seconds": 3.0 + 2.6 * step}}) + "\n")
    return lines


def row(rng: np.random.Generator, tokens: int) -> str:
    """Returns the JSON of a row without its braces; advantages and rewards are the sample's."""
    ids = rng.zipf(1.3, tokens) % 30_000
    log_probs = -rng.exponential(0.7, tokens)
    lists = {
        "prompt_ids": [1, 2, 3],
        "token_ids": ids.tolist(),
        "token_texts": [WORDS[id] if id < len(WORDS) else f" w{id}" for id in ids],
        "policy_mask": [1] * tokens,
        "log_probs": log_probs.tolist(),
        "weight_versions": [1] * tokens,
        "turns": [0] * tokens,
        "old_log_probs": (log_probs + rng.normal(0, 0.01, tokens)).round(6).tolist(),
        "entropys": rng.exponential(0.9, tokens).round(6).tolist(),
    }
    return json.dumps(lists)[1:-1]


def sample(rng: np.random.Generator, step: int, kind: str, number: int, bodies: list[str]) -> str:
    body = bodies[rng.integers(len(bodies))]
    tokens = body.count(",", body.index('"turns"'), body.index('"old_log_probs"'))
    group, score = number // 8, float(rng.integers(2))
    prompt = f"What is {group} and {step if kind == 'train' else 7}?\n"
    texts = json.dumps([prompt[:5], prompt[5:10], prompt[10:]])
    rewards = [0.0] * (tokens - 1) + [score]
    about = {
        "step": step, "input": prompt, "output": "the sum", "gts": "21", "score": score,
        "uid": f"{kind}-{step}-{group}", "data_source": "task", "extra_info": {"index": group},
        "end_reason": ENDS[rng.integers(3)], "answer": "21", "explanation": f"expected 21, found {number}",
        "reward_extra_keys": ["answer", "explanation"],
    }  # fmt: skip
    numbers = f'"prompt_texts": {texts}, "rewards": {rewards}, "advantages": {[round(score - 0.5, 6)] * tokens}'
    return f'{json.dumps(about)[:-1]}, "rows": [{{{body}, {numbers}}}]}}\n'
