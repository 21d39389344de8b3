"""Counts how often each action is played, and what it earns, by hand."""

from types import SimpleNamespace

import pytest
import torch

from custom.env_wrapper import make_env
from custom.reward_manager import CustomRewardManager
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from extras.gym.actions import ActionShares
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
    trainer = SimpleNamespace(config=compose(), game=game, reward=reward, tokenizer=TOKENIZER)
    found = ActionShares(trainer)(batch_of(TURNS), {})
    shares = {"action/L/share": 0.5, "action/D/share": 0.25, "action/R/share": 0.0, "action/U/share": 0.0}
    assert found == {**shares, "action/L/reward/mean": 0.5, "action/D/reward/mean": 0.5}
    assert ActionShares(trainer)(batch_of(TURNS[3:]), {}) == {}


def test_an_environment_of_numbers_and_a_reward_that_reads_no_actions_have_none():
    for reward in (CustomRewardManager(make_env("Pendulum-v1")), lambda data: [0.0] * len(data)):
        trainer = SimpleNamespace(config=compose(), game=None, reward=reward, tokenizer=TOKENIZER)
        assert ActionShares(trainer)(batch_of(TURNS), {}) == {}
