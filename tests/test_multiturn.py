"""`make multiturn`: what its tasks imitate is what their policies are shown and have to say."""

from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from configs.checks import check_config
from configs.schema import Config
from custom.env_dataset import CustomEnvDataset
from custom.tiny_model import save_tiny_model
from data.chat import ChatFormat
from data.pretrained import load_tokenizer
from data.sampler import create_rl_sampler
from scripts import curriculum, multiturn
from scripts.quickstart import compose
from training.environment import build_environment, data_settings, env_dataset, episode_seeds

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


def test_the_makefile_offers_every_task():
    makefile = (Path(multiturn.__file__).parents[1] / "Makefile").read_text()
    [line] = [line for line in makefile.splitlines() if line.startswith("multiturn:")]
    assert all(name in line for name in multiturn.TASKS)


def test_a_curriculum_draws_lakes_of_four_sizes_and_is_measured_on_the_largest(model: Path):
    config = config_of("curriculum", model)
    environment, data = build_environment(config), data_settings(config)
    dataset = env_dataset(data, environment, load_tokenizer(config.actor_rollout_ref.model), size=400)
    rows = [dataset[position] for position in range(8)]
    assert [row["extra_info"]["size"] for row in rows] == [2, 3, 4, 5] * 2
    assert [len(row["extra_info"]["state"].text.splitlines()) for row in rows] == [2, 3, 4, 5] * 2
    assert rows[3]["data_source"] == "lake 5x5" and rows[3]["raw_prompt_ids"] == dataset[3]["raw_prompt_ids"]
    held_out = [environment.start_state(seed).text for seed in episode_seeds(config.env)]
    assert {len(text.splitlines()) for text in held_out} == {5}
    assert rows[3]["extra_info"]["state"].text not in held_out
    sampler = create_rl_sampler(data, dataset, 0)
    for _ in range(200):
        sampler.update(np.array([0, 1, 1, 2, 3]), {"reward": np.array([1.0, 1.0, 0.0, 0.0, 0.0])})
    drawn = [dataset.column("extra_info.size")[position] for position in sampler]
    assert drawn.count(3) > 350 and {2, 4, 5} <= {*drawn}


def test_the_table_of_the_curriculum_compares_after_equal_seconds():
    curves = {"curriculum": [[0, 0.01], [10, 0.5], [20, 0.4]], "uniform": [[0, 0.01], [20, 0.1], [40, 0.3]]}
    lines = curriculum.table({name: np.array(points) for name, points in curves.items()}).splitlines()
    assert lines[0] == "| seconds | curriculum | uniform |"
    assert lines[2] == "| 0 | 0.010 | 0.010 |" and lines[-1] == "| 20 | 0.500 | 0.100 |"
