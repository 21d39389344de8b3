"""The estimators of the catalogue: verl's numbers, a twin in loops of each, and what is peculiar to one.

What holds for every estimator is in tests/test_estimators.py, which runs it for these, too.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.extras import TABLE
from extras.algorithms.estimators import ESTIMATORS
from tests import test_estimators as rules
from tests.batches import close
from tests.test_estimators import (
    ANCHOR,
    DIMENSIONS,
    GAMMA,
    MASK,
    NAN,
    SEEDS,
    Batch,
    each_token,
    flat,
    gae,
    peers,
    standard_score,
    twin_dr_grpo,
    twin_grpo,
    whitened,
)


def turn_gae(rows):
    """[(advantage, value) of its turn for each token of a row], for each row: gae's twin is asked about turns."""
    as_turns = []
    for row in rows:
        turns = [[t for t in range(len(row)) if row.turn_ids[t] == turn] for turn in sorted({*row.turn_ids})]
        earned = [sum(row.token_level_rewards[t] for t in turn) for turn in turns]
        worth = [row.values[turn[0]] for turn in turns]
        [advantages] = gae([replace(row, token_level_rewards=earned, values=worth)])
        numbers = zip(advantages, worth, turns, strict=True)
        as_turns.append([(advantage, value) for advantage, value, turn in numbers for _ in turn])
    return as_turns


def twin_passk(rows, divide=True, epsilon=1e-6):
    def lead(row):
        scores = sorted((p.score for p in peers(rows, row)), reverse=True)
        if len(scores) < 2 or row.score < scores[0]:
            return 0.0
        return (scores[0] - scores[1]) / (np.std(scores, ddof=1) + epsilon if divide else 1.0)

    return each_token(rows, lead)


def twin_rloo(rows, alone=lambda score: score):
    def minus_others(row):
        others = [p.score for p in peers(rows, row) if p is not row]
        return row.score - np.mean(others) if others else alone(row.score)

    return each_token(rows, minus_others)


def twin_opo(rows):
    def minus_weighted(row):
        group = peers(rows, row)
        if len(group) == 1:
            return row.score
        return row.score - sum(len(p) * p.score for p in group) / sum(len(p) for p in group)

    return each_token(rows, minus_weighted)


def twin_gpg(rows, factor=1.0):
    alpha = len(rows) / max(sum(row.score != 0 for row in rows), 1)
    return [[factor * alpha * number for number in row] for row in twin_dr_grpo(rows)]


def twin_gdpo(rows, weights=DIMENSIONS, **settings):
    def weighted(row):
        return sum(
            weight * standard_score(row.dimensions[key], [p.dimensions[key] for p in peers(rows, row)], **settings)
            for key, weight in weights.items()
        )

    return whitened(each_token(rows, weighted))


def twin_optimal(rows, zero_tail=True):
    def advantage(row, t):
        group = peers(rows, row)
        if row.survives:
            return 0.0
        reached = [p for p in group if len(p) > t]
        if len(group) == 1 or (zero_tail and len(reached) == 1):
            return row.to_go(t)
        energy = sum(p.energy(t) for p in reached) + 1e-8
        return row.to_go(t) - sum(p.to_go(t) * p.energy(t) for p in reached) / energy

    return [[advantage(row, t) for t in range(len(row))] for row in rows]


TWINS = {
    "turn_gae": lambda rows: whitened([[advantage for advantage, _ in row] for row in turn_gae(rows)]),
    "grpo_passk": twin_passk,
    "rloo": twin_rloo,
    "rloo_vectorized": lambda rows: twin_rloo(rows, alone=lambda score: 0.0),
    "opo": twin_opo,
    "gpg": twin_gpg,
    "gdpo": twin_gdpo,
    "reinforce_plus_plus": lambda rows: whitened([[r.to_go(t, GAMMA) for t in range(len(r))] for r in rows]),
    "reinforce_plus_plus_baseline": lambda rows: whitened(twin_dr_grpo(rows)),
    "remax": lambda rows: [[row.to_go(t) - row.baseline for t in range(len(row))] for row in rows],
    "optimal_token_baseline": twin_optimal,
    "tir_optimal_token_baseline": twin_optimal,
}


def twin_returns(name, rows):
    """What each token still earns."""
    if name == "turn_gae":
        return [[advantage + value for advantage, value in row] for row in turn_gae(rows)]
    discount = GAMMA if name == "reinforce_plus_plus" else 1.0
    return [[row.to_go(t, discount) for t in range(len(row))] for row in rows]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", TWINS)
