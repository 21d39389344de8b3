"""`make multiturn`: what its tasks imitate is what their policies are shown and have to say."""

from itertools import islice
from pathlib import Path

import pytest

from configs.checks import check_config
from configs.schema import Config
from custom.env_dataset import CustomEnvDataset
from custom.tiny_model import save_tiny_model
from data.chat import ChatFormat
from data.pretrained import load_tokenizer
from scripts import multiturn
from scripts.quickstart import compose
from training.environment import build_environment

GAMES = {
    name: lesson for name, task in multiturn.TASKS.items() for lesson in task.lessons if lesson.sft == "multiturn_sft"
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("multiturn") / "model"
    save_tiny_model(folder, hidden_size=32, layers=1)
    return folder


def config_of(name: str, model: Path, *overrides: str) -> Config:
    config = compose(Config, name, [f"actor_rollout_ref.model.path={model}", *overrides])
    check_config(config)
    return config


@pytest.mark.parametrize("name", GAMES)
def test_demonstrated_episodes_fit_and_are_what_the_environment_says(name: str, model: Path):
    config = config_of(name, model)
    environment = build_environment(config)
    dataset = CustomEnvDataset(environment, load_tokenizer(config.actor_rollout_ref.model), config.data, size=4)
    chat = ChatFormat(dataset.tokenizer, {})
    rows = [*islice(GAMES[name].rows(config), 40)]
    assert rows
    for row in rows:
        prompt, *said = row["messages"] if "messages" in row else [*row["prompt"], row]
        answers = [one.get("content", one.get("response")) for one in said if one.get("role") != "user"]
        assert all(environment.extract_action(answer) is not None for answer in answers)
        shown = len(chat.prompt_ids([prompt]))
        whole = len(chat.prompt_ids(row["messages"])) if "messages" in row else shown
        assert shown <= config.data.max_prompt_length
        assert whole - shown <= config.data.max_response_length
