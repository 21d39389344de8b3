"""Pools apart and generation beside the update train as one pool does, and as their unbroken run, to the bit."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import main
from configs.errors import ConfigError
from data.protocol import DataProto
from extras.overlap.one_step_off import Staleness, is_plain
from tests.runs import compose, learning_metrics, needs_vllm, short_run, state_files
from training.ray_trainer import RayPPOTrainer, Rollouts

ROLLOUT = "actor_rollout_ref.rollout"
APART = (f"{ROLLOUT}.nnodes=1", "trainer.n_threads=1")
AHEAD = (*APART, "trainer.async_mode=one_step_off", "algorithm.rollout_correction.rollout_is=token")
STEPS = 8


def trained(folder: Path, model: Path, *settings: str) -> dict[int, dict[str, float]]:
    steps = [f"trainer.{name}={STEPS}" for name in ("total_training_steps", "save_freq")]
    main.run(compose(*short_run(model, folder, *steps, *settings)))
    return learning_metrics(folder)


def assert_same_weights(one: Path, other: Path, step: int = STEPS) -> None:
    weights = state_files(one, step)
    assert any(name.endswith(".safetensors") for name in weights) and weights == state_files(other, step)


def test_a_pool_of_its_own_generates_as_the_trainers_does(cluster, tiny_model, tmp_path):
    together = trained(tmp_path / "together", tiny_model, "trainer.executor=ray", "trainer.n_threads=1")
    apart = trained(tmp_path / "apart", tiny_model, *APART)
    assert apart == together and [*apart] == [*range(STEPS + 1)]
    assert_same_weights(tmp_path / "together", tmp_path / "apart")


VLLM = f"{ROLLOUT}.name=vllm"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lora", pytest.param("vllm", marks=needs_vllm)])
def test_a_pool_of_its_own_takes_adapters_and_has_vllm_sample_by_what_came(cluster, wide_headed_model, tmp_path, name):
    settings = ["trainer.n_threads=1", *{"lora": ["actor_rollout_ref.model.lora_rank=2"], "vllm": [VLLM]}[name]]
    settings.append("actor_rollout_ref.actor.optim.lr=1e-2")
    together = trained(tmp_path / "together", wide_headed_model, "trainer.executor=ray", *settings)
    apart = trained(tmp_path / "apart", wide_headed_model, *APART, *settings)
    assert apart == together
    assert_same_weights(tmp_path / "together", tmp_path / "apart")


ALGORITHMS = {
    "bypass": ["algorithm.rollout_correction.bypass_mode=true"],
    "critic and reference": ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"],
    "refills": ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3"],
    "resampling": ["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true"],
    "process rewards": ["recipe=prime", "algorithm.filter_groups.enable=false"],
    "reward model": ["reward_model.enable=true", "reward.reward_model.function_weight=1"],
    "curriculum": ["data.sampler={class_path: extras/curriculum/curriculum.py, class_name: SuccessRateSampler}"],
    "episodes": ["env.mode=episode", "data.max_response_length=40", "data.max_prompt_length=300"],
}
BREAKS = [(4,), pytest.param((1, 3, 6, 7), marks=pytest.mark.slow)]  # steps after which a run is resumed


@pytest.mark.parametrize("breaks", BREAKS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_off_a_run_goes_on_as_if_unbroken(cluster, tiny_model, reward_model, tmp_path, algorithm, breaks):
    settings = [*ALGORITHMS[algorithm], f"reward_model.model.path={reward_model}"]
    assert_goes_on_as_if_unbroken(tmp_path, tiny_model, breaks, *settings)


class TakingTurns(RayPPOTrainer):
    """Draws the next step's batch before it learns from this one's: one_step_off, without anything beside another."""

    next: Rollouts | None = None

    def collect(self, step: int, timing: dict[str, float]) -> Rollouts:
        now = self.next or super().collect(step, timing)
        self.next = super().collect(step + 1, timing) if step < self.total_steps else None
        return now


@pytest.mark.parametrize("algorithm", ["critic and reference", "refills", "process rewards", "curriculum", "episodes"])
def test_a_step_off_on_ray_is_a_trainer_that_takes_turns_in_one_process(cluster, tiny_model, tmp_path, algorithm):
    settings = [*ALGORITHMS[algorithm], "trainer.n_threads=1"]
    beside = trained(tmp_path / "beside", tiny_model, *AHEAD, *settings)
    turns = ["trainer.executor=local", f"trainer.cls={__file__}:TakingTurns", AHEAD[-1]]
    in_turn = trained(tmp_path / "in_turn", tiny_model, *settings, *turns)
    assert without_versions(in_turn) == without_versions(beside)
    ends = [state_files(tmp_path / name, STEPS) for name in ("beside", "in_turn")]
    model_files = [name for name in ends[0] if "extra_state" not in name]  # of this process's global generators
    assert len(model_files) >= 4 and all(ends[0][name] == ends[1][name] for name in model_files)


def without_versions(steps: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """The metrics but those of the hand-over, which is a step later where something runs beside it."""
    late = ("staleness/", "rollout/")
    kept = {step: [name for name in metrics if not name.startswith(late)] for step, metrics in steps.items()}
    return {step: {name: steps[step][name] for name in kept[step]} for step in steps}


@pytest.mark.slow
@needs_vllm
def test_so_does_one_whose_engine_is_vllm(cluster, wide_headed_model, tmp_path):
    assert_goes_on_as_if_unbroken(tmp_path, wide_headed_model, [1, 4, 7], VLLM)


def assert_goes_on_as_if_unbroken(folder: Path, model: Path, breaks: Sequence[int], *more: str) -> None:
    settings = [*AHEAD, *more, "trainer.save_freq=1"]
    unbroken = trained(folder / "unbroken", model, *settings)
    assert [unbroken[step]["staleness/max"] for step in range(1, STEPS + 1)] == [0] + [1] * (STEPS - 1)
    for step in breaks:
        start = f"trainer.resume_from_path={folder}/unbroken/global_step_{step}"
        resumed = trained(folder / f"from_{step}", model, *settings, "trainer.resume_mode=resume_path", start)
        assert resumed == {number: unbroken[number] for number in range(step, STEPS + 1)}
        assert_same_weights(folder / "unbroken", folder / f"from_{step}")


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


def test_a_batch_of_failed_rows_has_no_staleness():
    tensors = {
        "weight_versions": torch.tensor([[3, 1, 9], [2, 0, 0]]),
        "response_mask": torch.tensor([[1, 1, 0], [0, 0, 0]]),
    }
    stage = Staleness(SimpleNamespace(learnt=4, config=None))
    assert stage(DataProto.from_dict(tensors), {}) == {"staleness/mean": 2.0, "staleness/max": 3.0}
    assert stage(DataProto.from_dict(tensors | {"response_mask": torch.zeros(2, 3)}), {}) == {}


def test_what_a_checkpoint_may_hold():
    assert is_plain({"a": [1, 2.0, ("b", None)]}) and not is_plain({"state": [object()]})
