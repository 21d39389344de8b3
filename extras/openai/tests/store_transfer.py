"""A stand-in for NCCL, which needs GPUs: its broadcasts go through the store in which the processes of a group meet.

All else is vLLM's own: its engines for NCCL run over these four functions, in each process that imports this module, as
do the workers of a server that is told of `WorkerExtension`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer import nccl_engine

from extras.openai import vllm_weights


class StoreGroup:
    """Stands where vLLM's engines have their PyNcclCommunicator."""

    def __init__(self, info: Any, rank: int) -> None:
        self.group = StatelessProcessGroup.create(info.master_address, info.master_port, rank, info.world_size)
        assert self.group.all_gather_obj(rank) == [*range(info.world_size)]

    def destroy(self) -> None:
        del self.group


def open_group(info: Any) -> StoreGroup:
    return StoreGroup(info, 0)


def join_group(info: Any, parallel_config: Any) -> StoreGroup:
    return StoreGroup(info, info.rank_offset + parallel_config.rank)


def send(iterator: Iterable[tuple[str, Tensor]], group: StoreGroup, src: int, **_: Any) -> None:
    for _, tensor in iterator:
        group.group.broadcast_obj(tensor.cpu().contiguous().clone(), src)


def receive(
    iterator: Iterable[tuple[str, tuple[list[int], torch.dtype]]],
    group: StoreGroup,
    src: int,
    post_unpack_func: Callable[[list[tuple[str, Tensor]]], Any],
    **_: Any,
) -> None:
    for name, (shape, dtype) in iterator:
        tensor = group.group.broadcast_obj(None, src)
        assert (list(tensor.shape), tensor.dtype) == (shape, dtype), "what was said to come"
        post_unpack_func([(name, tensor)])


class WorkerExtension(vllm_weights.WorkerExtension):
    """Has this module imported in the workers of vLLM's server."""


nccl_engine.open_trainer_endpoint = open_group
nccl_engine.packed_nccl_broadcast_producer = send
nccl_engine.worker_init_process_group = join_group
nccl_engine.packed_nccl_broadcast_consumer = receive
if not torch.accelerator.is_available():
    torch.accelerator.synchronize = lambda: None  # there is no device whose work would have to be waited for
