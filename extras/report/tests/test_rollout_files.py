"""The rollouts that a run keeps: all if asked, some of each kind."""

import json
from pathlib import Path

import pytest

from configs.errors import ConfigError
from extras.report.observer import Report
from extras.report.tests.records import assert_records_are_the_batch
from tests.runs import compose
from tests.test_ray_trainer import MINI, TOKENIZER, make_trainer
from training.reward_function import FunctionReward


@pytest.mark.parametrize(
    "overrides",
    [["trainer.rollout_data_dir=/proc/run"], ["trainer.validation_data_dir=Makefile/run", "trainer.val_only=true"]],
)
def test_a_folder_that_cannot_be_written_to_is_refused_by_its_key(overrides):
    with pytest.raises(ConfigError, match=f"^{overrides[0]} cannot be written to"):
        Report.check(compose(*overrides))


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_samples_and_dumps_of_a_run_have_the_numbers_that_it_learnt_from(estimator, tmp_path):
    overrides = [f"algorithm.adv_estimator={estimator}", "trainer.sample_groups=4", MINI]
    overrides += [f"trainer.rollout_data_dir={tmp_path}/rollouts", "trainer.rollout_data_freq=2"]
    overrides.append("actor_rollout_ref.actor.use_kl_loss=true")
    reward = FunctionReward(lambda solution_str: {"score": float(solution_str == "L"), "shout": solution_str.lower()})
    trainer, _ = make_trainer(tmp_path, *overrides, reward=reward, critic=estimator == "gae", ref=True, steps=3)
    (tmp_path / "samples/validation").mkdir(parents=True)
    for name in ("0.jsonl", "notes.jsonl"):
        (tmp_path / "samples/validation" / name).touch()
    trainer.fit()
    files = sorted(path.name for path in (tmp_path / "samples").rglob("*.jsonl"))
    assert files == ["1.jsonl", "2.jsonl", "3.jsonl", "notes.jsonl"]
    for step, batch in enumerate(trainer.train_loader.sampler.seen, start=1):
        records = sorted(records_of(tmp_path / f"samples/train/{step}.jsonl"), key=lambda record: record["uid"])
        assert_records_are_the_batch(records, batch, TOKENIZER)
        computed = {"old_log_probs", "ref_log_prob", "advantages"} | ({"values"} if estimator == "gae" else set())
        assert computed <= records[0]["rows"][0].keys() and "loss_mask" not in records[0]["rows"][0]
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["2.jsonl", "3.jsonl"]
    rows = records_of(tmp_path / "rollouts/2.jsonl")
    assert len(rows) == 16 and {row["input"] for row in rows} == set("0123")
    assert all(row["score"] == (row["output"] == "L") and row["step"] == 2 and row["gts"] is None for row in rows)
    assert all(row["shout"] == row["output"].lower() and row["end_reason"] == "terminated" for row in rows)
    assert trainer.state()["certificate"] == {"rollout/weight_version": 3}


def records_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
