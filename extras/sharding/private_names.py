"""Keeps in one place what is used of FSDP2 and DTensor although it is private there, or not in all versions."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

SHARDS_LOGGER = "torch.distributed.tensor._redistribute"
fill_empty = nn.Module._apply  # puts a function of each weight and buffer in its place: to_empty cannot tell them apart


def shard_slices(shape: torch.Size, mesh: Any, placements: Any) -> tuple[slice, ...]:
    """Returns the slices of this rank's shard in the full tensor of that shape."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def fsdp_state(part: Any) -> tuple[Any, list[Any]]:
    """Returns FSDP2's state of a part, and its groups of weights, of which torch 2.11 has one or none."""
    state = torch.distributed.fsdp.fully_shard.state(part)
    groups = getattr(state, "_fsdp_param_groups", None)
    return state, list(filter(None, [state._fsdp_param_group])) if groups is None else groups


def gather_in(part: Any, dtype: torch.dtype) -> None:
    """Has FSDP2 gather the weights of a part in `dtype`: it reads its policy once, and keeps what it gathers into."""
    for group in fsdp_state(part)[1]:
        if group.mp_policy.param_dtype != dtype:
            group.mp_policy = replace(group.mp_policy, param_dtype=dtype)
            for weight in group.fsdp_params:
                weight.all_gather_outputs = []
                vars(weight).pop("_unsharded_param", None)
            group._init_mp_dtypes()


def sum_unused(part: Any) -> None:
    """Has FSDP2 sum gradients of weights that this rank did not use: its rows may reach no weight of an expert."""
    if setter := getattr(part, "set_reduce_scatter_unused_params", None):
        setter(True, recurse=False)
    else:  # torch 2.11
        for group in fsdp_state(part)[1]:
            group.post_backward = partial(_sum_with_zeros, group, group.post_backward)


def _sum_with_zeros(group: Any, usual: Callable[[], None], *unused: Any) -> None:
    for weight in group.fsdp_params if group.reduce_grads else ():
        tensor = vars(weight).get("_unsharded_param")
        if tensor is not None and tensor.grad is weight.unsharded_accumulated_grad is None and tensor.requires_grad:
            tensor.grad = torch.zeros_like(tensor)
    usual()


def forget_forward(model: Any, parts: list[Any]) -> None:
    """Leaves a sharded model, of these parts, as before a forward that raised, which leaves the root gathered."""
    if reset := getattr(model, "reset_iter_state", None):
        reset()
        return
    idle = import_module("torch.distributed.fsdp._fully_shard._fsdp_common").TrainingState.IDLE
    for state, groups in map(fsdp_state, parts):  # torch 2.11
        state._state_ctx.iter_forward_root, state._training_state = None, idle
        state._modules_to_run_forward.clear()
        for group in groups:
            group.finalize_backward()
            group._training_state = idle
            group.reshard()
            group.comm_ctx.post_forward_order.clear()
