"""Joins the workers of a group by torch.distributed: gloo on CPUs, NCCL on GPUs; collects what each of them has.

A worker on its own is a group of one: nothing is sent.
"""

import math
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from configs.errors import notice

TIMEOUT = 600  # seconds
CONNECT_SECONDS = 5
SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # a frame of HTTP/2: length, kind, flags, stream


def open_store(host: str, size: int) -> dist.TCPStore:
    """Opens the store at which `size` ranks find each other, at a free port of this address alone, as it asks for no
    key; it lives with the rank that opens it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=max(size, 128))
    port, descriptor = listener.getsockname()[1], listener.detach()  # which is the store's from now on
    return dist.TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)


def connect(host: str, port: int, size: int) -> dist.TCPStore:
    """Connects to the store that another rank has opened."""
    return dist.TCPStore(host, port, size, is_master=False)


def check_speaks_http2(host: str, port: int) -> None:
    """Raises OSError unless a server that speaks HTTP/2 answers there, as Ray's does."""
    with socket.create_connection((host, port), CONNECT_SECONDS) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
        if connection.recv(len(SETTINGS))[3:4] != SETTINGS[3:4]:
            raise OSError("another kind of server is there")


def join_group(store: dist.TCPStore, rank: int, size: int, timeout: int = TIMEOUT) -> None:
    """Makes this process one of `size`; returns when all have come. Where one stays away for `timeout` seconds, now or
    in an exchange, the others fail."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    Waiting.limit = timedelta(seconds=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=Waiting.limit)


def new_group(ranks: Sequence[int] | None = None) -> dist.ProcessGroup:
    """Makes a gloo group of these ranks (None: of all), with the timeout of the group of all. Every rank calls it."""
    return dist.new_group(ranks, timeout=Waiting.limit, backend="gloo")


class Waiting:
    """Holds how long a rank of this process waits for others in an exchange."""

    limit = timedelta(seconds=TIMEOUT)


class Peers:
    """Says which ranks have the same rows, as they compute them together: `size` neighbours each."""

    size = 1
    group: dist.ProcessGroup | None = None  # the ranks at this one's place among its peers; None: all ranks


def data_rank() -> int:
    """Returns the place of this rank's rows among the shares of a batch."""
    return rank() // Peers.size


def gather_shares(value: Any) -> list[Any]:
    """Collects `value` for every share of a batch, in their order, on every rank; peers have the same."""
    values = [value] * (group_size() // Peers.size)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=Peers.group)
    return values


def group_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def common_notice(text: str) -> None:
    """Prints a notice that all ranks have to give; the first does."""
    if rank() == 0:
        notice(text)


def largest(number: float) -> float:
    """Returns the largest of all ranks' numbers, by which they decide alike; NaN is larger than any."""
    return max(gather(number), key=lambda value: (math.isnan(value), value))


def gather(value: Any) -> list[Any]:
    """Collects every rank's `value`, in their order, on every rank."""
    values = [value] * group_size()
    if len(values) > 1:
        dist.all_gather_object(values, value)
    return values
