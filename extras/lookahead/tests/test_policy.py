"""Playouts that a policy plays on: their values by hand, and the same however many prompts are answered at once."""

from itertools import chain, islice

import gymnasium as gym
import pytest

from configs.errors import ConfigError
from configs.loader import compose
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import make_env
from extras.lookahead import policy as module
from extras.lookahead.credit import Playouts
from extras.lookahead.policy import Policy, PolicyPlayouts, play_on

DISCOUNT = 0.97
NIM = "examples/games/nim.py:Nim-v0"


class Walk(gym.Env):
    """Five cells, of which a walk begins anywhere: 1 goes right, where the end pays 1, and 0 left."""

    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Discrete(6)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cell = seed % 5
        return self.cell, {}

    def step(self, action):
        self.cell = max(self.cell + 2 * int(action) - 1, 0)
        return self.cell, float(self.cell == 5), self.cell == 5, False, {}


gym.register("Walk-v0", Walk)


def values_of(environment, answer, count=10):
    """Returns the values of moves after the first resets, and how many prompts were answered at a time."""
    asked = []

    def ask(prompts):
        asked.append([messages[0]["content"] for messages in prompts])
        return [answer(text) for text in asked[-1]]

    policy = Policy(environment, CustomEnvDataset(environment), ask)
    environment.credit = PolicyPlayouts(environment, policy)
    work = policy.settle(lambda index: environment.credit.values(environment.start_state(index)))
    return [*islice(work, count)], asked


def test_a_move_is_worth_what_the_policy_earns_after_it(monkeypatch):
    monkeypatch.setattr(module, "FIRST", 10)
    environment = make_env("Walk-v0", reward="playouts", playouts=2, instruction="")
    values, asked = values_of(environment, lambda text: "1")
    for seed, worth in enumerate(values):
        away = 5 - seed % 5
        left = DISCOUNT ** (away + 1 if away < 5 else 5)
        assert worth == pytest.approx({0: left, 1: DISCOUNT ** (away - 1)})
    [prompts] = asked  # all that are met after one move, each once
    assert len(prompts) == len({*prompts}) == 5


def test_a_model_plays_half_of_the_playouts_on_and_nothing_else(tiny_model):
    settings = [f"env.id={NIM}", f"actor_rollout_ref.model.path={tiny_model}", "data.max_response_length=1"]
    config = compose("ppo_trainer", settings)
    environment = make_env(NIM, reward="playouts", playouts=5)
    policy = play_on(config, environment, CustomEnvDataset(environment))
    work = policy.settle(lambda index: environment.credit.values(environment.start_state(index)), seconds=0)
    assert [*work] == [] and environment.playouts == 3
    rows = policy.settle(lambda index: environment.credit.values(environment.start_state(index)), seconds=1e-3)
    assert len([*rows]) == module.FIRST and 0 < len(policy.known) <= 15
    with pytest.raises(ConfigError, match="reward=env: set playouts"):
        play_on(config, make_env(NIM), None)


@pytest.mark.parametrize("at_once", [1, 3, 256])
def test_values_do_not_depend_on_how_many_prompts_are_answered_at_once(at_once, monkeypatch):
    monkeypatch.setattr(module, "FIRST", at_once)
    environment = make_env(NIM, reward="playouts", playouts=4)
    values, asked = values_of(environment, lambda text: str(text.count("|") % 4 or 1))
    monkeypatch.setattr(module, "FIRST", 2)
    again, _ = values_of(environment, lambda text: str(text.count("|") % 4 or 1))
    assert values == again and len(values) == 10
    prompts = [*chain(*asked)]
    assert len({*prompts}) == len(prompts) <= 15


def test_a_policy_without_legal_answers_is_a_random_player():
    environment = make_env(NIM, reward="playouts", playouts=4)
    values, _ = values_of(environment, lambda text: "nothing")
    random = Playouts(environment)
    assert values == [random.values(environment.start_state(seed)) for seed in range(10)]
