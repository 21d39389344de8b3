"""The role of PRIME's process reward model; training/roles.py, which is imported first, registers it."""

from transformers import AutoModelForCausalLM

from configs.errors import ConfigError
from configs.schema import Config, PretrainedModelConfig
from data.pretrained import check_same_tokens
from extras.prime.settings import KEY
from training.roles import RoleSpec

LEARNS_FROM = ("prm_reference", "prm_outcomes", "prm_opponents", "prm_weights")  # beside the rows


def takes_part(config: Config) -> bool:
    return config.algorithm.prime.enable and not config.trainer.val_only


def reference_column(config: Config) -> str:
    """Names the column of the reference's log-probs: the policy's reference is asked if it is the same model, and
    scores at temperature 1, as the process reward model does."""
    policy = config.actor_rollout_ref
    is_policys = config.algorithm.prime.model.ref_path == policy.ref.model.path and policy.rollout.temperature == 1
    return "ref_log_prob" if is_policys else "prm_ref_log_prob"


def models(config: Config) -> dict[str, PretrainedModelConfig]:
    """Returns the settings of the model and, unless the policy's reference stands for it, of what it is compared with,
    by the keys of their paths."""
    paths, is_own = config.algorithm.prime.model, reference_column(config) == "prm_ref_log_prob"
    listed = {"path": paths.path} | ({"ref_path": paths.ref_path} if is_own else {})
    return {f"{KEY}.model.{name}": config.policy_model.at(path) for name, path in listed.items()}


def check_models(config: Config) -> None:
    """Raises ConfigError unless both models have the policy's tokens, and are split as the policy is."""
    models, policy = config.algorithm.prime.model, config.policy_model
    for key, path in ((f"{KEY}.model.path", models.path), (f"{KEY}.model.ref_path", models.ref_path)):
        if path != policy.path:
            check_same_tokens(policy, path, key)
    if (parts := config.actor_rollout_ref.actor.peers) > 1 and models.ref_path not in (models.path, policy.path):
        raise ConfigError(f"{KEY}.model.ref_path={models.ref_path}: of {parts} workers a layer it must be model.path.")


ROLE = RoleSpec(
    name="prm",
    build="extras.prime.model:build_prm",
    section="algorithm.prime",
    head=AutoModelForCausalLM,
    model=models,
    columns=("prm_log_probs", "prm_ref_log_prob"),
    compute="compute_prm",
    arguments=("columns",),
    update="update_prm",
    in_stage=True,
    plays=takes_part,
    check=check_models,
    reads=lambda config: {"compute_prm": (), "update_prm": LEARNS_FROM},
)
