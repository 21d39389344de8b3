"""The forms that users of verl and its guides write, each as a file of theirs, in short real runs.

Forms with a module of their own: commands and spellings of verl (extras/verl/tests), rows of other shapes
(test_rl_dataset.py), rewards without a model (test_reward.py), estimators (test_contributing.py), checkpoints
(test_checkpoint.py).
"""

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import main
from configs.extras import has
from configs.import_utils import load_module
from tests.runs import compose, learning_metrics, short_run

SUMS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(2) for b in range(4)]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(len(solution_str)), "right": float(solution_str == ground_truth)}
"""
STEPS = 2


class Desk:
    """A folder of a user's, with rows and a reward, and runs of two steps of 4 prompts × 2 samples there."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model
        self.write("my_reward.py", REWARD)
        self.rows([{"prompt": row["prompt"], "reward_model": {"ground_truth": row["answer"]}} for row in SUMS])

    def write(self, name: str, text: str) -> Path:
        (self.folder / name).write_text(text)
        return self.folder / name

    def rows(self, rows: list[dict]) -> None:
        self.write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def command(self, *overrides: str) -> list[str]:
        return [
            *short_run(self.model, self.folder / "run", f"trainer.total_training_steps={STEPS}"),
            f"data.train_files={self.folder}/rows.jsonl",
            f"reward.custom_reward_function.path={self.folder}/my_reward.py",
            "algorithm.adv_estimator=grpo",
            "data.max_prompt_length=24",
            "data.max_response_length=3",
            f"trainer.rollout_data_dir={self.folder}/rollouts",
            *overrides,
        ]

    def train(self, *overrides: str) -> dict[int, dict[str, float]]:
        """The metrics of each step."""
        main.run(compose(*self.command(*overrides), name="ppo_trainer"))
        return learning_metrics(self.folder / "run")

    def refused(self, capsys: pytest.CaptureFixture, *overrides: str) -> str:
        """The line in which main.py ends."""
        with pytest.raises(SystemExit) as stop:
            main.main(["--config-name", "ppo_trainer", *self.command(*overrides)])
        assert stop.value.code == 2
        return capsys.readouterr().err.rpartition("error: ")[2]

    def rollouts(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / f"rollouts/{STEPS}.jsonl").read_text().splitlines()]

    def module(self, name: str) -> ModuleType:
        return load_module(str(self.folder / name))


@pytest.fixture
def desk(tmp_path: Path, tiny_model: Path) -> Desk:
    return Desk(tmp_path, tiny_model)


# Rewards

PER_BATCH = """
import torch

def compute_reward(data, tokenizer=None, **kwargs):
    ids, prompts, mask = data.batch["responses"], data.batch["prompts"], data.batch["attention_mask"]
    assert ids.shape[0] == prompts.shape[0] == mask.shape[0] == len(data.batch) == len(data)
    assert mask.shape[1] == prompts.shape[1] + ids.shape[1]
    scores = torch.zeros(ids.shape)
    for i in range(len(data)):
        item = data[i]                                       # as verl's managers do
        width = item.batch["prompts"].shape[-1]
        asked = item.batch["prompts"][-item.batch["attention_mask"][:width].sum():]
        length = item.batch["attention_mask"][width:].sum()
        answered = item.batch["responses"][:length]
        assert tokenizer.decode(asked, skip_special_tokens=True) == data.prompts[i]
        assert tokenizer.decode(answered, skip_special_tokens=True) == data.responses[i]
        assert item.non_tensor_batch["reward_model"]["ground_truth"] == data.ground_truths[i]
        scores[i, length - 1] = len(data.responses[i])
    return scores
"""


def test_a_reward_function_of_batches_finds_all_that_verls_managers_read(desk: Desk):
    desk.write("my_reward.py", PER_BATCH)
    key = "custom_reward_function"  # as guides have it
    metrics = desk.train(f"{key}.path={desk.folder}/my_reward.py", f"{key}.name=compute_reward")
    scores, answers = [row["score"] for row in desk.rollouts()], {row["prompt"]: row["answer"] for row in SUMS}
    assert scores == [float(len(row["output"])) for row in desk.rollouts()] and max(scores) > 0
    assert all(row["gts"] == answers[row["input"]] for row in desk.rollouts())
    assert metrics[STEPS]["critic/score/mean"] == pytest.approx(np.mean(scores))


# Data

