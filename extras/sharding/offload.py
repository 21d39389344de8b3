"""Keeps in main memory what a GPU does not need at the moment: AdamW's moments, and the weights of idle models."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw
from transformers import PreTrainedModel

from configs.schema import OptimConfig
from extras.sharding.private_names import shard_slices
from extras.sharding.tensor_parallel import by_mesh
from workers.parallel import Replicas

CHUNK = 64 << 20  # numbers of a weight that are stepped at once
MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNED = 64  # bytes
PLACES = 1 << 16  # more than a model has tensors


@dataclass(frozen=True)
class Offload:
    """Says what of a model in training is in main memory: AdamW's moments; the module, when it has nothing to do."""

    moments: bool = False
    module: bool = False

    @property
    def any(self) -> bool:
        return self.moments or self.module


class Offloaded(Replicas):
    """One worker's models, in main memory while they have nothing to do."""

    def __init__(self, offload: Offload) -> None:
        self.offload = offload

    def on_device(self, model: PreTrainedModel) -> Callable[[], AbstractContextManager]:
        return Residence(model, self.offload.module).on_device

    def bytes_held(self, numbers: int, optim: OptimConfig | None) -> int:
        weights = 0 if self.offload.module else 4 * numbers
        if optim is None:
            return weights
        return weights + (0 if self.offload.moments else bytes_trained(numbers, optim) - 4 * numbers)

    def optimizer(self, weights: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
        return make_optimizer(iter(weights), optim, self.offload.moments)


def bytes_trained(numbers: int, optim: OptimConfig) -> int:
    """Counts the bytes of so many weights, their gradients and their moments."""
    return (8 + 2 * getattr(torch, optim.moments_dtype).itemsize) * numbers


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's part of a sharded tensor, and others as they are."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_optimizer(parameters: Iterator[nn.Parameter], optim: OptimConfig, in_main_memory: bool) -> torch.optim.AdamW:
    """Makes AdamW by its settings, the moments `in_main_memory` or beside the weights."""
    settings = {"lr": optim.lr, "betas": tuple(optim.betas), "weight_decay": optim.weight_decay, "fused": True}
    dtype, groups = getattr(torch, optim.moments_dtype), [{"params": group} for group in by_mesh([*parameters])]
    if dtype == torch.float32 and not in_main_memory:
        return torch.optim.AdamW(groups, **settings)
    return ChunkedAdamW(groups, in_main_memory, dtype, **settings)


class ChunkedAdamW(torch.optim.AdamW):
    """Keeps AdamW's moments in main memory, in bfloat16, or both, and steps by torch's fused AdamW, chunk by chunk.

    In main memory: weights and gradients come over in chunks of rows, and the new weights go back: 12 bytes a weight.
    In bfloat16: the second moment is rounded at random to one of its neighbours, as it moves by a thousandth a step,
    less than bfloat16 has. Weights sharded over ranks have the numbers of whole ones. Its state dict is AdamW's.

    Args:
        in_main_memory: whether the moments are there; otherwise they are beside the weights.
        dtype: of the moments.
    """

    def __init__(
        self, parameters: list[dict[str, Any]], in_main_memory: bool, dtype: torch.dtype, **settings: Any
    ) -> None:
        super().__init__(parameters, **settings)
        self.in_main_memory, self.dtype = in_main_memory, dtype
        self.buffers: list[Tensor] = []  # for a chunk's weights and gradients

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Takes a step of every weight that has a gradient."""
        assert closure is None, "the gradients are there already"
        number = 0
        for group in self.param_groups:
            for weight in group["params"]:
                number += 1
                if weight.grad is not None:
                    self._step_weight(weight, group, number)

    def _step_weight(self, weight: nn.Parameter, group: dict[str, Any], place: int) -> None:
        state, home = self.state[weight], torch.device("cpu") if self.in_main_memory else weight.device
        if not state:
            new = {name: torch.zeros_like(weight, dtype=self.dtype, device=home) for name in MOMENTS}
            state.update(step=torch.zeros((), device="cpu"), **new)
        moments = [state[name] for name in MOMENTS]
        tensors = [torch.atleast_1d(local(tensor.detach())) for tensor in (weight, weight.grad, *moments)]
        if tensors[0].numel() == 0:  # of a shard without rows
            state["step"] += 1
            return
        width = tensors[0][0].numel()
        rows, first = max(1, CHUNK // max(1, width)), first_number(weight)
        for chunk, gradient, *parts in zip(*(tensor.split(rows) for tensor in tensors), strict=True):
            loaded, gradient = self._fetch(chunk, gradient) if chunk.device != home else (chunk, gradient)
            averages, squares = (part.float() for part in parts)  # themselves, where they are float32
            settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
            beta1, beta2 = group["betas"]
            count = [torch.full((), float(state["step"]), device=home)]  # which a call counts up
            adamw(
                [loaded], [gradient], [averages], [squares], [], count, fused=True, beta1=beta1, beta2=beta2, **settings
            )  # fmt: skip
            if loaded is not chunk:
                chunk.copy_(loaded)
            if self.dtype == torch.bfloat16:
                parts[0].copy_(averages)
                parts[1].copy_(rounded_at_random(squares, first, int(state["step"]) * PLACES + place))
            first += chunk.numel()
        state["step"] += 1

    def _fetch(self, *tensors: Tensor) -> list[Tensor]:
        """Copies tensors of the GPU into the buffers, which the next chunk overwrites."""
        size, shape = tensors[0].numel(), tensors[0].shape
        if not self.buffers or len(self.buffers[0]) < size:
            self.buffers = [buffer.flatten() for buffer in host_tensors(tensors)]
        chunks = [buffer[:size].view(shape) for buffer in self.buffers]
        for buffer, tensor in zip(chunks, tensors, strict=True):
            buffer.copy_(tensor)
        return chunks


def rounded_at_random(numbers: Tensor, first: int, seed: int) -> Tensor:
    """Rounds float32 `numbers` ≥ 0 to bfloat16, down or up, such that the mean is kept. Chance is a function of `seed`
    and of a number's place, which counts from `first`: replicas and resumed runs round alike."""
    chance = torch.arange(numbers.numel(), dtype=torch.int32, device=numbers.device).view(numbers.shape)
    chance.add_(int32(first + seed * 0x85EBCA6B))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):  # Wellons' lowbias32
        chance.bitwise_xor_(chance >> shift).mul_(int32(factor))
    bits = chance.bitwise_and_(0xFFFF).add_(numbers.view(torch.int32))
    return bits.bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)


