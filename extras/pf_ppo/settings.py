"""The settings of PF-PPO, among those of the algorithm."""

from dataclasses import dataclass

from configs.settings import Frozen, group, setting


@dataclass
class PFPPOConfig(Frozen):
    switches = "reweight_method=pow: weight_pow"
    reweight_method: str = setting(
        "pow", "How often a row is drawn, from its score.", choices=("pow", "max_min", "max_random")
    )
    weight_pow: float = setting(2.0, "Exponent of pow.")


@dataclass
class Settings(Frozen):
    switches = "use_pf_ppo: pf_ppo"
    use_pf_ppo: bool = setting(False, "Resample rows by their score before learning (PF-PPO).")
    pf_ppo: PFPPOConfig = group(PFPPOConfig, "How PF-PPO draws the rows.")
