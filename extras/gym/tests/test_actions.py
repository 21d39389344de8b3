"""Counts how often each action is played, and what it earns, by hand."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from custom.env_wrapper import make_env
from custom.reward_manager import CustomRewardManager
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from extras.gym import actions
from extras.gym.actions import ActionShares, Moves, compare_moves
from tests.runs import compose

TOKENIZER = build_tokenizer()
TURNS = [  # a row each: (text, whether the policy says it, what it earns)
    [("L", 1, 1.0), ("SFP", 0, 0.0), ("L", 1, 0.0)],
    [("D", 1, 0.5), ("<|end|>", 1, 0.0)],
    [("?", 1, 0.0)],
    [("U", 0, 0.0)],  # of a failed row
]


def batch_of(rows: list) -> DataProto:
    columns = {name: torch.zeros(len(rows), 8) for name in ("responses", "response_mask", "token_level_scores")}
    for row, turns in enumerate(rows):
        place = 0
        for text, policy, reward in turns:
            ids = TOKENIZER.encode(text, add_special_tokens=False)
            columns["responses"][row, place : place + len(ids)] = torch.tensor(ids)
            columns["response_mask"][row, place : place + len(ids)] = policy
            place += len(ids)
            columns["token_level_scores"][row, place - 1] = reward
    whole = {name: columns[name].long() for name in ("responses", "response_mask")}
    return DataProto.from_single_dict(columns | whole)


@pytest.mark.parametrize("in_episodes", [False, True])
def test_shares_and_rewards_of_actions_by_hand(in_episodes):
    environment = make_env("FrozenLake-v1")
    reward = CustomRewardManager(environment)
    game = SimpleNamespace(reader=reward, environment=environment) if in_episodes else None
    trainer = SimpleNamespace(config=compose(), env_setup=game, reward=reward, tokenizer=TOKENIZER)
    found = ActionShares(trainer)(batch_of(TURNS), {})
    shares = {"action/L/share": 0.5, "action/D/share": 0.25, "action/R/share": 0.0, "action/U/share": 0.0}
    assert found == {**shares, "action/L/reward/mean": 0.5, "action/D/reward/mean": 0.5}
    assert ActionShares(trainer)(batch_of(TURNS[3:]), {}) == {}


def test_an_environment_of_numbers_and_a_reward_that_reads_no_actions_have_none():
    for reward in (CustomRewardManager(make_env("Pendulum-v1")), lambda data: [0.0] * len(data)):
        trainer = SimpleNamespace(config=compose(), env_setup=None, reward=reward, tokenizer=TOKENIZER)
        assert ActionShares(trainer)(batch_of(TURNS), {}) == {}


@pytest.mark.parametrize(
    ("env_id", "settings", "teach_nothing", "pays"),
    [
        ("MountainCar-v0", {}, True, {-1.0}),
        ("FrozenLake8x8-v1", {"reward": "env"}, True, {0.0}),
        ("Blackjack-v1", {}, False, None),
        ("Pendulum-v1", {}, False, None),  # whose moves are drawn
    ],
)
def test_states_whose_moves_are_paid_alike_are_counted(env_id, settings, teach_nothing, pays):
    environment = make_env(env_id, **settings)
    chance = random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()
    moves = compare_moves(CustomRewardManager(environment))
    assert (random.getstate(), np.random.get_state()[2], torch.get_rng_state().tolist()) == chance
    assert moves.teach_nothing is teach_nothing and moves.alike <= moves.states <= 30
    assert pays is None or moves.pays == pays
    assert moves.illegal == environment.invalid_reward
    assert compare_moves(CustomRewardManager(environment), []) is None
    again = compare_moves(CustomRewardManager(environment), [environment.get_state(0)] * 2)
    assert again.states == 1


def test_it_is_not_asked_who_pays_by_more_than_the_environment_does(monkeypatch):
    class Shaping(CustomRewardManager):
        def score(self, response, state):
            return 1.0

    sparse = make_env("MountainCar-v0")
    assert compare_moves(Shaping(sparse)) is compare_moves(CustomRewardManager(make_env("FrozenLake-v1"))) is None
    assert compare_moves(lambda data: [0.0] * len(data)) is None
    monkeypatch.setattr(actions, "MOST_SECONDS", -1.0)
    assert compare_moves(CustomRewardManager(sparse)).states == 1


@pytest.mark.parametrize(
    ("states", "alike", "flat"), [(30, 30, True), (30, 27, True), (30, 26, False), (4, 3, False), (1, 1, True)]
)
def test_moves_teach_nothing_where_they_differ_in_a_tenth_of_the_states_at_most(states, alike, flat):
    moves = Moves(states, alike, frozenset([0.0]), -1.0)
    assert moves.teach_nothing is flat
    told = f"in {alike} of {states} states all legal actions pay alike (0; an illegal answer -1): "
    assert moves.advice("states").startswith(told)
    assert "alike:" in Moves(states, alike, frozenset([0.0, 1.0])).advice("states")
