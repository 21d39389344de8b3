"""Every form of the design documents: the extraction guide step by step, and the table of docs/from_documents.md."""

import re
import shutil
from pathlib import Path

import pytest

from configs.errors import ConfigError
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import make_env
from custom.tiny_model import build_tokenizer
from data.rl_dataset import RLHFDataset
from tests.documents.parts import Market, MarketDataset, MarketReward
from tests.forked import python
from tests.runs import ROOT, learning_metrics, run_main, short_run
from training.api import GRPOTrainer
from training.ray_trainer import RayPPOTrainer

STEP = {"data.train_batch_size": 4, "data.max_response_length": 1, "trainer.logger": []}
FILES = ROOT / "tests/documents"
SETTINGS = """
actor_rollout_ref:
  model: {{path: {model}}}
  rollout: {{n: 2}}
algorithm: {{adv_estimator: grpo}}
data: {{train_batch_size: 4, max_prompt_length: 16, max_response_length: 2}}
trainer: {{total_training_steps: 2, default_local_dir: {folder}/run, logger: []}}
"""


@pytest.fixture
def guide(tmp_path: Path, tiny_model: Path) -> Path:
    """A folder of a user's with the guide's files, beside a copy of nothing: our modules are on the path."""
    for file in FILES.glob("*.py"):
        shutil.copy(file, tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/test_config.yaml").write_text(SETTINGS.format(model=tiny_model, folder=tmp_path))
    return tmp_path


def rewards_of(folder: Path) -> list[float]:
    steps = learning_metrics(folder / "run")
    return [metrics["critic/score/mean"] for step, metrics in steps.items() if step]


def test_a_main_of_the_users_own_trains_on_its_objects(guide):
    done = python("main.py", "trainer.total_training_steps=3", cwd=guide)
    assert done.returncode == 0, done.stderr
    assert len(rewards_of(guide)) == 3 and all(-1 <= reward <= 1 for reward in rewards_of(guide))
    again = python("main.py", "trainer.sed=1", cwd=guide)
    assert again.returncode == 1 and "trainer.sed" in again.stderr


def settings_of(folder: Path) -> list[str]:
    """Names the guide's classes as settings."""
    named = {"data.custom_cls": "MarketDataset", "reward.reward_manager": "MarketReward"}
    return [
        f"env={{id: Market, path: {folder}/parts.py, name: make_market, val_episodes: 0, val_size: 4}}",
        *(f"{key}={{path: {folder}/parts.py, name: {name}}}" for key, name in named.items()),
    ]


def test_its_classes_train_by_settings(guide):
    command = "--config-path=config", "--config-name=test_config", "+reward.reward_kwargs.fee=1"
    done = python(ROOT / "main.py", *command, *settings_of(guide), cwd=guide)
    assert done.returncode == 0, done.stderr
    assert len(rewards_of(guide)) == 2


def test_the_data_set_by_hand_and_the_reward_by_hand(guide):
    for tokenizer in (None, build_tokenizer()):
        dataset = CustomEnvDataset(make_env("FrozenLake-v1"), tokenizer=tokenizer)
        row = dataset[0]
        assert len(dataset) == 10_000 and row["prompt"][0]["role"] == "user"
        assert ("raw_prompt_ids" in row) == (tokenizer is not None)
    snippets = {
        "from parts import *; d = MarketDataset(Market()); print(len(d), d[3]['prompt'])": "20 3=",
        "from data.protocol import DataProto; from parts import *; m = MarketReward(Market()); print(m(DataProto"
        ".from_single_dict({'responses': ['B', 'S'], 'state': [{'price': 1}] * 2})))": "tensor([ 1., -1.])",
    }
    for snippet, printed in snippets.items():
        done = python("-c", snippet, cwd=guide)
        assert done.stdout.strip() == printed, done.stderr


def test_the_python_face_takes_states_as_an_object(tiny_model, tmp_path):
    settings = {**STEP, "trainer.default_local_dir": str(tmp_path / "run")}
    states = CustomEnvDataset(make_env("FrozenLake-v1"))
    for rows, reward, name in (MarketDataset(Market()), MarketReward(Market()), None), (states, None, "FrozenLake-v1"):
        trainer = GRPOTrainer(str(tiny_model), reward, rows, environment=name, settings=settings)
        assert len(trainer.train(total_steps=1).metrics) == 1
        shutil.rmtree(tmp_path / "run")


REFUSED = {  # what is wrong: the class, further settings, and what the message names
    "no __len__": ("class Mine(Dataset):\n    def __init__(self, env): ...", [], "Mine has no __len__"),
    "other names": (
        "class Mine(Dataset):\n    def __init__(self, env, tok): ...",
        [],
        "data.custom_cls.name=Mine: .*'tok'.*It is given environment by position and what it names of tokenizer",
    ),
    "no rows": ("class Mine(RLHFDataset):\n    def __init__(self, env): super().__init__()", [], "Mine has no rows"),
    "episodes": (
        "from parts import MarketDataset as Mine",
        ["env.mode=episode", "env.val_size=0"],
        r"env\.mode=episode: row 0 of MarketDataset has no extra_info\['state'\]",
    ),
}


@pytest.mark.parametrize("wrong", REFUSED)
def test_a_data_set_that_cannot_be_one_is_refused_in_a_line(wrong, guide, tiny_model):
    text, settings, expected = REFUSED[wrong]
    imports = "from torch.utils.data import Dataset\nfrom data.rl_dataset import RLHFDataset\n"
    (guide / "mine.py").write_text(imports + text)
    mine = [f"data.custom_cls={{path: {guide}/mine.py, name: Mine}}"]
    done = run_main(*short_run(tiny_model, guide / "run", *settings_of(guide), *mine, *settings))
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and re.search(expected, line), line


def test_objects_that_workers_cannot_have_are_refused(tiny_model, tmp_path):
    model = {"actor_rollout_ref.model.path": str(tiny_model), "trainer.default_local_dir": str(tmp_path)}
    episodes = {**model, "env.id": "FrozenLake-v1", "env.val_episodes": 2}
    with pytest.raises(ConfigError, match=r"env\.val_episodes=2: .*MarketDataset"):
        RayPPOTrainer(episodes, MarketDataset(Market()), MarketReward(Market()))
    with pytest.raises(ConfigError, match="role_worker_mapping"):
        RayPPOTrainer(config=model, train_dataset=None, reward_fn=None, role_worker_mapping={})
    with pytest.raises(ValueError, match="give a tokenizer"):
        RLHFDataset("rows.jsonl")
