"""Roles of the extra: the ends of the wire between pools, and what generates by itself (training/roles.py)."""

from configs.schema import Config
from training.roles import RoleSpec


def generates_apart(config: Config) -> bool:
    return bool(config.actor_rollout_ref.rollout.roles_apart)


SENDER = RoleSpec(name="sender", build="extras.overlap.pools:Sender", build_order=1, plays=generates_apart)
RECEIVER = RoleSpec(name="receiver", build="extras.overlap.pools:Receiver", build_order=1, plays=generates_apart)
GENERATOR = RoleSpec(
    name="generator",
    build="extras.overlap.generator:Generator",
    build_order=1,
    plays=lambda config: config.trainer.async_mode == "fully_async",
)
