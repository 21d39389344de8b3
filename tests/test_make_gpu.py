"""`make gpu` as far as it goes without a GPU: it says so; its arithmetic, and our arm on the CPU, also beside TRL."""

import importlib.util
import json
import subprocess

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import gpu, workload
from benchmarks.floor import Shape, update_flops
from benchmarks.models import save_model
from benchmarks.vs_trl import ROOT
from tests.forked import python_command

CPU = ["--device", "cpu", "--size", "1m", "--prompts", "2", "--samples", "2", "--prompt-tokens", "8",
       "--response-tokens", "4", "--steps", "1", "--warmup", "0"]  # fmt: skip


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_it_says_so_and_that_is_no_failure():
    found = subprocess.run(["make", "gpu", f"RUN={python_command()}"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and "torch finds no GPU on this machine" in found.stdout


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Our arm alone, without Ray: no test is run, and neither TRL nor its environment is there."""
    passed = {"run": 3, "failed": [], "seconds": 1.0}
    for name, value in {"FOLDER": tmp_path, "run_tests": lambda _: passed, "has_environment": lambda: False}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "no_ray").mkdir()
    (tmp_path / "no_ray/ray.py").write_text("raise ImportError('not on this machine')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "no_ray"))


def test_our_arm_comes_to_a_table_and_json_and_keeps_its_first_update(alone, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "precision_notice", lambda name, device, parameters: f"T4 has no bfloat16: {name}")
    gpu.main([*CPU, "--json", str(tmp_path / "figures.json")])
    ours = json.loads((tmp_path / "figures.json").read_text())["arms"]["ours"]
    recorded, counted = ours["steps"]
    assert recorded["rollout_tokens"] == 0 < recorded["update_tokens"]  # the recorded batch is not generated
    assert counted["step"] == pytest.approx(counted["rollout"] + counted["update"] + counted["other"])
    assert ours["step_seconds"] == counted["step"] and ours["start_seconds"] > 0 and ours["sync_seconds"] >= 0
    assert ours["step_tokens_per_second"] == pytest.approx((2 * 16 + 16) / ours["step_seconds"])
    assert 0 < ours["update_mfu"] < 1 and ours["peak_gpu_gib"] == 0
    shown = capsys.readouterr().out
    assert shown.startswith("make gpu: T4 has no bfloat16: auto\n") and "matrix product in float32: " in shown
    assert "| ours | " in shown and "failed: none" in shown and "TRL is not installed here" in shown
    [header, ruler, row] = [line for line in shown.splitlines() if line.startswith("|")]
    assert header.count("|") == ruler.count("|") == row.count("|") and row.endswith("| 0.0 | 0 + 0 | 0 |")
    saved = torch.load(tmp_path / "ours.pt")  # what benchmarks.vs_trl compares with TRL's
    before = dict(LlamaForCausalLM.from_pretrained(tmp_path / "models/1m").named_parameters())
    assert saved["weights"].keys() == saved["gradient"].keys() == before.keys()
    moved = max((saved["weights"][name] - before[name]).abs().max().item() for name in before)
    assert moved == pytest.approx(workload.ADAMW["lr"], rel=0.02)  # AdamW's first step is the learning rate
    norm = torch.cat([gradient.flatten() for gradient in saved["gradient"].values()]).norm().item()
    assert norm == pytest.approx(min(saved["grad_norm"], workload.CLIP_NORM), rel=1e-4)


def test_the_figures_by_hand(tmp_path, monkeypatch):
    assert (ROOT / gpu.TESTS).is_file()
    save_model("1m", tmp_path / "models/1m", seed=0)
    monkeypatch.setattr(gpu, "FOLDER", tmp_path)
    of_two_steps = gpu.workload_of(gpu.read_arguments([*CPU, "--steps", "2"]))
    assert of_two_steps.steps == 3 and of_two_steps.device == "cpu"
    steps = [{"step": s, "rollout": s / 2, "update": s / 4, "sync": s / 8, "peak_gpu_gib": s} for s in (4.0, 8.0)]
    flops = update_flops(Shape(4, 128, 128, 344, 512), [8, 8], 2, [4] * 4)
    assert gpu.summary(of_two_steps, 1e9, steps) == {
        "step_seconds": 6.0, "rollout_seconds": 3.0, "update_seconds": 1.5, "sync_seconds": 0.75,
        "step_tokens_per_second": pytest.approx(48 / 6), "rollout_tokens_per_second": pytest.approx(16 / 3),
        "update_mfu": pytest.approx(flops / 1.5 / 1e9), "peak_gpu_gib": 8.0,
    }  # fmt: skip
    assert gpu.summary(of_two_steps, None, steps)["update_mfu"] is None
    assert gpu.trl_micro_batch(of_two_steps, 16384) == 4 and gpu.trl_micro_batch(of_two_steps, 3 * 24) == 2
