"""gymnasium's CartPole and MountainCar by id and two text functions each: what validation says of them is what
the same episodes give when gymnasium alone plays them."""

import json
import re
from pathlib import Path
from statistics import mean
from typing import Any

import gymnasium as gym
import pytest

import main
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import ENVIRONMENTS, make_env
from custom.reward_manager import CustomRewardManager
from custom.tiny_model import build_tokenizer
from tests.engines import Playing, Scripted, trainer_on
from tests.runs import compose, learning_metrics, short_run
from training.environment import EnvSetup

TOKENIZER = build_tokenizer()
SEEDS = range(1000, 1003)


def cart_pole_text(env: Any, observation: Any) -> str:
    _, _, angle, turning = observation
    return f"pole {angle:.3f} turning {turning:.3f}"


def mountain_car_text(env: Any, observation: Any) -> str:
    return f"at {observation[0]:.3f} speed {observation[1]:.4f}"


def left_or_right(text: str) -> int | None:
    return {"L": 0, "R": 1}.get(text)


def left_none_right(text: str) -> int | None:
    return {"L": 0, "-": 1, "R": 2}.get(text)


def balance(shown: str) -> str:
    _, angle, _, turning = shown.split()
    return "R" if float(angle) + float(turning) > 0 else "L"


def with_the_speed(shown: str) -> str:
    return "R" if float(shown.split()[-1]) >= 0 else "L"


def always_right(shown: str) -> str:
    return "R"


TEXTS = {
    "CartPole-v1": {"observation_to_text": cart_pole_text, "text_to_action": left_or_right},
    "MountainCar-v0": {"observation_to_text": mountain_car_text, "text_to_action": left_none_right},
}
PLAYERS = [
    ("CartPole-v1", balance),
    ("CartPole-v1", always_right),
    ("MountainCar-v0", with_the_speed),
    ("MountainCar-v0", always_right),
]


@pytest.fixture(autouse=True)
def entries(monkeypatch: pytest.MonkeyPatch) -> None:
    for env_id, functions in TEXTS.items():
        monkeypatch.setitem(ENVIRONMENTS, env_id, functions)


def validate(env_id: str, answer: Any, **settings: Any) -> dict[str, float]:
    config = compose(
        "data.max_prompt_length=64", f"env.val_seed={SEEDS.start}", f"env.val_episodes={len(SEEDS)}",
        "trainer.log_val_generations=0",
    )  # fmt: skip
    environment = make_env(env_id, **settings)
    dataset = CustomEnvDataset(environment, TOKENIZER, config.data, size=4)
    manager = CustomRewardManager(environment)
    game = EnvSetup(environment, dataset, manager)
    playing = Playing(config, Scripted(config, TOKENIZER, lambda text, times: answer(text)), game)
    metrics, _ = trainer_on(config, TOKENIZER, playing, manager, game=game).measure()[0]
    return metrics


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


CARTPOLE_FILE = """
from custom.env_wrapper import ENVIRONMENTS

ENVIRONMENTS["CartPole-v1"] = {
    "observation_to_text": lambda env, observation: "left" if observation[2] < 0 else "right",
    "text_to_action": lambda text: ord(text[0]) % 2 if text else None,
}
"""


def test_a_run_says_the_return_on_the_terminal_in_its_record_and_in_its_samples(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    (tmp_path / "my_cartpole.py").write_text(CARTPOLE_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = [
        "env.id=my_cartpole:CartPole-v1",
        *("~env.kwargs.is_slippery", "~env.kwargs.random_maps", "~env.kwargs.size"),
        *("env.max_turns=40", "env.val_episodes=3", "data.max_prompt_length=16", "trainer.total_training_steps=1"),
        *("trainer.test_freq=1", "trainer.log_val_generations=3", f"trainer.validation_data_dir={tmp_path}/dumps"),
        "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    ]
    main.run(compose(*short_run(tiny_model, tmp_path / "run"), *overrides))
    episodes = [json.loads(line) for line in (tmp_path / "dumps/1.jsonl").read_text().splitlines()]
    returns = [replayed_cart_pole(seed, episode) for seed, episode in enumerate(episodes, start=1_000_000)]
    name = "val-core/my_cartpole:CartPole-v1/return/mean@1"
    assert [episode["score"] for episode in episodes] == returns
    assert learning_metrics(tmp_path / "run")[1][name] == pytest.approx(mean(returns))
    printed = capsys.readouterr().out
    assert f"validation at step 1: my_cartpole:CartPole-v1: return {mean(returns):.4g}" in printed
    assert all(re.search(rf"score {total:g}\b", printed) for total in returns)


def replayed_cart_pole(seed: int, episode: dict[str, Any]) -> float:
    """The return of the answers of `episode`, played by gymnasium; an unreadable one earns 0 and moves nothing."""
    env, total = gym.make("CartPole-v1"), 0.0
    env.reset(seed=seed)
    for turn in episode["turns"]:
        if turn["response"]:
            total += float(env.step(ord(turn["response"][0]) % 2)[1])
    return total
