"""CartPole in text: validation says what the same episodes give in gymnasium alone."""

from statistics import mean
from typing import Any

import gymnasium as gym

from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import ENVIRONMENTS, make_env
from custom.reward_manager import CustomRewardManager
from custom.tiny_model import build_tokenizer
from tests.engines import Playing, Scripted, trainer_on
from tests.runs import compose
from training.environment import EnvSetup

TOKENIZER = build_tokenizer()
SEEDS = range(1000, 1003)
NAME = "CartPole-v1"
ACTIONS = {"L": 0, "R": 1}


def show(env: Any, seen: Any) -> str:
    return "pole {2:.3f} turning {3:.3f}".format(*seen)


def balance(shown: str) -> str:
    _, angle, _, turning = shown.split()
    return "R" if float(angle) + float(turning) > 0 else "L"


def return_of(seed: int) -> float:
    """Plays an episode by gymnasium alone, its own step limit included."""
    env, total, over = gym.make(NAME), 0.0, False
    observation, _ = env.reset(seed=seed)
    while not over:
        observation, reward, terminated, truncated, _ = env.step(ACTIONS[balance(show(env, observation))])
        total, over = total + float(reward), terminated or truncated
    return total


def test_without_a_rule_the_headline_is_the_return_and_there_is_no_success_rate(monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, NAME, {"observation_to_text": show, "text_to_action": ACTIONS.get})
    played = [f"env.val_seed={SEEDS.start}", f"env.val_episodes={len(SEEDS)}"]
    config, environment = compose("data.max_prompt_length=64", *played), make_env(NAME)
    dataset, manager = CustomEnvDataset(environment, TOKENIZER, config.data, size=4), CustomRewardManager(environment)
    game = EnvSetup(environment, dataset, manager)
    playing = Playing(config, Scripted(config, TOKENIZER, lambda text, times: balance(text)), game)
    metrics, _ = trainer_on(config, TOKENIZER, playing, manager, env_setup=game).measure()
    assert metrics[f"val-core/{NAME}/return/mean@1"] == mean(map(return_of, SEEDS))
    assert [name for name in metrics if name.startswith("val-core/")] == [f"val-core/{NAME}/return/mean@1"]
    assert not [name for name in metrics if "/acc/" in name]