def test_each_estimator_equals_its_twin(name, seed):
    rules.assert_equals_its_twin(name, seed, TWINS[name], twin_returns)


def test_each_has_a_twin():
    assert TWINS.keys() == TABLE["estimator"].keys() == ESTIMATORS.keys()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("name", "settings", "twin"),
    [
        ("grpo_passk", {"norm_adv_by_std_in_grpo": False}, lambda rows: twin_passk(rows, divide=False)),
        ("optimal_token_baseline", {"handle_zero_tail": False}, lambda rows: twin_optimal(rows, zero_tail=False)),
        (
            "optimal_token_baseline",
            {"rollout_is_weights": None},
            lambda rows: twin_optimal([replace(row, rollout_is_weights=[1.0] * len(row)) for row in rows]),
        ),
        ("gpg", {"alpha": 3.0, "f_norm": 2.0}, lambda rows: twin_gpg(rows, factor=1.5)),
        ("gdpo", {"non_tensor_batch": None}, lambda rows: whitened(twin_grpo(rows))),
        ("gdpo", {"norm_adv_by_std_in_grpo": False}, lambda rows: twin_gdpo(rows, divide=False)),
        (
            "gdpo",
            {"config": SimpleNamespace(gdpo_reward_keys=[*DIMENSIONS], gdpo_reward_weights=None)},
            lambda rows: twin_gdpo(rows, weights=dict.fromkeys(DIMENSIONS, 1.0)),
        ),
        ("grpo_passk", {"epsilon": 0.5}, lambda rows: twin_passk(rows, epsilon=0.5)),
        ("gdpo", {"epsilon": 0.5}, lambda rows: twin_gdpo(rows, epsilon=0.5)),
    ],
    ids=[
        "passk without std",
        "zero tail off",
        "without importance weights",
        "gpg's factors",
        "gdpo of the score",
        "gdpo without std",
        "gdpo of equal weights",
        "passk's epsilon",
        "gdpo's epsilon",
    ],
)
def test_each_option_equals_its_twin(name, settings, twin, seed):
    rules.assert_option_equals_its_twin(name, seed, settings, twin)


# The anchors of the specification.

TO_GO = [[1, 1, 1, 0], [0.5, 0.5, 0, 0], [2, 2, 2, 2], [1, 0, 0, 0]]
ZERO_TAIL = [[0.25, 0.190476, 1, 0], [-0.25, -0.309524, 0, 0], [0.307692, 0, 2, 2], [-0.692308, 0, 0, 0]]
NO_TAIL = [[0.25, 0.190476, 0, 0], [-0.25, -0.309524, 0, 0], [0.307692, 0, 0, 0], [-0.692308, 0, 0, 0]]
PLUS_PLUS = [
    [-0.555278, -0.394069, -0.214946, 0],
    [-1.200118, -1.110557, 0, 0],
    [0.89561, 0, 1.21803, 1.576274],
    [-0.214946, 0, 0, 0],
]
PLUS_PLUS_RETURNS = [[0.81, 0.9, 1, 0], [0.45, 0.5, 0, 0], [1.62, 0, 1.8, 2], [1, 0, 0, 0]]


@pytest.mark.parametrize(
    ("name", "per_row"),
    [
        ("grpo_passk", [1.414209, 0, 1.414212, 0]),
        ("reinforce_plus_plus_baseline", [0.294484, -1.030694, 0.957073, -1.693283]),
        ("rloo", [0.5, -0.5, 1, -1]),
        ("rloo_vectorized", [0.5, -0.5, 1, -1]),
        ("opo", [0.2, -0.3, 0.25, -0.75]),
        ("gpg", [0.25, -0.25, 0.5, -0.5]),
    ],
)
def test_outcome_estimators_give_verls_numbers(name, per_row):
    close(ANCHOR.estimate(name)[0], torch.tensor(per_row)[:, None] * MASK)


@pytest.mark.parametrize(
    ("name", "settings", "advantages", "returns"),
    [
        ("reinforce_plus_plus", {}, PLUS_PLUS, PLUS_PLUS_RETURNS),
        ("remax", {}, [[0.5, 0.5, 0.5, 0], [0.25, 0.25, 0, 0], [1, 2, 1, 1], [1, 0, 0, 0]], TO_GO),
        ("optimal_token_baseline", {}, ZERO_TAIL, TO_GO),
        ("optimal_token_baseline", {"handle_zero_tail": False}, NO_TAIL, TO_GO),
    ],
)
def test_tokenwise_estimators_give_verls_numbers(name, settings, advantages, returns):
    found = ANCHOR.estimate(name, **settings)
    close(found[0], advantages)
    close(found[1], returns)