def int32(number: int) -> int:
    """Wraps a whole number as one of 32 bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def first_number(weight: Tensor) -> int:
    """Counts the numbers of the whole tensor that are before this rank's part of it."""
    if not isinstance(weight, DTensor):
        return 0
    cuts = shard_slices(weight.shape, weight.device_mesh, weight.placements)
    return sum(cut.start * stride for cut, stride in zip(cuts, weight.stride(), strict=True))


class Residence:
    """Keeps `module` on its device within the blocks of `on_device`, and otherwise, from now on, in main memory.

    Args:
        offload: False: it stays on its device.
    """

    def __init__(self, module: nn.Module, offload: bool) -> None:
        self.tensors = [*module.parameters(), *module.buffers()] if offload else []  # tied ones once
        self.devices = [tensor.device for tensor in self.tensors]
        self.homes = host_tensors(self.tensors)
        self.depth = 0  # of blocks
        self._leave(self.tensors)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Brings the module to its device for the block; within another it does nothing."""
        if self.depth == 0:
            self._fetch()
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                self._leave([tensor for tensor in self.tensors if tensor.requires_grad])

    def _leave(self, changed: Sequence[Tensor]) -> None:
        new = set(map(id, changed))
        for tensor, home in zip(self.tensors, self.homes, strict=True):
            if id(tensor) in new:
                home.copy_(tensor.detach())
            put(tensor, home)

    def _fetch(self) -> None:
        for tensor, device in zip(self.tensors, self.devices, strict=True):
            put(tensor, tensor.detach().to(device, copy=True))


def put(tensor: Tensor, values: Tensor) -> None:
    """Has `tensor`, which others hold, hold `values` from now on, where these are."""
    tensor.data = values


def host_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Makes a tensor like each of `tensors` in main memory, unwritten; pinned for a GPU's, in one block, as torch
    rounds sizes up to a power of two there."""
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors]
    pinned = any(tensor.is_cuda for tensor in tensors)
    parts = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]
