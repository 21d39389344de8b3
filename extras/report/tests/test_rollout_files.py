"""The rollouts that a run keeps: all if asked, some of each kind."""

import json

import pytest

import main
from configs.errors import ConfigError
from extras.report import summary
from extras.report.observer import Report
from extras.report.runs import read_run
from extras.report.tests.records import assert_records_are_the_batch
from tests.runs import compose, short_run
from tests.test_ray_trainer import GRPO, MINI, TOKENIZER, make_trainer
from training.reward_function import FunctionReward


def test_rollouts_are_dumped_as_often_as_asked(tmp_path):
    overrides = [f"trainer.rollout_data_dir={tmp_path}/rollouts", "trainer.rollout_data_freq=2"]
    reward = FunctionReward(lambda solution_str: {"score": 1.0, "shout": solution_str.lower()})
    trainer, _ = make_trainer(tmp_path, *overrides, reward=reward, steps=3)
    trainer.fit()
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == ["2.jsonl", "3.jsonl"]
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "2.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and {row["input"] for row in rows} == set("0123")
    assert all(row["score"] == 1.0 and row["step"] == 2 and row["gts"] is None for row in rows)
    assert all(row["shout"] == row["output"].lower() and row["end_reason"] == "terminated" for row in rows)
    assert all(row["weight_versions"] == [0, 0] for row in rows)
    assert trainer.state()["certificate"] == {"rollout/weight_version": 3}


@pytest.mark.parametrize(
    "overrides",
    [["trainer.rollout_data_dir=/proc/run"], ["trainer.validation_data_dir=Makefile/run", "trainer.val_only=true"]],
)
def test_a_folder_that_cannot_be_written_to_is_refused_by_its_key(overrides):
    with pytest.raises(ConfigError, match=f"^{overrides[0]} cannot be written to"):
        Report.check(compose(*overrides))


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_samples_of_a_run_have_the_numbers_that_it_learnt_from(estimator, tmp_path):
    overrides = [f"algorithm.adv_estimator={estimator}", "trainer.sample_groups=4", MINI]
    overrides.append("actor_rollout_ref.actor.use_kl_loss=true")
    trainer, _ = make_trainer(tmp_path, *overrides, critic=estimator == "gae", ref=True, steps=3)
    (tmp_path / "samples/validation").mkdir(parents=True)
    for name in ("0.jsonl", "notes.jsonl"):
        (tmp_path / "samples/validation" / name).touch()
    trainer.fit()
    files = sorted(path.name for path in (tmp_path / "samples").rglob("*.jsonl"))
    assert files == ["1.jsonl", "2.jsonl", "3.jsonl", "notes.jsonl"]
    for step, batch in enumerate(trainer.train_loader.sampler.seen, start=1):
        lines = (tmp_path / f"samples/train/{step}.jsonl").read_text().splitlines()
        records = sorted(map(json.loads, lines), key=lambda record: record["uid"])
        assert_records_are_the_batch(records, batch, TOKENIZER)
        computed = {"old_log_probs", "ref_log_prob", "advantages"} | ({"values"} if estimator == "gae" else set())
        assert computed <= records[0]["rows"][0].keys() and "loss_mask" not in records[0]["rows"][0]


def test_the_stages_of_a_run_sum_up_to_its_time(tiny_model, tmp_path):
    main.run(compose(*short_run(tiny_model, tmp_path, *GRPO, "trainer.total_training_steps=3")))
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    *stages, other = summary.stages(read_run(tmp_path))["seconds"]
    assert sum(map(sum, [*stages, other])) == pytest.approx(last["data"]["training/seconds"], abs=0.01)
    assert min(other) >= 0, "timers overlap"
