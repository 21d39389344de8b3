"""The settings that only estimators and policy losses of this folder read, under verl's names."""

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, group, setting


@dataclass
class FilterGroupsConfig(Frozen):
    enable: bool = setting(False, "Generate until enough groups differ in `metric` within themselves (DAPO).")
    metric: str = setting("reward", "Score (reward), or a number beside it; groups with equal values are dropped.")
    accuracy_lower_bound: float | None = setting(None, "Drop groups whose mean of it is lower, too.")
    accuracy_upper_bound: float | None = setting(None, "Drop groups whose mean of it is higher, too.")
    max_num_gen_batches: int = setting(10, "Most generations per step, then equal groups fill up; 0: any.", ge=0)

    def check(self, config: Any, key: str) -> None:
        if self.enable and (n := config.actor_rollout_ref.rollout.n) < 2:
            raise ConfigError(f"{key}.enable=true with actor_rollout_ref.rollout.n={n}: one sample cannot differ.")


@dataclass
class Settings(Frozen):
    switches = "filter_groups.enable: filter_groups"
    filter_groups: FilterGroupsConfig = group(FilterGroupsConfig, "Dynamic sampling.")
    gdpo_reward_keys: list[str] | None = setting(None, "For gdpo: numbers beside the score, normalised one by one.")
    gdpo_reward_weights: list[float] | None = setting(None, "For gdpo: the weights of those numbers; null: 1 each.")


@dataclass
class RhoConfig(Frozen):
    switches = "type=constant: value; type=kl: clip_lower"
    type: str = setting("kl", "By how much the policy has moved (kl), or constant.", choices=("kl", "constant"))
    value: float = setting(0.9, "Share of its counts that a row keeps, with constant.", gt=0, le=1)
    clip_lower: float = setting(0.875, "Smallest share that it keeps, with kl.", gt=0, le=0.96)


@dataclass
class SPOConfig(Frozen):
    rho: RhoConfig = group(RhoConfig, "What a row's counters keep when it is answered again.")


@dataclass
class TrainerSettings(Frozen):
    spo: SPOConfig = group(SPOConfig, "How the baseline of algorithm.adv_estimator=spo forgets.")


@dataclass
class ActorSettings(Frozen):
    tau_pos: float = setting(1.0, "How soon sapo's gradient fades off policy where the advantage is positive.", gt=0)
    tau_neg: float = setting(1.05, "How soon sapo's gradient fades where the advantage is not positive.", gt=0)
    gvpo_beta: float = setting(0.1, "How strongly gvpo holds the policy to the one that drew the answers.", gt=0)
    dpo_beta: float = setting(0.1, "How strongly pair and spin hold the policy to the reference.", gt=0)
    flowrl_beta: float = setting(15.0, "How many nats a token flowrl asks for each unit of advantage.", gt=0)
    sppo_eta: float = setting(1.0, "How many nats an answer sppo asks for each unit of advantage.", gt=0)


@dataclass
class LossSettings(Frozen):
    clip_cov_ratio: float = setting(0.0002, "Share of the tokens that clip_cov leaves out.", gt=0, le=1)
    clip_cov_lb: float = setting(1.0, "Smallest covariance of tokens that clip_cov leaves out.")
    clip_cov_ub: float = setting(5.0, "Largest covariance of tokens that clip_cov leaves out.")
    kl_cov_ratio: float = setting(0.0002, "Share of the tokens that kl_cov holds back.", gt=0, le=1)
    ppo_kl_coef: float = setting(0.1, "Weight of |log ratio| at the tokens that kl_cov holds back.", ge=0)
    dro_beta: float | None = setting(None, "Weight of the squared log-ratio in dro, which needs it.", gt=0)

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.loss_mode == "dro" and self.dro_beta is None:
            raise ConfigError(f"{key}.loss_mode=dro needs {key}.dro_beta, e.g. 0.05.")
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ConfigError(f"{key}.clip_cov_lb={self.clip_cov_lb} must be below clip_cov_ub={self.clip_cov_ub}.")
