"""The comparison with TRL, as far as it goes without TRL: our arm."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import workload
from benchmarks.models import save_model
from benchmarks.ours_arm import OursArm
from benchmarks.workload import Workload

SMALL = {"size": "1m", "prompts": 2, "samples": 3, "prompt_tokens": 8, "response_tokens": 5, "steps": 3, "seed": 0}


def test_our_arm_steps_and_keeps_its_first_update(tmp_path: Path) -> None:
    save_model("1m", model := tmp_path / "1m", seed=0)
    given = Workload(**SMALL, ragged=False, replay=False, model=str(model), folder=str(tmp_path))
    arm = OursArm(given, [])
    figures = [arm.step(step) for step in range(given.steps)]
    assert figures[0]["rollout_tokens"] == 0 < figures[0]["update_tokens"]  # the recorded batch is not generated
    for step in figures[1:]:
        assert step["rollout"] > 0 and step["update"] > 0 and step["other"] > 0
        assert step["step"] == pytest.approx(step["rollout"] + step["update"] + step["other"])
    saved = torch.load(tmp_path / "ours.pt")
    before = dict(LlamaForCausalLM.from_pretrained(model).named_parameters())
    assert saved["weights"].keys() == saved["gradient"].keys() == before.keys()
    moved = max((saved["weights"][name] - before[name]).abs().max().item() for name in before)
    assert moved == pytest.approx(workload.ADAMW["lr"], rel=0.02)  # AdamW's first step is the learning rate
    norm = torch.cat([gradient.flatten() for gradient in saved["gradient"].values()]).norm().item()
    assert norm == pytest.approx(min(saved["grad_norm"], workload.CLIP_NORM), rel=1e-4)
