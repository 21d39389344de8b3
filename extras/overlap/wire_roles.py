"""The two ends of the wire between pools; training/roles.py, which is imported first, registers them."""

from configs.schema import Config
from training.roles import RoleSpec


def generates_apart(config: Config) -> bool:
    return bool(config.actor_rollout_ref.rollout.roles_apart)


SENDER = RoleSpec(name="sender", build="extras.overlap.pools:build_sender", turn=1, wanted=generates_apart)
RECEIVER = RoleSpec(name="receiver", build="extras.overlap.pools:build_receiver", turn=1, wanted=generates_apart)