DATASET = """
import json
import re
import torch

class MyDataset(torch.utils.data.Dataset):
    def __init__(self, data_files, tokenizer, processor=None, config=None, times=1):
        self.rows = [json.loads(line) for line in open(data_files)] * times
        self.limit = config.get("max_prompt_length", 1024)
        assert self.limit == config.max_prompt_length == config["max_prompt_length"] == config.get("none", self.limit)
        self.before = config.custom_cls.get("before", "")
        assert config.custom_cls.before == self.before and config.custom_cls.get("after") is None
        self.ended = []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i % len(self.rows)]
        return {
            "{key}": [{"role": "user", "content": self.before + row["prompt"]}],
            "ground_truth": row["reward_model"]["ground_truth"],
            "sizes": torch.tensor([i, len(row["prompt"])]),
            "uid": f"mine {i}", "alpha": 3, "epsilon": "?", "f_norm": None, "input_ids": torch.tensor([i]),
        }

    def on_batch_end(self, batch):
        self.ended.append(batch)
        self.before = f"{len(self.ended)}: "
"""
READS_COLUMNS = """
seen = []

def compute_reward(data):
    seen.append(data)
    return [float(size[0] % 3 + len(text)) for size, text in zip(data.batch["sizes"], data.responses)]
"""


@pytest.mark.parametrize(("key", "estimator"), [("prompt", "grpo"), ("raw_prompt", "gpg")])
def test_a_dataset_in_verls_form(desk: Desk, key, estimator):
    """config.get, kwargs, keys of its own, rows with no more than a prompt, tensors, and names that are taken."""
    file = desk.write("my_data.py", DATASET.replace("{key}", key))
    desk.write("my_reward.py", READS_COLUMNS)
    metrics = desk.train(
        f"data.custom_cls.path={file}",
        "data.custom_cls.name=MyDataset",
        "data.custom_cls.kwargs.times=2",
        "+data.custom_cls.before='0: '",
        f"algorithm.adv_estimator={estimator}",
        "reward.custom_reward_function.name=compute_reward",
    )
    data = desk.module("my_reward.py").seen[-1]
    assert sorted({uid.split()[0] for uid in data.dataset_uid}) == ["mine"] and len(set(data.uid)) == 4
    assert data.batch["sizes"].shape == (8, 2) and data.sizes[:, 0].max() < 16
    assert data.dataset_input_ids[:, 0].tolist() == data.sizes[:, 0].tolist() == data.dataset_position.tolist()
    assert {row["input"][:3] for row in desk.rollouts()} == {"1: "}  # which on_batch_end changed
    assert metrics[STEPS]["actor/grad_norm"] > 0


SAMPLERS = """
import numpy as np
from data.sampler import AbstractSampler

class Base(AbstractSampler):
    def __init__(self, data_source, data_config):
        super().__init__(data_source, data_config)
        self.told = []

    def __iter__(self):
        return iter(range(len(self)))

    def __len__(self):
        return len(self.data_source)

class ByBatch(Base):
    def update(self, batch):
        self.told.append({"place": batch.dataset_position.tolist(), "reward": batch.token_level_scores.sum(1).tolist()})
        assert "advantages" in batch
        HEARD.append(self.told[-1])

class ByRow(Base):
    def update(self, indices, metrics):
        assert indices.shape == metrics["reward"].shape == metrics["loss"].shape == metrics["length"].shape
        assert all(metrics[row]["reward"] == metrics.get(row, {})["reward"] == 1 for row in indices)
        assert np.isfinite(metrics["loss"]).all() and (metrics["length"] >= 1).all() and set(metrics["right"]) <= {0, 1}
        self.told.append({"place": indices.tolist(), "reward": metrics["reward"].tolist()})
        HEARD.append(self.told[-1])

HEARD = []
"""


hears_metrics = pytest.mark.skipif(not has("optional", "positions_and_metrics"), reason="extras/curriculum was removed")


@pytest.mark.parametrize("name", ["ByBatch", pytest.param("ByRow", marks=hears_metrics)])
@pytest.mark.parametrize("filters", [False, True])
def test_a_sampler_hears_of_every_row_of_a_step(desk: Desk, name, filters):
    """A sampler hears also of rows that are not learnt from: with dynamic sampling, every group ties here."""
    file = desk.write("my_sampler.py", SAMPLERS)
    desk.write("my_reward.py", "def compute_score(solution_str):\n    return {'score': 1.0, 'right': 0}\n")
    more = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=2"] if filters else []
    desk.train(f"data.sampler.class_path={file}", f"data.sampler.class_name={name}", *more)
    heard = desk.module("my_sampler.py").HEARD
    draws = 2 if filters else 1
    assert [sorted(told["place"]) for told in heard] == [
        sorted(2 * [(4 * draws * step + place) % 8 for place in range(4 * draws)]) for step in range(STEPS)
    ]
    assert all(told["reward"] == [1.0] * 8 * draws for told in heard)


