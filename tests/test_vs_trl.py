"""The comparison with TRL, as far as it goes without TRL: what both arms are given, the floor, the figures, our arm."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from benchmarks import vs_trl, workload
from benchmarks.figures import ARMS, summary, table
from benchmarks.floor import Machine, Shape, rollout_floor, seen_by_responses, typical, update_floor
from benchmarks.models import save_model
from benchmarks.ours_arm import OursArm
from benchmarks.workload import PAD, VOCABULARY, Meter, Workload, score
from configs.paths import ROOT
from tests.shapes import COUNTED

SMALL = {"size": "1m", "prompts": 2, "samples": 3, "prompt_tokens": 8, "response_tokens": 5, "steps": 3, "seed": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vs_trl") / "1m"
    save_model("1m", folder, seed=0)
    return folder


def small(folder: Path = Path(), model: Path = Path(), **changes: object) -> Workload:
    settings = {**SMALL, "ragged": False, "replay": False, "model": str(model), "folder": str(folder), **changes}
    return Workload(**settings)


def test_both_arms_read_the_same_prompts_and_every_step_has_its_own_but_in_a_replay() -> None:
    one, two = small(), small()
    assert one.texts() == two.texts() and one.recorded() == two.recorded()
    assert one.prompt_ids(1) != one.prompt_ids(2) and one.prompt_ids(1) != small(seed=1).prompt_ids(1)
    assert [len(ids) for ids in one.prompt_ids(1)] == [8, 8]
    assert one.texts()[2:4] == [" ".join(map(str, ids)) for ids in one.prompt_ids(1)]
    replay = small(replay=True)
    assert replay.prompt_ids(2) == replay.prompt_ids(0) == small().prompt_ids(0)
    assert [replay.is_recorded(step) for step in range(3)] == [True] * 3
    assert [small().is_recorded(step) for step in range(3)] == [True, False, False]


def test_lengths_vary_where_they_should_and_ids_are_the_models() -> None:
    ragged = small(ragged=True, prompts=200, response_tokens=16)
    prompts = [len(ids) for ids in ragged.prompt_ids(0)]
    responses = [len(ids) for ids in ragged.recorded()]
    assert (min(prompts), max(prompts)) == (4, 12)
    assert (min(responses), max(responses), len(responses)) == (4, 16, 600)
    ids = {number for response in ragged.recorded() for number in response}
    assert PAD not in ids and max(ids) < VOCABULARY["1m"]


def test_the_reward_is_read_off_the_tokens_and_tells_the_samples_of_a_prompt_apart() -> None:
    assert score("1 2") == 40503 % 1009 + 2 * 40503 % 1009
    assert score("") == 0.0
    recorded = small().recorded()
    assert len({score(" ".join(map(str, ids))) for ids in recorded[:3]}) == 3


def test_numbers_are_their_own_ids_and_no_response_can_end_early(model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = [17, 4, 233, VOCABULARY["1m"] - 1]
    assert tokenizer("17 4 233 511")["input_ids"] == ids
    assert tokenizer.decode([PAD, *ids], skip_special_tokens=True) == "17 4 233 511"
    assert tokenizer.eos_token_id == VOCABULARY["1m"] == LlamaForCausalLM.from_pretrained(model).config.vocab_size


def test_shape_counts_the_weights_that_the_model_has() -> None:
    config = LlamaConfig(**COUNTED)
    matrices = sum(weight.numel() for weight in LlamaForCausalLM(config).parameters() if weight.ndim == 2)
    shape = Shape.of(config)
    assert shape.body + shape.head == matrices
    assert (shape.head, shape.key_width) == (96 * 32, 16)


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


def test_keys_seen_as_counted_one_by_one() -> None:
    prompts, samples, responses = [1, 7, 4], 2, [5, 2, 1, 9, 3, 3]
    counted = 0
    for row, length in enumerate(responses):
        for position in range(length - 1):
            counted += prompts[row // samples] + position + 1
    assert seen_by_responses(prompts, samples, responses) == counted


def test_the_meter_tells_rollout_from_update_by_whether_gradients_are_kept(model: Path) -> None:
    module = LlamaForCausalLM.from_pretrained(model)
    meter = Meter(module)
    meter.start()
    module(torch.ones(2, 3, dtype=torch.long))
    with torch.no_grad():
        module(torch.ones(4, 5, dtype=torch.long))
    figures = meter.stop(rollout=0.0, update=0.0)
    assert (figures["update_tokens"], figures["rollout_tokens"]) == (6, 20)
    assert figures["other"] == figures["step"] > 0


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


def test_every_group_of_our_arm_teaches_by_responses_as_long_as_asked(model: Path, tmp_path: Path) -> None:
    arm = OursArm(small(tmp_path, model), [])
    arm.trainer.global_step = 1
    batch, _ = arm.trainer.step()
    assert batch.batch["response_mask"].sum(1).tolist() == [5] * 6
    assert (batch.batch["advantages"][:, 0].view(2, 3).std(1) > 0.99).all()


def test_an_engine_with_weights_of_its_own_sleeps_in_the_recorded_step_and_then_has_new_ones(model, tmp_path) -> None:
    given = small(tmp_path, model, steps=2)
    arm = OursArm(given, ["actor_rollout_ref.rollout.name=tests/engines.py:Copying"])
    for step in range(given.steps):
        arm.step(step)
    assert arm.group.worker.roles["rollout"].engine.told == [0, "sleep", 1, "sleep", 2]


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


@pytest.mark.parametrize(
    ("cosine", "ours", "complaint"),
    [(0.99991, 2.0, None), (0.9998, 2.0, "0.999800"), (float("nan"), 2.0, "nan"), (1.0, 2.01, "2.01")],
)
def test_arms_that_do_other_work_are_found_out(cosine: float, ours: float, complaint: str | None) -> None:
    found = vs_trl.difference_of({"delta_cosine": cosine, "gradient_norm": {"trl": 2.0, "ours": ours}})
    assert found is None if complaint is None else complaint in found


def steps_of(arm: str, seconds: list[float]) -> dict:
    other = {"cpu_seconds": 1.0, "rollout_tokens": 10, "update_tokens": 20, "peak_rss_gb": 0.5}
    steps = [{"step": s, "rollout": s / 4, "update": s / 2, "other": s / 4, **other} for s in seconds]
    return {"arm": arm, "load_before": 0.5, "steps": steps}


def test_figures_are_medians_and_carry_the_promised_names() -> None:
    seconds = [("trl", [8.0, 12.0]), ("ours", [2.0, 2.0]), ("trl", [90.0]), ("ours", [9.0])]
    blocks = [steps_of(*block) for block in seconds]
    figures = summary(blocks, {"step": 1.0, "rollout": 0.4, "update": 0.6})
    assert figures["ratio_step"] == figures["ratio_update"] == figures["ratio_rollout"] == 12 / 2
    assert figures["ours_percent_of_floor"] == figures["percent_of_floor"]["ours"]["update"] == pytest.approx(60)
    assert figures["percent_of_floor"]["trl"]["step"] == pytest.approx(100 / 12)
    low, high = figures["ratio_step_interval"]
    assert 8 / 9 <= low <= 6 <= high <= 45
    agreement = {"delta_cosine": 1.0, "gradient_cosine": 1.0, "gradient_norm": {"trl": 1.0, "ours": 1.0}}
    machine = {"gflops": 100.0, "gflops_by_turn": [90.0, 110.0], "gb_per_second": 20.0, "threads": 2}
    shown = table({**figures, **agreement, "machine": machine, "trl": {"micro_batch": 8}, "blocks": blocks})
    assert "12.000" in shown and "6.00" in shown and "(median; 90 to 110)" in shown
    json.dumps(figures)
    replay = summary([steps_of("trl", [8.0]), steps_of("ours", [2.0])], {"update": 0.5})
    assert (replay["ratio_update"], replay["ratio_rollout"], replay["ratio_step"]) == (4, None, None)


def test_defaults_follow_the_size_and_what_cannot_work_is_refused(capsys: pytest.CaptureFixture) -> None:
    large = vs_trl.read_arguments(["--size", "135m", "--steps", "7"])
    assert (large.prompts, large.prompt_tokens, large.steps, large.block) == (4, 64, 7, 1)
    assert vs_trl.read_arguments([]).prompts == 16
    for refused in (["--samples", "1"], ["--prompts", "0"], ["--trl-micro-batch", "7"]):
        with pytest.raises(SystemExit):
            vs_trl.read_arguments(refused)
        assert refused[0] in capsys.readouterr().err


def test_trls_arm_imports_nothing_of_ours_but_the_workload() -> None:
    """TRL's environment has torch, transformers and TRL, and none of our other requirements."""
    absent = ("configs", "data", "training", "workers", "custom", "extras", "scripts", "main", "omegaconf", "hydra")
    program = (
        "import sys, types\n"
        "trl, datasets = types.ModuleType('trl'), types.ModuleType('datasets')\n"
        "trl.GRPOConfig = trl.GRPOTrainer = datasets.Dataset = object\n"
        "sys.modules |= {'trl': trl, 'datasets': datasets}\n"
        f"sys.modules |= dict.fromkeys({absent})\n"  # importing one of these now raises ModuleNotFoundError
        "import benchmarks.trl_arm"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_model_of_a_comparison_is_made_with_our_own_requirements(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(vs_trl, "FOLDER", tmp_path)
    assert Path(vs_trl.workload_of(vs_trl.read_arguments(["--size", "1m"])).model).is_dir()
