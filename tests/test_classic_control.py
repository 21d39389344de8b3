"""CartPole and MountainCar in text: validation says what the same episodes give in gymnasium alone."""

from statistics import mean
from typing import Any

import gymnasium as gym
import pytest

from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import ENVIRONMENTS, make_env
from custom.reward_manager import CustomRewardManager
from custom.tiny_model import build_tokenizer
from tests.engines import Playing, Scripted, trainer_on
from tests.runs import compose
from training.environment import EnvSetup

TOKENIZER = build_tokenizer()
SEEDS = range(1000, 1003)


def balance(shown: str) -> str:
    _, angle, _, turning = shown.split()
    return "R" if float(angle) + float(turning) > 0 else "L"


def with_the_speed(shown: str) -> str:
    return "R" if float(shown.split()[-1]) >= 0 else "L"


def always_right(shown: str) -> str:
    return "R"


TEXTS = {
    "CartPole-v1": {
        "observation_to_text": lambda env, seen: "pole {2:.3f} turning {3:.3f}".format(*seen),
        "text_to_action": {"L": 0, "R": 1}.get,
    },
    "MountainCar-v0": {
        "observation_to_text": lambda env, seen: "at {:.3f} speed {:.4f}".format(*seen),
        "text_to_action": {"L": 0, "-": 1, "R": 2}.get,
    },
}
PLAYERS = [(env_id, player) for env_id, good in (("CartPole-v1", balance), ("MountainCar-v0", with_the_speed))
           for player in (good, always_right)]  # fmt: skip


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    for env_id, functions in TEXTS.items():
        monkeypatch.setitem(ENVIRONMENTS, env_id, functions)


def validate(env_id: str, answer: Any, **settings: Any) -> dict[str, float]:
    config = compose(
        "data.max_prompt_length=64", f"env.val_seed={SEEDS.start}", f"env.val_episodes={len(SEEDS)}",
    )  # fmt: skip
    environment = make_env(env_id, **settings)
    dataset = CustomEnvDataset(environment, TOKENIZER, config.data, size=4)
    manager = CustomRewardManager(environment)
    game = EnvSetup(environment, dataset, manager)
    playing = Playing(config, Scripted(config, TOKENIZER, lambda text, times: answer(text)), game)
    return trainer_on(config, TOKENIZER, playing, manager, game=game).measure()[0]


def by_gymnasium_alone(env_id: str, answer: Any) -> list[tuple[float, bool]]:
    """(return, whether the environment itself ended it) of each episode, gymnasium's own step limit included."""
    env, functions, played = gym.make(env_id), TEXTS[env_id], []
    for seed in SEEDS:
        observation, _ = env.reset(seed=seed)
        total, terminated, truncated = 0.0, False, False
        while not (terminated or truncated):
            shown = functions["observation_to_text"](env.unwrapped, observation)
            action = functions["text_to_action"](answer(shown))
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
        played.append((total, terminated))
    return played


@pytest.mark.parametrize(("env_id", "player"), PLAYERS[::2])
def test_without_a_rule_the_headline_is_the_return_and_there_is_no_success_rate(env_id, player):
    metrics = validate(env_id, player)
    assert metrics[f"val-core/{env_id}/return/mean@1"] == mean(total for total, _ in by_gymnasium_alone(env_id, player))
    assert [name for name in metrics if name.startswith("val-core/")] == [f"val-core/{env_id}/return/mean@1"]
    assert not [name for name in metrics if "/acc/" in name]


@pytest.mark.parametrize(("env_id", "player"), PLAYERS)
def test_with_a_rule_the_headline_is_the_share_of_episodes_that_fulfil_it(env_id, player):
    rule = {"terminated": env_id != "CartPole-v1"}  # there, lasting until the step limit is the art
    metrics, played = validate(env_id, player, success=rule), by_gymnasium_alone(env_id, player)
    wanted = mean(float(terminated == rule["terminated"]) for _, terminated in played)
    assert metrics[f"val-core/{env_id}/acc/mean@1"] == wanted
    assert metrics[f"val-aux/{env_id}/return/mean@1"] == mean(total for total, _ in played)
    assert wanted == (0.0 if player is always_right else 1.0), "the players are meant to show both outcomes"
