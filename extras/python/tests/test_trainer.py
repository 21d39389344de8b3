"""Training from Python: the runs are those of main.py, the caller's objects are used, and its process is as before."""

import asyncio
import inspect
import json
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pandas as pd
import pytest
import torch
from gymnasium import spaces
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from configs.errors import ConfigError
from configs.extras import has
from extras.python.objects import as_override, write_rows
from tests.runs import learning_metrics, needs_vllm, run_main, state_files
from training.api import GRPOTrainer, PPOTrainer, Trainer, TrainingConfig

ROWS = [
    {"prompt": f"{a}+{b}=", "data_source": "sums", "reward_model": {"ground_truth": str(a + b)}}
    for a in range(3)
    for b in range(2)
]
STEP = {  # 3 prompts × 2 samples
    **{"data.train_batch_size": 3, "data.max_prompt_length": 16, "data.max_response_length": 4},
    **{"actor_rollout_ref.rollout.n": 2, "actor_rollout_ref.actor.optim.lr": 1e-3, "trainer.logger": []},
}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return len(set(solution_str)) / 8 + (ground_truth in solution_str)


@pytest.fixture
def model(tiny_model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(tiny_model).train()


@pytest.fixture
def made(model: PreTrainedModel, tiny_model: Path, tmp_path: Path) -> Callable[..., Trainer]:
    """made(reward, rows, …) is a GRPOTrainer of `model` in a folder of its own."""

    def make(reward: Any = None, rows: Any = ROWS, settings: dict | None = None, kind: type = GRPOTrainer, **more: Any):
        settings = {**STEP, "trainer.default_local_dir": str(tmp_path / "run"), **(settings or {})}
        return kind(model, reward, rows, tokenizer=str(tiny_model), settings=settings, **more)

    return make


def state_of_process(model: PreTrainedModel) -> dict[str, Any]:
    """Returns what a cell of a notebook must find again after training."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    return {
        "generators": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),
        "handlers": [signal.getsignal(number) for number in signals],
        "model": (model.training, model.config._attn_implementation, model.dtype, [*map(type, model.modules())]),
        "surroundings": (torch.get_num_threads(), dict(os.environ), os.getcwd()),
    }


def lasting_threads(before: Iterable[threading.Thread] = ()) -> set[threading.Thread]:
    """Threads beside those of `before` that do not end by themselves."""
    threads = {thread for thread in threading.enumerate() if not thread.daemon}.difference(before)
    for thread in threads.difference([threading.main_thread()]) if before else ():
        thread.join(5)
    return {thread for thread in threads if thread.is_alive()}


RAY, VLLM = {"trainer.executor": "ray"}, {"actor_rollout_ref.rollout.name": "vllm"}


@pytest.mark.parametrize(
    ("recipe", "where"),
    [
        ("grpo", {}),
        *[pytest.param(recipe, {}, marks=pytest.mark.slow) for recipe in ("ppo", "dapo")],
        pytest.param("grpo", RAY | VLLM, marks=[pytest.mark.slow, needs_vllm]),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()) or "local-hf",
)
def test_two_calls_of_train_have_every_metric_of_main_py(recipe, where, tmp_path, tiny_model, wide_headed_model):
    path = wide_headed_model if VLLM.items() <= where.items() else tiny_model
    model = AutoModelForCausalLM.from_pretrained(path)
    settings = {**STEP, **where, "trainer.default_local_dir": str(tmp_path / "face")}
    face = Trainer(model, compute_score, ROWS, tokenizer=str(path), settings=settings, recipe=recipe)
    face.train(total_steps=12)
    before, threads = state_of_process(model), lasting_threads()
    result = face.train(total_steps=20)
    assert state_of_process(model) == before and not lasting_threads(threads)
    (tmp_path / "my_reward.py").write_text(inspect.getsource(compute_score))
    main = {**settings, "trainer.default_local_dir": str(tmp_path / "main"), "trainer.total_training_steps": 20}
    main |= {"recipe": recipe, "actor_rollout_ref.model.path": path, "trainer.save_freq": 20}
    main |= {"data.train_files": write_rows(ROWS, tmp_path / "rows.jsonl")}
    main |= {"reward.custom_reward_function.path": tmp_path / "my_reward.py"}
    done = run_main(*(as_override(*item) for item in main.items()), name="ppo_trainer")
    assert done.returncode == 0, done.stderr
    expected = learning_metrics(tmp_path / "main")
    assert learning_metrics(result.folder) == expected
    assert len(expected) == len(result.metrics) == 20
    assert result.metrics["actor/grad_norm"].gt(0).any()
    assert state_files(tmp_path / "main", 20).items() >= state_files(result.folder, 20).items()


@pytest.mark.parametrize("form", ["async", "batch"])
def test_a_reward_in_memory_is_called_for_every_sample(made, form):
    calls: list[str] = []

    async def waits(response):
        await asyncio.sleep(0)
        calls.append(response)
        return {"score": len(set(response)) / 4, "length": len(response)}

    def of_a_batch(responses, ground_truths):
        calls.extend(responses)
        return [float(len(set(response))) for response in responses]

    async def cell():  # a notebook's runs in a loop
        return made({"async": waits, "batch": of_a_batch}[form]).train(total_steps=2)

    metrics = asyncio.run(cell()).metrics
    assert len(calls) == 2 * 3 * 2 and all(isinstance(response, str) for response in calls)
    assert ("reward/length/mean" in metrics) == (form == "async")


class Rows(Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


FRAME = pd.DataFrame(ROWS)
KINDS = {"list": ROWS, "frame": FRAME, "torch": Rows(), "loader": DataLoader(ROWS, batch_size=2), "tuple": tuple(ROWS)}


@pytest.mark.parametrize("kind", [*KINDS, "datasets"])
def test_rows_of_every_kind_are_the_same_file(kind, tmp_path):
    if kind == "datasets":
        KINDS[kind] = pytest.importorskip("datasets").Dataset.from_list(ROWS)
    path = write_rows(KINDS[kind], tmp_path / "rows.jsonl")
    assert [json.loads(line) for line in Path(path).read_text().splitlines()] == ROWS
    assert write_rows(path, tmp_path / "other.jsonl") == path and not (tmp_path / "other.jsonl").exists()


def test_the_spelling_of_the_design_documents(model, tiny_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    seen = []

    def compute_reward(prompt: str, response: str) -> float:
        seen.append(prompt)
        return float(len(set(response)))

    more = {name: value for name, value in STEP.items() if name != "data.train_batch_size"}
    config = TrainingConfig(more, total_epochs=1, learning_rate=1e-3, ppo_epochs=2, clip_range=0.3, kl_coef=0.01)
    trainer = PPOTrainer(model, AutoTokenizer.from_pretrained(tiny_model), config, reward_fn=compute_reward)
    result = trainer.train(DataLoader(ROWS, batch_size=2))
    assert [*dict.fromkeys(seen)] == [row["prompt"] for row in ROWS] and len(result.metrics) == 3
    assert result.folder.parent == Path("outputs")
    text = (result.folder / "config.yaml").read_text()
    for line in ("clip_ratio: 0.3", "ppo_epochs: 2", "kl_loss_coef: 0.01", "use_kl_loss: true", "train_batch_size: 2"):
        assert line in text, line


def test_the_process_and_the_model_are_as_before_but_for_the_weights(made, model, tmp_path):
    trainer = made(lambda response: len(set(response)) / 4)
    trainer.train(total_steps=1)  # what is imported then may start threads of its own
    torch.set_num_threads(2)
    weights, before = [weight.data_ptr() for weight in model.parameters()], state_of_process(model)
    threads = lasting_threads()
    result = trainer.train(total_steps=2)
    assert state_of_process(model) == before and not lasting_threads(threads)
    assert weights == [weight.data_ptr() for weight in model.parameters()]
    torch.save(model, tmp_path / "model.pt")
    trainer.save(tmp_path / "saved")
    folders = tmp_path / "saved", result.folder / "start_model"
    trained, start = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    loaded = torch.load(tmp_path / "model.pt", weights_only=False).state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in trained.items())
    assert any(not torch.equal(start[name], weight) for name, weight in trained.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").eos_token == "<|end|>"


def test_a_trained_model_is_validated_answers_prompts_and_is_reported(made, capsys):
    trainer = made(lambda response: 0.5, val_rows=ROWS[:2])
    before = trainer.generate(["1+1=", [{"role": "user", "content": "2+2="}]])
    result = trainer.train(total_steps=1)
    capsys.readouterr()
    assert trainer.validate() == {"val-core/sums/reward/mean@1": 0.5} | trainer.validate()
    assert "validation" in capsys.readouterr().out
    answers = trainer.generate(["1+1=", [{"role": "user", "content": "2+2="}]])
    assert capsys.readouterr() == ("", "") and len(answers) == len(before) == 2
    assert all(isinstance(answer, str) for answer in answers)
    if has("optional", "write_report"):
        page = result.report()
        assert page.name == "report.html" and "srcdoc" in page._repr_html_()


class Door(gymnasium.Env):
    """Pays for the action that is shown."""

    observation_space, action_space = spaces.Discrete(2), spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.way = int(self.np_random.integers(2))
        return self.way, {}

    def step(self, action):
        return self.way, float(action == self.way), True, False, {}


@pytest.mark.skipif(find_spec("extras.gym") is None, reason="extras/gym writes out what there is no text for")
@pytest.mark.parametrize("environment", [Door, "FrozenLake-v1", gymnasium.make("FrozenLake-v1", is_slippery=False)])
def test_an_environment_gives_prompts_and_rewards(made, environment):
    long = {"data.max_prompt_length": 400, "env.train_size": 6, "env.mode": "episode", "env.max_turns": 2}
    trainer = made(None, None, {**long, "data.max_response_length": 900}, environment=environment)
    assert len(trainer.train(total_steps=1).metrics) == 1
    assert trainer.generate(["up?"])


UNUSABLE = [
    ({"reward": lambda text: 1.0}, "none of the known forms"),
    ({"rows": [{"prompt": "1"}, {"prompt": "2", "image": object()}]}, "rows[1]['image'] is <object"),
    ({"rows": 3}, "rows=3: give a list"),
    ({"settings": {"data.batch": 3}}, "unknown key 'data.batch'"),
    ({"settings": {"batchsize": 3}}, "unknown key 'batchsize'"),
    ({"settings": {"trainer.seed": object()}}, "trainer.seed=<object"),
    ({"settings": {"trainer.save_freq": -1}}, "trainer.save_freq"),
    ({"reward": len, "settings": {"reward.custom_reward_function.path": "x.py"}}, "take one of the two back"),
    ({"environment": 3, "rows": None}, "environment=3: give a gymnasium id"),
    ({"recipe": "grop"}, "recipe=grop: no such recipe. Did you mean"),
]


@pytest.mark.parametrize(("given", "said"), UNUSABLE, ids=[said for _, said in UNUSABLE])
def test_what_cannot_be_used_is_refused_in_one_line(made, given, said):
    with pytest.raises(ValueError) as refusal:
        made(**given).train(total_steps=1)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_a_model_that_is_none_and_saving_before_training_are_refused(made, tmp_path):
    with pytest.raises(ConfigError, match="model is a Linear: give a PreTrainedModel"):
        GRPOTrainer(torch.nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="has no checkpoint"):
        made().save(tmp_path / "saved")


@pytest.mark.parametrize("value", ["a b", "it's", 'say "x"', "{{ x }}\nthen\\n", "a=b,c", "~/x", "", 1e-6, True, None])
def test_a_value_is_the_same_as_an_override(value):
    from configs.loader import parse_override

    nested = {"name": value, "list": [value, {"inner": value}]}
    assert parse_override(as_override("a.b", value)).value() == value
    assert parse_override(as_override("a.b", nested)).value() == nested
