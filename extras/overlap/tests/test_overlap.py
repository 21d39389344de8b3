"""Pools apart and generation beside the update train as one pool does, and as their unbroken run, to the bit."""

from pathlib import Path

import pytest

import main
from configs.errors import ConfigError
from extras.overlap.one_step_off import is_plain
from tests.runs import compose, learning_metrics, short_run, state_files

ROLLOUT = "actor_rollout_ref.rollout"
APART = (f"{ROLLOUT}.nnodes=1", "trainer.n_threads=1")
AHEAD = (*APART, "trainer.async_mode=one_step_off", "algorithm.rollout_correction.rollout_is=token")


def trained(folder: Path, model: Path, *settings: str) -> dict[int, dict[str, float]]:
    main.run(compose(*short_run(model, folder, "trainer.save_freq=4", *settings)))
    return learning_metrics(folder)


def assert_same_weights(one: Path, other: Path, step: int = 4) -> None:
    weights = state_files(one, step)
    assert any(name.endswith(".safetensors") for name in weights) and weights == state_files(other, step)


def test_a_pool_of_its_own_generates_as_the_trainers_does(cluster, tiny_model, tmp_path):
    together = trained(tmp_path / "together", tiny_model, "trainer.executor=ray", "trainer.n_threads=1")
    apart = trained(tmp_path / "apart", tiny_model, *APART)
    assert apart == together and [*apart] == [0, 1, 2, 3, 4]
    assert_same_weights(tmp_path / "together", tmp_path / "apart")


ALGORITHMS = {
    "bypass": ["algorithm.rollout_correction.bypass_mode=true"],
    "critic and reference": ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"],
    "refills": ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3"],
    "episodes": ["env.mode=episode", f"{ROLLOUT}.response_length=40", "data.max_prompt_length=300"],
}


@pytest.mark.parametrize("algorithm", [*ALGORITHMS])
def test_a_run_that_is_a_step_off_goes_on_as_if_unbroken(cluster, tiny_model, tmp_path, algorithm):
    settings = [*AHEAD, *ALGORITHMS[algorithm], "trainer.save_freq=1"]
    unbroken = trained(tmp_path / "unbroken", tiny_model, *settings)
    assert [unbroken[step]["staleness/max"] for step in (1, 2, 3, 4)] == [0, 1, 1, 1]
    for step in (1, 2, 3):
        start = f"trainer.resume_from_path={tmp_path}/unbroken/global_step_{step}"
        resumed = trained(tmp_path / f"from_{step}", tiny_model, *settings, "trainer.resume_mode=resume_path", start)
        assert resumed == {number: unbroken[number] for number in range(step, 5)}
        assert_same_weights(tmp_path / "unbroken", tmp_path / f"from_{step}")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.async_mode=one_step_off"], "actor_rollout_ref.rollout.nnodes=1"),
        ([*APART, "trainer.async_mode=one_step_off"], "rollout_correction.rollout_is=token"),
        ([f"{ROLLOUT}.nnodes=1", "trainer.executor=local"], "trainer.executor=local"),
        ([f"{ROLLOUT}.pool_roles=[actor]"], "pool_roles"),
    ],
)
def test_what_cannot_overlap_is_refused_in_a_line(settings, message):
    with pytest.raises(ConfigError, match=message):
        compose(*settings)


def test_what_a_checkpoint_may_hold():
    assert is_plain({"a": [1, 2.0, ("b", None)]}) and not is_plain({"state": [object()]})
