"""Exchanges values and gradients among the workers of a group by torch.distributed: gloo on CPUs, NCCL on GPUs.

Every worker (rank) holds the whole model and learns from a share of each mini-batch. A loss is divided by the counts of
the whole mini-batch, so the gradient is the plain sum over ranks, and all take the same step. A worker on its own is a
group of one: nothing is sent and nothing changes.
"""

from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 32 << 20  # of gradients that are sent together: a message costs more than a small tensor
BACKEND = "cpu:gloo,cuda:nccl"
TIMEOUT = 600  # seconds


def open_store(host: str, size: int) -> dist.TCPStore:
    """Opens the store at which `size` ranks find each other, at a free port; it lives with the rank that opens it."""
    return dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)


def connect(host: str, port: int, size: int) -> dist.TCPStore:
    """Connects to the store that another rank has opened."""
    return dist.TCPStore(host, port, size, is_master=False)


def join_group(store: dist.TCPStore, rank: int, size: int, timeout: int = TIMEOUT) -> None:
    """Makes this process one of `size`; returns when all have come. Where one stays away for `timeout` seconds, now or
    in an exchange, the others fail."""
    backend = BACKEND if torch.cuda.is_available() else "gloo"
    limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)


def group_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def gather(value: Any) -> list[Any]:
    """Collects every rank's `value`, in their order, on every rank."""
    values = [value] * group_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Makes every gradient its sum over ranks. One that no rank has stays None: that weight stays as it is."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    present = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
    dist.all_reduce(present, dist.ReduceOp.MAX)
    trained = [parameter for parameter, anywhere in zip(trained, present.tolist(), strict=True) if anywhere]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in buckets([parameter.grad for parameter in trained]):
        together = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(together)
        for gradient, total in zip(bucket, together.split([gradient.numel() for gradient in bucket]), strict=True):
            gradient.copy_(total.view_as(gradient))


def buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups neighbours of one type that are no larger together than a bucket; a larger tensor is alone."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        fits = sum(held.nbytes for held in bucket) + tensor.nbytes <= BUCKET_BYTES
        if bucket and not (fits and tensor.dtype == bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket
