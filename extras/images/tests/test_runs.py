"""Whole runs of a model that reads images: states and episodes of an environment, resumed, and supervised."""

import base64
import json
from pathlib import Path

import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

import main
from extras.images.tests.conftest import picture, row
from extras.images.tests.test_rows import png
from tests.forked import python
from tests.runs import compose, learning_metrics, run_main, short_run

WEIGHTS = "actor/huggingface/model.safetensors"


def run(*overrides: str) -> None:
    done = run_main(*overrides, name="frozenlake_pixels")
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_resumed_run_equals_an_unbroken_one_and_its_model_is_one(folders, tmp_path: Path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    saves = "trainer.save_freq=2", "algorithm.norm_adv_by_std_in_grpo=false"
    run(*short_run(folders["qwen2_vl"], whole, *saves))
    run(*short_run(folders["qwen2_vl"], resumed, *saves, "trainer.total_training_steps=2"))
    run(*short_run(folders["qwen2_vl"], resumed, *saves))
    first, second = learning_metrics(whole), learning_metrics(resumed)
    assert first[4] == second[4] and first[4]["rollout_mismatch/max_ratio"] < 1 + 1e-5
    weights = [load_file(folder / "global_step_4" / WEIGHTS) for folder in (whole, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert weights[0].keys() == load_file(folders["qwen2_vl"] / "model.safetensors").keys()
    assert (whole / "global_step_4/actor/huggingface/preprocessor_config.json").is_file()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "idefics3"])
def test_episodes_show_a_picture_a_turn(folders, tmp_path: Path, family: str):
    settings = short_run(folders[family], tmp_path, "env.mode=episode", "env.history=turns")
    run(*settings, "trainer.total_training_steps=1", "trainer.rollout_data_dir=" + str(tmp_path / "rollouts"))
    samples = [json.loads(line) for line in (tmp_path / "rollouts/1.jsonl").read_text().splitlines()]
    rows = [each for sample in samples for each in sample["rows"]]
    assert len(rows) > len(samples) == 8 and all(len(each["pictures"]) == 1 for each in rows)


def test_a_picture_in_a_transcript_is_refused(folders, tmp_path: Path):
    settings = short_run(folders["idefics3"], tmp_path, "env.mode=episode", "env.history=transcript")
    with pytest.raises(ValueError, match=r"set env\.history=turns"):
        main.build(compose(*settings, name="frozenlake_pixels"))


def test_supervised_training_reads_images(folders, tmp_path: Path):
    rows = [
        row("<image>?", {"bytes": base64.b64encode(png(picture(i))).decode()}) | {"response": "abcd"[i]}
        for i in range(4)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows * 8))
    settings = [f"data.train_files={tmp_path}/rows.jsonl", "data.train_batch_size=16", "trainer.total_epochs=20"]
    settings += [f"model.path={folders['qwen2_vl']}", f"trainer.default_local_dir={tmp_path}/run", "optim.lr=3e-3"]
    done = python("-m", "extras.sft", *settings, "data.max_length=64", "trainer.logger=[]")
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [each["train/loss"] for each in learning_metrics(tmp_path / "run").values() if "train/loss" in each]
    assert losses[-1] < 0.3 < losses[0], "without the images the loss of four answers is 0.7 at best"


def test_rows_of_geometry3k_are_scored_by_its_rule(folders, tmp_path: Path):
    """Rows in verl's form are read and scored with no setting of images or rewards."""
    labels = {"data_source": "hiyouga/geometry3k", "reward_model": {"style": "rule", "ground_truth": "3"}}
    rows = [
        {"prompt": row("<image>Find x. You FIRST think about the reasoning process")["prompt"], **labels}
        | {"images": [{"bytes": png(picture(seed, 32, 24)), "path": None}]}
        for seed in range(4)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    settings = [f"data.train_files={tmp_path}/train.parquet", f"actor_rollout_ref.model.path={folders['merged']}"]
    settings += ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "data.max_response_length=4"]
    settings += ["data.train_batch_size=4", "trainer.total_training_steps=1", "data.max_prompt_length=128"]
    done = python("main.py", *settings, f"trainer.default_local_dir={tmp_path}/run", "trainer.logger=[]")
    assert done.returncode == 0, done.stderr[-3000:]
    [metrics] = [each for step, each in learning_metrics(tmp_path / "run").items() if step == 1]
    assert metrics["critic/score/mean"] == 0.0 and metrics["rollout_mismatch/max_ratio"] < 1 + 1e-5
