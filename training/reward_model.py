"""Scores by a learned reward model, beside those of a function or an environment.

In training a response's score is the model's, plus reward.reward_model.function_weight times what the function says.
Validation is scored by the function alone, so that a policy that only pleases the model is seen to; without a function
by the model.
"""

import torch
from transformers import PreTrainedTokenizerBase

from configs.schema import RewardConfig
from data.protocol import DataProto, object_array
from training.reward import RewardManager, add_scores, no_function, place_scores
from training.roles import RewardModel


def scored(
    batch: DataProto,
    manager: RewardManager,
    model: RewardModel | None,
    tokenizer: PreTrainedTokenizerBase,
    config: RewardConfig,
) -> DataProto:
    """`batch` as `add_scores` has it, and, with a reward model, its score in place of the manager's, or on top of it.

    Beside it come, among meta_info["reward_extra_keys"], `rm_score` and `function_score`, each alone.

    Raises:
        FloatingPointError: a score of the model is not finite.
        as `add_scores`.
    """
    batch = add_scores(batch, manager, tokenizer, config)
    if model is None:
        return batch
    scores = model.compute_rm_score(batch).batch["rm_scores"]
    if not torch.isfinite(scores).all():
        row = int((~torch.isfinite(scores)).nonzero()[0])
        raise FloatingPointError(
            f"the reward model gives {scores[row].item()} to row {row} of a batch: its weights are not finite, or "
            "reward.reward_model.fsdp_config.dtype=float32 is needed."
        )
    beside = batch.batch["token_level_scores"]
    extra = {"rm_score": scores} | ({} if manager is no_function else {"function_score": beside.sum(1)})
    batch.non_tensor_batch.update({name: object_array(values.tolist()) for name, values in extra.items()})
    batch.meta_info["reward_extra_keys"] = sorted([*batch.meta_info["reward_extra_keys"], *extra])
    own = place_scores(scores, batch.batch["response_mask"], "reward model")
    batch.batch["token_level_scores"] = own + config.reward_model.function_weight * beside
    return batch