# Algorithms

LOSSES = """
import torch
from training.core_algos import agg_loss, register_policy_loss

@register_policy_loss("contract_older")
def older(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    losses = -advantages * (log_prob - old_log_prob).exp()
    assert config.get("clip_ratio", 0.1) == config.clip_ratio == 0.2 and config.policy_loss.get("loss_mode")
    loss = agg_loss(losses, response_mask, loss_agg_mode)
    return loss, torch.tensor(0.25), torch.tensor(0.5), torch.tensor(0.75)
"""


def test_a_policy_loss_in_the_older_form(desk: Desk):
    key = "algorithm.policy_loss_fn"  # as guides have it
    file = desk.write("my_losses.py", LOSSES)
    older = desk.train(f"{key}=contract_older", f"actor_rollout_ref.model.external_lib={file}")[1]
    assert (older["actor/pg_clipfrac"], older["actor/ppo_kl"], older["actor/pg_clipfrac_lower"]) == (0.25, 0.5, 0.75)


# Rollouts

ENGINES = """
import torch
from data.protocol import DataProto
from workers.rollout import Completion, Rollout

class Generate(Rollout):
    def generate(self, requests):
        return [Completion(one.id, [7, 8], [-1.0, -1.0], "length", self.weight_version) for one in requests]

class Batch(Rollout):
    def __init__(self, module, tokenizer):
        self.model, self.words = module, tokenizer

    def generate_sequences(self, batch):
        prompts, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
        assert batch.meta_info["do_sample"] and prompts.shape == mask.shape == batch.batch["position_ids"].shape
        responses = torch.tensor([[7, 8, 0]] * len(batch))
        real = torch.tensor([[1, 1, 0]] * len(batch))
        return DataProto.from_dict({
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": torch.cat([mask, real], 1),
        })

class BatchByMask(Rollout):
    def __init__(self):
        pass

    def generate_sequences(self, prompts, **kwargs):
        assert kwargs["sampling"].max_tokens == 3 and {"seed", "first_row"} < set(kwargs)
        mask = torch.tensor([[1, 1]] * len(prompts))
        responses = torch.tensor([[7, 8]] * len(prompts))
        return DataProto.from_single_dict({"responses": responses, "response_mask": mask, "note": ["mine"] * len(mask)})
"""
CLASSES = ("Generate", "Batch", "BatchByMask")


