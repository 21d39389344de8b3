"""The role of the learned reward model; training/roles.py, which is imported first, registers it."""

from transformers import AutoModelForSequenceClassification

from training.roles import RoleSpec

ROLE = RoleSpec(
    name="rm",
    build="extras.reward_model.model:build_reward_model",
    section="reward.reward_model",
    head=AutoModelForSequenceClassification,
    columns=("rm_scores",),
    compute="compute_rm_score",
    objects=("raw_prompt",),
    like_policy=False,
    reads=lambda config: {"compute_rm_score": ()},
    plays=lambda config: config.reward.reward_model.enable,
)
