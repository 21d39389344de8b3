"""The estimators of the catalogue: what is peculiar to one.

What holds for every estimator is in tests/test_estimators.py, which runs it for these, too; extras/verl/tests holds
them against verl's own.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from configs.extras import TABLE
from configs.schema import AlgorithmConfig
from data.protocol import DataProto
from extras.algorithms.estimators import ESTIMATORS
from tests.batches import close
from tests.test_estimators import ANCHOR, NAN, Batch, flat, whitened
from training.advantage import Estimator


def test_the_table_names_each():
    assert ESTIMATORS.keys() == {name for name, path in TABLE["estimator"].items() if "extras.algorithms." in path}


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


def of_one_prompt(name, scores, **settings):
    rewards = torch.tensor(scores)[:, None]
    return ESTIMATORS[name](rewards, torch.ones(len(scores), 1), ["a"] * len(scores), **settings)[0][:, 0]


def test_passk_pays_the_best_its_lead_over_the_second():
    close(of_one_prompt("grpo_passk", [3.0, -1.0, 1.0], norm_adv_by_std_in_grpo=False), [2, 0, 0])


def test_sppo_counts_ties_as_half_a_win():
    # of three, the two best win (½ + ½ + 1) / 3, and the last (0 + 0 + ½) / 3
    close(of_one_prompt("sppo", [2.0, 2.0, -1.0]), [1 / 6, 1 / 6, -1 / 3])


@pytest.mark.parametrize(("scores", "wrong"), [([1.0, 1, 1, 0, 0], 0), ([1.0, 1, 1, -1, -1], -1)])
def test_fapo_puts_right_answers_that_are_flawed_halfway_to_wrong_ones(scores, wrong):
    """The third and the last are flawed; the last, which is wrong, loses nothing. A penalty of 0.1 for length stays."""
    settings = {"flawed": [False, False, True, False, True], "token_level_scores": torch.tensor(scores)[:, None]}
    settings |= {"wrong_score": wrong, "norm_adv_by_std_in_grpo": False}
    unit = (1 - wrong) / 2
    close(of_one_prompt("fapo", scores, **settings), [unit * share for share in (1, 1, 0, -1, -1)])
    moved = of_one_prompt("fapo", [score - 0.1 * (row == 2) for row, score in enumerate(scores)], **settings)
    close(moved[2] - moved[0], -unit - 0.1)


@pytest.mark.parametrize(("sound", "wrong", "sign"), [(1, 2, 1), (2, 2, 0), (3, 2, -1)])
def test_fapo_learns_a_flawed_answer_while_wrong_ones_are_more_than_sound_ones(sound, wrong, sign):
    scores, flawed = [1.0] * (1 + sound) + [0.0] * wrong, [True] + [False] * (sound + wrong)
    found = of_one_prompt("fapo", scores, flawed=flawed, token_level_scores=torch.tensor(scores)[:, None])
    assert found[0].sign() == sign


def test_fapo_needs_a_reward_that_marks_flawed_answers():
    columns = {name: torch.ones(2, 1) for name in ("token_level_rewards", "token_level_scores", "response_mask")}
    with pytest.raises(ValueError, match=r"adv_estimator=fapo needs \['flawed'\].* come from the data and the reward"):
        Estimator(AlgorithmConfig(adv_estimator="fapo"))(DataProto.from_dict(columns, {"uid": ["a", "a"]}))


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
