"""Environments of the package verifiers, where it is installed: scored by their rubrics, or played by themselves."""

import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest

import main
from configs.errors import ConfigError
from data.protocol import DataProto
from data.rows import read_rows
from extras.verifiers.bridge import rubric
from tests.runs import compose, learning_metrics
from training.reward_function import FunctionReward

TOY = """
import verifiers
from datasets import Dataset

def right(completion, answer):
    return float(completion[-1]["content"] == answer)

def brief(completions) -> list[float]:
    lengths = [len(completion[-1]["content"]) for completion in completions]
    return [float(length == min(lengths)) for length in lengths]

class Twice(verifiers.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "again"}]

def load_environment(count, turns=1):
    rows = Dataset.from_list([{"question": f"{n}+{n}=", "answer": str(2 * n)} for n in range(count)])
    if turns > 1:
        return Twice(max_turns=turns, dataset=rows, rubric=verifiers.Rubric(funcs=[right]))
    rubric = verifiers.Rubric(funcs=[right, brief], weights=[1.0, 0.5])
    return verifiers.SingleTurnEnv(dataset=rows, rubric=rubric, system_prompt="Add.")
"""
FILE = "extras/verifiers/bridge.py"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The env.id of an environment of this name, in its own package."""
    pytest.importorskip("verifiers")
    (tmp_path / "toy_env.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    return "verifiers:toy-env?count=3"


def test_the_id_stands_for_rows_and_a_rubric_or_for_a_program(toy):
    config = compose(f"env.id={toy}", name="ppo_trainer")
    assert config.env.id is None
    assert (config.data.train_files, config.data.val_files) == ([f"{toy}&split=train"], [f"{toy}&split=eval"])
    function = config.reward.custom_reward_function
    assert (function.path, function.name) == (FILE, "rubric")
    config = compose(f"env.id='{toy}&turns=2'", "data.val_files=[datasets:x]", name="ppo_trainer")
    assert config.actor_rollout_ref.rollout.agent.program == f"{FILE}:play" and config.data.val_files == ["datasets:x"]
    with pytest.raises(ConfigError, match=r"env\.id=verifiers:toy-env\?turns=1: .*count"):
        compose("env.id='verifiers:toy-env?turns=1'", name="ppo_trainer")
    with pytest.raises(ConfigError, match=r"arguments are part of the name, env\.id=verifiers:toy-env\?KEY=VALUE"):
        compose("env.kwargs.count=3", f"env.id={toy}", name="ppo_trainer")


def test_a_version_with_other_environments_is_refused_with_what_changed(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))  # as 0.4, whose package has no such names
    with pytest.raises(ConfigError, match=r"before 0\.4, .*a harness plays .*pip install 'verifiers<0\.4' \(cannot"):
        compose("env.id=verifiers:toy-env", name="ppo_trainer")


def test_a_rubric_scores_the_samples_of_a_prompt_together(toy):
    handler = signal.getsignal(signal.SIGINT)
    first, second, _ = [row for _, row in read_rows(toy)]
    assert signal.getsignal(signal.SIGINT) is handler
    assert second["prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    rows = {name: [first[name], first[name], second[name]] for name in ("prompt", "made_by", "input")}
    data = rows | {"raw_prompt": rows.pop("prompt"), "responses": ["0", "00", "12"], "uid": ["a", "a", "b"]}
    results = FunctionReward(rubric)(DataProto.from_single_dict(data))
    assert [result["score"] for result in results] == [1.5, 0.0, 0.5]
    assert [result["right"] for result in results] == [1.0, 0.0, 0.0] and results[2]["brief"] == 1.0


@pytest.mark.parametrize("turns", [1, 2])
def test_a_run_trains_on_its_rows(toy, tiny_model, tmp_path, turns):
    config = compose(
        f"env.id='{toy}&turns={turns}'",
        *(f"actor_rollout_ref.model.path={tiny_model}", f"trainer.default_local_dir={tmp_path / 'run'}"),
        *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "data.train_batch_size=2"),
        *("data.max_prompt_length=64", "data.max_response_length=64", "trainer.total_training_steps=1"),
        *("actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=4", "trainer.n_threads=1", "trainer.logger=[]"),
        name="ppo_trainer",
    )
    main.run(config)
    metrics = learning_metrics(tmp_path / "run")[1]
    assert metrics["critic/score/mean"] >= 0 and ("reward/right/mean" in metrics) == (turns == 1)