@pytest.mark.parametrize("name", CLASSES)
def test_an_engine_of_one_method_with_or_without_a_constructor(desk: Desk, name):
    file = desk.write("my_engines.py", ENGINES)
    metrics = desk.train(
        f"actor_rollout_ref.rollout.name={file}:{name}", "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    )
    rows = desk.rollouts()
    assert len({row["output"] for row in rows}) == 1 and {row["score"] for row in rows} == {2.0}
    assert {row["input"] for row in rows} <= {row["prompt"] for row in SUMS}
    assert {row["end_reason"] for row in rows} == {"max_tokens"}
    assert ("rollout_corr/kl" in metrics[STEPS]) == (name == "Generate"), "where it knows its log-probs"


def test_the_one_engine_of_a_file_needs_no_name_and_two_are_refused_with_both(desk: Desk, capsys, monkeypatch):
    monkeypatch.setattr(main.Launch, "init_workers", lambda _: pytest.fail("workers were started"))
    file = desk.write("my_engines.py", ENGINES)
    line = desk.refused(capsys, f"actor_rollout_ref.rollout.name={file}")
    assert all(name in line for name in CLASSES) and f"{file}:Generate" in line
    assert "has no 'Other'" in desk.refused(capsys, f"actor_rollout_ref.rollout.name={file}:Other")
    one = desk.write("one.py", ENGINES.split("class Batch")[0])
    monkeypatch.setattr(main.Launch, "init_workers", lambda _: None)
    monkeypatch.setattr(main.Launch, "fit", lambda _: None)
    main.main(["--config-name", "ppo_trainer", *desk.command(f"actor_rollout_ref.rollout.name={one}")])


# Environments

GAME = """
import gymnasium as gym
from custom.env_wrapper import ENVIRONMENTS

class Lamps(gym.Env):
    action_space = gym.spaces.Discrete(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.lit = int(self.np_random.integers(4))
        return self.lit, {}

    def step(self, action):
        return self.lit, float(action == self.lit), True, False, {}

gym.register("ContractLamps-v0", Lamps)
ENVIRONMENTS["ContractLamps-v0"] = {
    "observation_to_text": lambda env, lit: "".join("*" if place == lit else "." for place in range(4)),
    "text_to_action": lambda text: "1" if "a" in text else 2.0,
    "instruction": "Which?",
}
"""
SUBCLASSES = """
from custom.env_dataset import CustomEnvDataset
from custom.reward_manager import CustomRewardManager

class MyDataset(CustomEnvDataset):
    def __init__(self, *arguments, mark="", **kwargs):
        self.mark = mark
        super().__init__(*arguments, **kwargs)

    def state_to_text(self, state):
        return self.mark + state.text

class MyManager(CustomRewardManager):
    def __call__(self, data):
        states = [info["state"] for info in data.extra_info]
        return [self.environment.compute_reward(s, self.extract_action(t)) for s, t in zip(states, data.responses)]
"""


def test_an_environment_of_a_file_with_a_dataset_and_a_reward_manager_of_the_users(desk: Desk):
    game, parts = desk.write("lamps.py", GAME), desk.write("parts.py", SUBCLASSES)
    desk.train(
        "data.train_files=null",
        "reward.custom_reward_function.path=null",
        f"env.id={game}:ContractLamps-v0",
        f"data.custom_cls={{path: {parts}, name: MyDataset, kwargs: {{mark: 'Now '}}}}",
        f"reward.reward_manager={{path: {parts}, name: MyManager}}",
        "env.val_episodes=2",
        "trainer.test_freq=2",
    )
    rows = desk.rollouts()
    assert {row["input"][:4] for row in rows} == {"Now "}
    for row in rows:
        assert row["score"] == float(row["input"][4:].index("*") == (1 if "a" in row["output"] else 2))


# Tools

TOOLS = """
from data.tools import function_tool

@function_tool
def measure(text: str, times: int = 1) -> int:
    "Measures a text."
    return times * len(text)
"""
FORMAT = """
from data.tool_parsers import ParsedAnswer, ToolCall, ToolParser

@ToolParser.register("everything is a call")
class Everything(ToolParser):
    def parse(self, answer, schemas):
        return ParsedAnswer("", [ToolCall("measure", {"text": answer})])

    def write(self, name, arguments):
        return arguments["text"]
"""
TOOL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert extra_info["tool_call_counts"] == 1 and extra_info["num_turns"] == 4
    return len(solution_str)
"""
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"


needs_tools = pytest.mark.skipif(not has("source", "conversations"), reason="extras/tools was removed")
TOOL_KEYS = [f"{MULTI_TURN}.tool_config_path", "data.tool_config_path", "actor_rollout_ref.rollout.tools"]


@needs_tools
@pytest.mark.parametrize("key", TOOL_KEYS)
def test_a_yaml_of_tools_by_each_of_its_keys(desk: Desk, key):
    functions = desk.write("functions.py", TOOLS)
    entry = {"function": f"{functions}:measure", "name": "measure"}
    yaml = desk.write("tools.yaml", json.dumps({"tools": [entry]}))
    config = compose(*desk.command(f"{key}={yaml}", f"{MULTI_TURN}.enable=true"), name="ppo_trainer")
    [schema] = main.build(config).parts.train_loader.dataset.config.apply_chat_template_kwargs["tools"]
    assert schema["function"]["name"] == "measure"


@needs_tools
def test_a_python_function_as_a_tool_with_a_format_and_a_reward_of_the_users(desk: Desk):
    desk.write("my_reward.py", TOOL_REWARD)
    metrics = desk.train(
        f"{MULTI_TURN}.enable=true",
        f"{MULTI_TURN}.function_tool_path={desk.write('functions.py', TOOLS)}",
        f"{MULTI_TURN}.format=everything is a call",
        f"{MULTI_TURN}.max_assistant_turns=2",
        f"{MULTI_TURN}.max_tokens_per_turn=3",
        f"actor_rollout_ref.model.external_lib={desk.write('my_format.py', FORMAT)}",
        "data.max_response_length=40",
    )
    assert metrics[STEPS]["tool_call_counts/mean"] == 1 and metrics[STEPS]["num_turns/mean"] == 2
