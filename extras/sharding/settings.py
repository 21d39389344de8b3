"""The settings of sharding, tensor parallelism and offload, among those of models in training and of the reference."""

from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from configs.settings import Frozen, group, setting

ACTOR = "actor_rollout_ref.actor"


@dataclass
class OffloadSettings(Frozen):
    param_offload: bool = setting(False, "Keep the weights in main memory while their model is idle.")


@dataclass
class MixedPrecisionConfig(Frozen):
    param_dtype: str = setting(
        "float32",
        "Of several workers: what weights are gathered in to train and to score. bfloat16, where it is computed in "
        "(fsdp_config.dtype): half is sent, and half is whole at a time; norms and embeddings are rounded, too, as "
        "products round matrices. auto: what is computed in.",
        choices=("float32", "bfloat16", "auto"),
    )
    reduce_dtype: str = setting(
        "float32",
        "Of several workers: what gradients are summed in over them. bfloat16 sends half as much, and rounds each sum.",
        choices=("float32", "bfloat16"),
    )


@dataclass
class TrainSettings(Frozen):
    optimizer_offload: bool = setting(
        False, "Keep AdamW's moments in main memory and step there: saves 8 bytes per weight on a GPU."
    )
    fsdp_size: int = setting(
        -1,
        "Workers that hold a model together, sharded by FSDP2; -1: all. A divisor of their number makes replicas, each "
        "over neighbours in rank, and 1 has every worker hold whole models.",
        ge=-1,
    )
    reshard_after_forward: bool = setting(
        True,
        "Of several workers: drop the others' parts of a layer after its forward, and gather them again for its "
        "backward. False is faster, and holds the whole model meanwhile.",
    )
    mixed_precision: MixedPrecisionConfig = group(MixedPrecisionConfig, "What workers send each other.")


@dataclass
class RefFSDPConfig(Frozen):
    param_offload: bool = setting(False, "As in actor.fsdp_config, for the reference.")


@dataclass
class RefSettings(Frozen):
    fsdp_config: RefFSDPConfig = group(RefFSDPConfig, "Offloading.")


@dataclass
class OptimSettings(Frozen):
    moments_dtype: str = setting(
        "float32",
        "What AdamW's moments are kept in; bfloat16: 4 bytes a weight instead of 8, and other numbers in the run.",
        choices=("float32", "bfloat16"),
    )


@dataclass
class ActorSettings(Frozen):
    tensor_parallel_size: int = setting(
        1,
        "Workers that compute each layer together, split by heads and columns: neighbours in rank, on one machine. The "
        "critic's layers too.",
        ge=1,
    )

    @property
    def peers(self) -> int:
        return self.tensor_parallel_size

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.strategy == "replicas" and (keys := asks_for_it(config)):
            raise ConfigError(f"{key}.strategy=replicas, and {keys[0]} is set: it takes strategy=fsdp2.")


def asks_for_it(config: Any) -> list[str]:
    """Lists the settings of `config` that need more than plain replicas, even with one worker or whole models."""
    actor, ref, rm = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref, config.reward.get("reward_model")
    fsdp, prime = actor.fsdp_config, config.algorithm.get("prime")
    flags = {
        f"{ACTOR}.tensor_parallel_size": actor.tensor_parallel_size > 1,
        f"{ACTOR}.fsdp_config.fsdp_size": fsdp.fsdp_size > 1,
        f"{ACTOR}.fsdp_config.param_offload": fsdp.param_offload,
        f"{ACTOR}.fsdp_config.optimizer_offload": fsdp.optimizer_offload,
        f"{ACTOR}.optim.moments_dtype": actor.optim.moments_dtype != "float32",
        "critic.optim.moments_dtype": config.critic.optim.moments_dtype != "float32",
        "algorithm.prime.optim.moments_dtype": bool(prime) and prime.optim.moments_dtype != "float32",
        "actor_rollout_ref.ref.fsdp_config.param_offload": ref.fsdp_config.param_offload,
        "reward.reward_model.fsdp_config.param_offload": bool(rm) and rm.fsdp_config.param_offload,
    }
    return [key for key, is_asked in flags.items() if is_asked]


def shard_count(fsdp_size: int, workers: int) -> int:
    """Counts the workers that hold a model together: `fsdp_size`; all, where that is -1 or more than there are.

    Raises ConfigError if the workers cannot be dealt out like that; names both numbers.
    """
    count = workers if fsdp_size < 0 else min(fsdp_size, workers)
    if count == 0 or workers % count:
        key = f"{ACTOR}.fsdp_config.fsdp_size"
        raise ConfigError(f"{key}={fsdp_size}: {workers} workers cannot be dealt out so. Take a divisor, or -1: all.")
    return count
