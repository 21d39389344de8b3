"""The score of the learned reward model in the step: in place of the other reward's, or added to it."""

from typing import Any

import torch

from configs.schema import Config
from data.chat import RM_KEY, reward_tokenizer
from data.pretrained import check_is_reward_model, load_model_config, load_tokenizer
from data.protocol import DataProto, object_array
from data.types import Metrics, Stage
from training.reward import place_scores, reward_of


def zero_reward(data: DataProto) -> list[float]:
    """Scores every row 0: the reward of a run that only the model scores."""
    return [0.0] * len(data)


def load(settings: Any, run: Any) -> Any:
    """Loads the reward of a run that only the model scores (the entry of the table)."""
    return zero_reward


class ModelScores(Stage):
    """Puts the model's score in place of the reward's, plus function_weight times that one.

    Validation is scored by the other reward alone, if there is one: it shows what a policy gains that only pleases the
    model. Beside the score come `rm_score` and `function_score`, each alone.

    Raises:
        FloatingPointError: a score of the model is not finite.
    """

    at = "scored"

    @classmethod
    def check(cls, config: Config) -> None:
        model = config.reward.reward_model.model
        check_is_reward_model(load_model_config(model, model.path, f"{RM_KEY}.path"), f"{RM_KEY}.path")
        reward_tokenizer(model, load_tokenizer(config.actor_rollout_ref.model))

    def __call__(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        is_alone = reward_of(self.config.reward, self.config.env.id) == "model"
        if is_alone or not batch.meta_info.get("validate"):
            add_model_scores(batch, self.trainer.roles["rm"], self.config.reward.reward_model.function_weight, is_alone)
        return {}


def add_model_scores(batch: DataProto, model: Any, function_weight: float, is_alone: bool) -> None:
    scores = model.rows("compute_rm_score", batch).batch["rm_scores"]
    if not torch.isfinite(scores).all():
        row = int((~torch.isfinite(scores)).nonzero()[0])
        raise FloatingPointError(
            f"the reward model gives {scores[row].item()} to row {row} of a batch: its weights are not finite, or "
            "reward.reward_model.fsdp_config.dtype=float32 is needed."
        )
    beside = batch.batch["token_level_scores"]
    extra = {"rm_score": scores} | ({} if is_alone else {"function_score": beside.sum(1)})
    batch.non_tensor_batch.update({name: object_array(values.tolist()) for name, values in extra.items()})
    batch.meta_info["reward_extra_keys"] = sorted([*batch.meta_info["reward_extra_keys"], *extra])
    placed = place_scores(scores, batch.batch["response_mask"], "reward model")
    batch.batch["token_level_scores"] = placed + function_weight * beside
