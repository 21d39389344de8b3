"""Settings of the alarms, and of the samples that are printed."""

from dataclasses import dataclass

from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    no_signal_steps: int = setting(
        10, "Warn after this many steps in a row whose rewards teach nothing, with the likeliest cause; 0: never.", ge=0
    )
    max_rollout_mismatch: float | None = setting(
        0.05,
        "Say so when rollout_mismatch/abs_log_prob_diff (engine against policy, nats a token) is above; null: never.",
        gt=0,
    )
    log_val_generations: int = setting(2, "Samples printed at each validation.", ge=0)
