"""The settings of PRIME, among those of the algorithm; configs/schema.py, which is imported first, puts them there."""

from dataclasses import dataclass
from typing import Any

from omegaconf import II, OmegaConf

from configs.errors import ConfigError
from configs.schema import OptimConfig
from configs.settings import Frozen, group, setting

KEY = "algorithm.prime"

OmegaConf.register_new_resolver("is_prime", lambda estimator: estimator == "prime", replace=True)


@dataclass
class PrimeModelConfig(Frozen):
    path: str | None = setting(
        II("actor_rollout_ref.model.path"), "Directory that the process reward model starts from; default: the actor's."
    )
    ref_path: str | None = setting(
        II("algorithm.prime.model.path"), "Directory of the frozen model it is compared with; default: its own start."
    )


@dataclass
class PrimeConfig(Frozen):
    """Names are verl-recipe's (reward_model.model.beta_train, reward_model.prime_norm), without their prefixes."""

    enable: bool = setting(
        "${is_prime:${algorithm.adv_estimator}}",
        "Train a process reward model on the outcomes; true: also for an estimator of yours that names prm_rewards.",
    )
    model: PrimeModelConfig = group(PrimeModelConfig, "The process reward model, and what it is compared with.")
    update: str = setting(
        "before",
        "Learn, then score; after: score by the passes that learn; reverse: score, then learn; none: only score.",
        choices=("before", "after", "reverse", "none"),
    )
    loss_type: str = setting(
        "ce",
        "Each answer's outcome by itself; dpo: against those of its prompt that did better or worse; bon_rm, bon_acc: "
        "the same, weighted by how sure it is the best of n, by the model's reward or by the outcome.",
        choices=("ce", "dpo", "bon_rm", "bon_acc"),
    )
    beta_train: float = setting(0.05, "Reward for each nat of the log-ratio of the two models.", gt=0)
    lam: float = setting(0.0, "Share of the next token's reward that counts for a token as well.", ge=0, le=1)
    norm: str = setting(
        "batch_norm",
        "Divide the rewards by the batch's largest reward to go, or leave them.",
        choices=("batch_norm", "none"),
    )
    ppo_mini_batch_size: int | None = setting(
        II("actor_rollout_ref.actor.ppo_mini_batch_size"), "Prompts an optimiser step.", ge=1
    )
    optim: OptimConfig = group(OptimConfig, "Optimiser and schedule.", weight_decay=0.0, clip_grad=10.0)

    ppo_epochs, shuffle = 1, False  # passes over each batch, and their order: as in verl, no settings

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if config.algorithm.adv_estimator == "prime" and not self.enable:
            raise ConfigError(f"{key}.enable=false, and algorithm.adv_estimator=prime needs it: leave that out.")
        if self.enable and config.env.mode == "episode" and config.env.history == "turns":
            raise ConfigError(f"{key} with env.history=turns: it scores whole answers: set env.history=transcript.")
        rewards = config.reward.get("reward_model")
        if self.enable and rewards and rewards.enable:
            raise ConfigError(
                f"{key} with reward.reward_model.enable=true: outcomes are a rule's, and PRIME's own model is that of "
                f"{key}.model.path (in verl reward_model.model.path): leave reward_model out."
            )


@dataclass
class Settings(Frozen):
    switches = "prime.enable: prime"
    prime: PrimeConfig = group(PrimeConfig, "PRIME's process reward model; it learns from outcomes alone.")
