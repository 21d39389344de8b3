"""The comparison with TRL, as far as it goes without TRL: the floor, our arm, and whether two arms do the same work."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from benchmarks import vs_trl, workload
from benchmarks.figures import ARMS
from benchmarks.floor import Machine, Shape, rollout_floor, seen_by_responses, typical, update_floor
from benchmarks.models import save_model
from benchmarks.ours_arm import OursArm
from benchmarks.workload import Workload

SMALL = {"size": "1m", "prompts": 2, "samples": 3, "prompt_tokens": 8, "response_tokens": 5, "steps": 3, "seed": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vs_trl") / "1m"
    save_model("1m", folder, seed=0)
    return folder


def small(folder: Path = Path(), model: Path = Path(), **changes: object) -> Workload:
    settings = {**SMALL, "ragged": False, "replay": False, "model": str(model), "folder": str(folder), **changes}
    return Workload(**settings)


def test_floors_by_hand() -> None:
    # One layer of width 2, keys 1, inner 3, vocabulary 5: body 2·(2·2 + 2·1 + 3·3) = 30, head 10.
    shape = Shape(layers=1, width=2, key_width=1, inner_width=3, vocabulary=5)
    assert (shape.body, shape.head) == (30, 10)
    # Prompts of 2 and 3 tokens, two responses each: 5 prompt tokens, 3 + 1 + 2 + 2 responded, 4 of them put in.
    lengths = ([2, 3], 2, [3, 1, 2, 2])
    # Keys seen: by the first response's tokens 3 + 4, by the one of a single token none, by the others 4 each.
    assert seen_by_responses(*lengths) == 7 + 0 + 4 + 4
    pairs = (1 + 2) + (1 + 2 + 3) + 15
    forward = 2 * 30 * (5 + 4) + 4 * 2 * pairs
    arithmetic = Machine(flops=1.0, bandwidth=float("inf"))
    assert update_floor(shape, arithmetic, *lengths) == 3 * (forward + 2 * 10 * 8)
    assert rollout_floor(shape, arithmetic, *lengths) == forward + 2 * 10 * (2 + 4)
    memory = Machine(flops=float("inf"), bandwidth=1.0)
    assert update_floor(shape, memory, *lengths) == 7 * 4 * 40
    assert rollout_floor(shape, memory, *lengths) == 4 * (2 * 40 + 2 * 15)  # two decoding steps; keys and values
    assert typical([Machine(1.0, 8.0), Machine(5.0, 6.0), Machine(2.0, 9.0)]) == Machine(2.0, 8.0)


def test_our_arm_steps_and_keeps_its_first_update(model: Path, tmp_path: Path) -> None:
    given = small(tmp_path, model)
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


def test_updates_that_agree_have_cosine_one_and_others_less(tmp_path: Path) -> None:
    before = {"a": torch.zeros(2, 2), "b": torch.ones(3)}
    save_file(before, tmp_path / "model.safetensors")

    def compared(changes_of_trl: list[float], changes_of_ours: list[float]) -> dict:
        for name, changes in (("trl", changes_of_trl), ("ours", changes_of_ours)):
            weights = {"a": torch.tensor(changes[:4]).view(2, 2), "b": 1 + torch.tensor(changes[4:])}
            torch.save({"weights": weights, "gradient": weights, "grad_norm": 0.5}, tmp_path / f"{name}.pt")
        return vs_trl.compare_updates(tmp_path, {name: tmp_path / f"{name}.pt" for name in ARMS})

    change = [0.5, -0.25, 0.0, 1.0, 0.5, 0.5, -1.0]
    assert compared(change, [2 * value for value in change])["delta_cosine"] == pytest.approx(1)
    assert compared(change, change[:6] + [1.0])["delta_cosine"] < 0.5
    assert not list(tmp_path.glob("*.pt"))  # they are large