def test_the_sample_alone_in_its_group():
    alone = ANCHOR.take([0])
    for name, score in [("rloo", 1), ("rloo_vectorized", 0), ("opo", 1), ("grpo_passk", 0)]:
        close(alone.estimate(name)[0], [[score] * 3 + [0]])


# What is peculiar to one.


def test_turn_gae_by_hand():
    """Turns of 2, 1 and 1 tokens with an observation after the first; the first earns 1, and the last 2."""
    mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 0, 0, 0]])
    turn_ids = torch.tensor([[0, 0, 0, 1, 2], [5, 5, 5, 5, 5]])
    rewards = torch.tensor([[0.25, 0.75, NAN, 0, 2], [3, 0, 0, 0, 0]])
    values = torch.tensor([[1, 9, NAN, 2, 4], [1, 0, 0, 0, 0]])
    settings = {"values": values, "response_mask": mask, "gamma": 0.5, "lam": 0.5}
    advantages, returns = ESTIMATORS["turn_gae"](rewards, turn_ids=turn_ids, **settings)
    # 2 - 4 = -2; 0 + .5 · 4 - 2 - .25 · 2 = -.5; 1 + .5 · 2 - 1 - .25 · .5 = .875; the other row 3 - 1 = 2
    found = [0.875, 0.875, -0.5, -2, 2]
    close(returns, [[1.875, 1.875, 0, 1.5, 2], [3, 0, 0, 0, 0]])
    close(advantages[mask.bool()], flat(whitened([found])))
    without, _ = ESTIMATORS["turn_gae"](rewards, **settings)  # a response is one turn: 3 - 1 and 3 - 1
    assert not without.any()


def test_equal_rewards_to_go_are_exactly_their_optimal_baseline_wherever_the_tokens_stand():
    torch.manual_seed(0)
    mask = (torch.rand(40, 8) < 0.6).long()
    mask[:, 0] = 1
    rewards = torch.zeros(40, 8)
    rewards[torch.arange(40), 7 - mask.flip(1).argmax(1)] = -0.3  # on the last token of the policy
    tokens = {
        "token_level_rewards": rewards,
        "old_log_probs": torch.rand(40, 8).log(),
        "sum_pi_squared": torch.rand(40, 8),
    }
    batch = Batch(mask, np.array(["a"] * 40, dtype=object), tokens, torch.zeros(40), {})
    assert not batch.estimate("optimal_token_baseline", handle_zero_tail=False)[0].any()


@pytest.mark.parametrize(
    ("keys", "weights", "columns", "message"),
    [
        (None, None, {}, "gdpo_reward_keys is empty"),
        ([], None, {}, "gdpo_reward_keys is empty"),
        (["brief"], None, {"correct": np.ones(4)}, r"names \['brief'\], but the batch has the columns \['correct'\]"),
        (["correct"], [1.0, 2.0], {"correct": np.ones(4)}, "gdpo_reward_weights has 2 numbers for 1 gdpo_reward_keys"),
        (["correct"], None, {"correct": np.array([1, NAN, 0, 0], dtype=object)}, "'correct' is not finite"),
    ],
)
def test_gdpo_says_what_its_rewards_lack(keys, weights, columns, message):
    config = SimpleNamespace(gdpo_reward_keys=keys, gdpo_reward_weights=weights)
    with pytest.raises(AssertionError, match=message):
        ANCHOR.estimate("gdpo", config=config, non_tensor_batch=columns)


def test_a_row_takes_no_part_in_a_reward_that_is_none_there():
    config = SimpleNamespace(gdpo_reward_keys=["code", "maths"], gdpo_reward_weights=None)
    columns = {"code": np.array([0, 1, None, None]), "maths": np.array([None, None, 5.0, None])}
    found = ANCHOR.estimate("gdpo", config=config, non_tensor_batch=columns)[0]
    rest = {"code": np.array([0, 1, 0, 0]), "maths": np.zeros(4)}  # of maths alone in its group: no baseline
    close(found, ANCHOR.estimate("gdpo", config=config, non_tensor_batch=rest)[0])
