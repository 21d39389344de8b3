"""Spreads models over workers: FSDP2's shards, tensor parallelism, and offload to main memory."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from configs.errors import ConfigError
from configs.schema import AgentConfig, Config, OptimConfig
from data.pretrained import load_model_config
from extras.sharding.fsdp2 import Sharding, make_mesh, shard_count
from extras.sharding.offload import Offload, Residence, make_optimizer
from extras.sharding.tensor_parallel import KEY as PARTS_KEY
from extras.sharding.tensor_parallel import check_split
from training.roles import needs_critic
from workers.collectives import compute_together
from workers.parallel import Replicas


class Sharded:
    """The hook `parallel`: makes the layout of a role, shards of several workers or what one offloads."""

    def __new__(cls, config: Config, device: torch.device, dtype: torch.dtype, role: str) -> Replicas:
        policy, fsdp = config.actor_rollout_ref, config.actor_rollout_ref.actor.fsdp_config

        def offloads(asked: bool) -> bool:
            return asked and on_gpu(device)

        asked = {
            "policy": Offload(offloads(fsdp.optimizer_offload), offloads(fsdp.param_offload)),
            "ref": Offload(module=offloads(policy.ref.fsdp_config.param_offload)),
            "rm": Offload(module=offloads(config.reward.reward_model.fsdp_config.param_offload)),
        }[role]
        if role == "rm":  # its layers are whole
            mesh = mesh_of(-1, device, 1)
            return Offloaded(asked) if mesh is None else Sharding(mesh, offload=asked.any)
        parts = policy.actor.tensor_parallel_size
        if role == "policy":
            compute_together(parts)
        mesh = mesh_of(fsdp.fsdp_size, device, parts)
        if mesh is None:
            return Offloaded(asked)
        gathered = gather_dtype(fsdp.mixed_precision.param_dtype, dtype)
        reduced = getattr(torch, fsdp.mixed_precision.reduce_dtype)
        return Sharding(mesh, fsdp.reshard_after_forward, asked.any, gathered, reduced)

    @staticmethod
    def check(config: Config, workers: int) -> None:
        check_layout(config, workers)


def on_gpu(device: torch.device) -> bool:
    """Says whether there is another memory than the main one."""
    return device.type != "cpu"


@cache
def mesh_of(fsdp_size: int, device: torch.device, parts: int) -> Any:
    return make_mesh(fsdp_size, device, parts)


class Offloaded(Replicas):
    """One worker's models, in main memory while they have nothing to do."""

    def __init__(self, offload: Offload) -> None:
        self.offload = offload

    def at_work(self, model: PreTrainedModel) -> Callable[[], AbstractContextManager]:
        return Residence(model, self.offload.module).at_work

    def bytes_held(self, numbers: int, optim: OptimConfig | None) -> int:
        held = super().bytes_held(numbers, optim)
        moments = held - super().bytes_held(numbers, None)
        return held - 4 * numbers * self.offload.module - moments * (self.offload.moments and optim is not None)

    def optimizer(self, weights: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
        return make_optimizer(iter(weights), optim, self.offload.moments)


def gather_dtype(name: str, computing: torch.dtype) -> torch.dtype:
    """Chooses what the weights of a sharded model are gathered in; auto is what it computes in.

    Raises:
        ConfigError: it computes in more than `name`.
    """
    dtype = computing if name == "auto" else getattr(torch, name)
    if dtype.itemsize < computing.itemsize:
        key = "actor_rollout_ref.actor.fsdp_config"
        raise ConfigError(
            f"{key}.mixed_precision.param_dtype={name}: this run computes in {computing}, and weights are gathered in "
            f"no less. Set {key}.dtype=bfloat16, or param_dtype=auto."
        )
    return dtype


def check_layout(config: Config, workers: int) -> None:
    """Raises ConfigError where models cannot be split and sharded over so many workers as `config` says."""
    policy, parts = config.actor_rollout_ref, config.actor_rollout_ref.actor.tensor_parallel_size
    if parts > 1:
        paths = {"actor_rollout_ref.model.path": policy.model.path}
        if needs_critic(config):
            paths["critic.model.path"] = config.critic.model.path
        for key, path in paths.items():
            check_split(load_model_config(policy.model, path, key), parts, workers // config.trainer.nnodes)
        if policy.model.adapter != "none":
            raise ConfigError(f"{PARTS_KEY}={parts}: LoRA's matrices are not split. Set it to 1, and shard the model.")
        plays = config.env.id or policy.rollout.multi_turn.enable or policy.rollout.agent != AgentConfig()
        if policy.rollout.name == "hf" and plays:
            raise ConfigError(
                f"{PARTS_KEY}={parts}: workers that compute a layer together would have to play each episode in the "
                "same order of time, which nobody can promise. Set actor_rollout_ref.rollout.name=vllm."
            )
    shard_count(policy.actor.fsdp_config.fsdp_size, workers // parts)
