"""Reward managers in verl's contracts."""

import pytest

from configs.schema import RewardConfig, RewardFunctionConfig, RewardManagerConfig
from extras.verl.managers import get_reward_manager_cls, register
from tests.test_reward import TOKENIZER, rollout
from training.reward import add_scores, load_reward_manager, reward_metrics

MANAGERS = """
import torch
from extras.verl.managers import register

@register("mine")
class Mine:
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source"):
        self.compute_score = compute_score

    def __call__(self, data, return_dict=False):
        scores = torch.zeros(data.batch["responses"].shape)
        for row in range(len(data)):
            item = data[row]
            length = int(item.batch["attention_mask"][-scores.shape[1]:].sum())
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            scores[row, length - 1] = self.compute_score(item.responses, truth)
        extra = {"acc": [float(score > 0) for score in scores.sum(1)]}
        return {"reward_tensor": scores, "reward_extra_info": extra} if return_dict else scores

class Judge:
    def __init__(self, config, tokenizer, compute_score):
        self.compute_score = compute_score

    async def run_single(self, data):
        assert len(data) == 1
        [text], [truth] = data.responses, data.ground_truths
        return {"reward_score": self.compute_score(text, truth), "reward_extra_info": {"acc": 1.0}}

def compute_score(solution_str, ground_truth):
    return float(solution_str == ground_truth)
"""


@pytest.fixture(scope="module")
def managers(tmp_path_factory) -> str:
    """A file that registers a class, which is loaded once."""
    file = tmp_path_factory.mktemp("users") / "managers.py"
    file.write_text(MANAGERS)
    return str(file)


@pytest.mark.parametrize("name", ["mine", "Judge"])
def test_managers_in_verls_contracts_score_a_batch_or_a_row(managers, name):
    file = managers
    config = RewardConfig(RewardFunctionConfig(file), reward_manager=RewardManagerConfig(file, name))
    batch = rollout("4", "57", reward_model=[{"ground_truth": "4"}] * 2)
    batch.batch["attention_mask"] = batch.batch["response_mask"]
    batch = add_scores(batch, load_reward_manager(config, TOKENIZER, None), TOKENIZER, config)
    assert batch.token_level_scores.tolist()[0][0] == 1.0 and batch.token_level_scores.sum() == 1.0
    assert "reward/acc/mean" in reward_metrics(batch)


def test_an_unknown_manager_and_a_name_used_twice_are_refused():
    config = RewardConfig(reward_manager=RewardManagerConfig(name="nobody"))
    with pytest.raises(ValueError, match=r"Unknown reward manager: nobody.*@register.'nobody'"):
        load_reward_manager(config, TOKENIZER, None)

    class One:
        pass

    assert register("one of the tests")(One) is register("one of the tests")(One) is One
    assert get_reward_manager_cls("one of the tests") is One
    with pytest.raises(ValueError, match="One already"):
        register("one of the tests")(type("Two", (), {}))
