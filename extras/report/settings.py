"""Settings of the rollouts that a run keeps."""

from dataclasses import dataclass

from configs.settings import Frozen, setting


@dataclass
class Settings(Frozen):
    switches = "rollout_data_dir: rollout_data_freq; sample_groups: sample_max_mb"
    rollout_data_dir: str | None = setting(None, "Write each step's rollouts here, N.jsonl; null: do not.")
    rollout_data_freq: int = setting(1, "Write rollouts every this many steps.", ge=1)
    validation_data_dir: str | None = setting(None, "Write each validation's rollouts here; null: do not.")
    sample_groups: int = setting(
        2, "Groups of training samples kept in samples/ of the run's folder, at about fifty steps; 0: none.", ge=0
    )
    sample_max_mb: int = setting(50, "Largest size of samples/ in MB; then some files are removed.", ge=1)
