"""Spreads models over workers: FSDP2's shards, tensor parallelism, and offload to main memory."""

from functools import cache
from typing import Any

import torch

from configs.errors import ConfigError
from configs.schema import AgentConfig, Config
from data.pretrained import load_model_config, vision_of
from extras.sharding.settings import asks_for_it, shard_count
from training.roles import models_of, needed_roles
from workers.collectives import Peers, group_size, new_group, rank
from workers.parallel import Replicas

ACTOR = "actor_rollout_ref.actor"
PARTS_KEY = f"{ACTOR}.tensor_parallel_size"


class Sharded:
    """The hook `parallel`: makes the layout of a role, shards of several workers or what one offloads; plain replicas
    where nothing is spread."""

    def __new__(cls, config: Config, device: torch.device, dtype: torch.dtype, role: str) -> Replicas:
        policy, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config
        if not asks_for_it(config) and (group_size() == 1 or fsdp.fsdp_size == 1):
            return Replicas()
        from extras.sharding.fsdp2 import Sharding
        from extras.sharding.offload import Offload, Offloaded

        def offloads(setting: bool) -> bool:
            return setting and on_gpu(device)

        if role == "rm":  # its layers are whole
            judge = config.reward.get("reward_model")
            offload = Offload(module=bool(judge) and offloads(judge.fsdp_config.param_offload))
            mesh = mesh_of(-1, device, 1)
            return Offloaded(offload) if mesh is None else Sharding(mesh, offload=offload.any)
        if role == "ref":
            offload = Offload(module=offloads(policy.ref.fsdp_config.param_offload))
        else:
            offload = Offload(offloads(fsdp.optimizer_offload), offloads(fsdp.param_offload))
            compute_together(policy.actor.tensor_parallel_size)
        mesh = mesh_of(fsdp.fsdp_size, device, policy.actor.tensor_parallel_size)
        if mesh is None:
            return Offloaded(offload)
        gathered = gather_dtype(fsdp.mixed_precision.param_dtype, dtype)
        reduced = getattr(torch, fsdp.mixed_precision.reduce_dtype)
        return Sharding(mesh, fsdp.reshard_after_forward, offload.any, gathered, reduced)

    @staticmethod
    def check(config: Config, workers: int) -> None:
        """Raises ConfigError where models cannot be split and sharded over so many workers as `config` says."""
        policy, parts = config.actor_rollout_ref, config.actor_rollout_ref.actor.tensor_parallel_size
        if parts > 1:
            check_parts(config, workers)
        shard_count(policy.actor.fsdp_config.fsdp_size, workers // parts)


def compute_together(size: int) -> None:
    """Makes `size` neighbours in rank peers, which are given the same rows; every rank calls it at the same time."""
    Peers.size, Peers.group = size, None
    for index in range(size) if size > 1 else ():
        group = new_group([*range(index, group_size(), size)])
        if rank() % size == index:
            Peers.group = group


def on_gpu(device: torch.device) -> bool:
    """Says whether there is another memory than the main one."""
    return device.type != "cpu"


@cache
def mesh_of(fsdp_size: int, device: torch.device, parts: int) -> Any:
    from extras.sharding.fsdp2 import make_mesh

    return make_mesh(fsdp_size, device, parts)


def gather_dtype(name: str, computing: torch.dtype) -> torch.dtype:
    """Chooses what the weights of a sharded model are gathered in: `name`, or what it computes in, and no less."""
    dtype = computing if name == "auto" else getattr(torch, name)
    if dtype.itemsize < computing.itemsize:
        raise ConfigError(
            f"{ACTOR}.fsdp_config.mixed_precision.param_dtype={name}: this run computes in {computing}. Set "
            f"{ACTOR}.fsdp_config.dtype=bfloat16, or param_dtype=auto."
        )
    return dtype


def check_parts(config: Config, workers: int) -> None:
    """Raises ConfigError where layers cannot be split over `tensor_parallel_size` neighbours."""
    from extras.sharding.tensor_parallel import check_split

    policy, parts = config.actor_rollout_ref, config.actor_rollout_ref.actor.tensor_parallel_size
    for spec, key, model in models_of(config, needed_roles(config)):
        if spec.like_policy:
            model_config = load_model_config(model, model.path, key)
            if vision_of(model_config):
                raise ConfigError(f"{PARTS_KEY}={parts}: a model that reads images is not split: set it to 1.")
            check_split(model_config, parts, workers // config.trainer.nnodes)
    if policy.model.adapter != "none":
        raise ConfigError(f"{PARTS_KEY}={parts}: LoRA's matrices are not split. Set it to 1, and shard the model.")
    plays = config.env.id or policy.rollout.multi_turn.enable or policy.rollout.agent != AgentConfig()
    if policy.rollout.name == "hf" and plays:
        raise ConfigError(
            f"{PARTS_KEY}={parts}: the hf engine cannot play episodes in step on several workers. "
            "Set actor_rollout_ref.rollout.name=vllm."
        )
