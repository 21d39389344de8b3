"""Keeps in main memory what a GPU does not need at the moment: AdamW's moments, and the weights of idle models.

Nothing here asks for a GPU: on a CPU it computes the same, and only copies from one place in memory to another.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

CHUNK = 64 << 20  # numbers of a weight that are stepped at once
MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNED = 64  # bytes


@dataclass(frozen=True)
class Offload:
    """Says what of a model in training is in main memory: AdamW's moments; the module, when it has nothing to do."""

    moments: bool = False
    module: bool = False


class HostAdamW(torch.optim.AdamW):
    """Keeps AdamW's moments in main memory and computes its steps there, by torch's fused AdamW for CPUs.

    Weights and gradients come over in chunks of rows, and the new weights go back. So the GPU holds no moments, at any
    time, and a step takes the time of sending 12 bytes a weight. Its state dict is AdamW's.
    """

    def __init__(self, parameters: Iterator[nn.Parameter], **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self.buffers: list[Tensor] = []  # for a chunk's weights and gradients

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Takes a step of every weight that has a gradient."""
        assert closure is None, "the gradients are there already"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step_weight(weight, group)

    def _step_weight(self, weight: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            new = {name: torch.zeros(weight.shape, device="cpu") for name in MOMENTS}
            state.update(step=torch.zeros((), device="cpu"), **new)
        moments = [state[name] for name in MOMENTS]
        whole = [torch.atleast_1d(tensor.detach()) for tensor in (weight, weight.grad, *moments)]
        rows = max(1, CHUNK // max(1, whole[0][0].numel()))
        for there, gradient, *parts in zip(*(tensor.split(rows) for tensor in whole), strict=True):
            here, gradient = self._fetch(there, gradient)
            averages, squares = ([part] for part in parts)
            settings = {name: group[name] for name in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
            beta1, beta2 = group["betas"]
            count = [state["step"].clone()]  # which a call counts up
            adamw(
                [here], [gradient], averages, squares, [], count, fused=True, beta1=beta1, beta2=beta2, **settings
            )  # fmt: skip
            there.copy_(here)
        state["step"] += 1

    def _fetch(self, *tensors: Tensor) -> list[Tensor]:
        """Copies tensors of the GPU into the buffers, which the next chunk overwrites."""
        size, shape = tensors[0].numel(), tensors[0].shape
        if not self.buffers or len(self.buffers[0]) < size:
            self.buffers = [buffer.flatten() for buffer in host_tensors(tensors)]
        found = [buffer[:size].view(shape) for buffer in self.buffers]
        for buffer, tensor in zip(found, tensors, strict=True):
            buffer.copy_(tensor)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores a state dict of AdamW's; the moments come to main memory, where torch would put them on the GPU."""
        super().load_state_dict({**state_dict, "state": {}})
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for place, state in state_dict["state"].items():
            self.state[weights[place]] = {name: value.to("cpu", copy=True) for name, value in state.items()}


class Residence:
    """Keeps `module` on its device within the blocks of `at_work`, and otherwise, from now on, in main memory.

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
    def at_work(self) -> Iterator[None]:
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
    """Makes a tensor like each of `tensors` in main memory, unwritten.

    Of those on a GPU, the copies are where the GPU reads and writes by itself, which is several times as fast. As torch
    rounds sizes up to a power of two there, all have one block.
    """
    sizes = [-(-tensor.nbytes // ALIGNED) * ALIGNED for tensor in tensors]
    pinned = any(tensor.is_cuda for tensor in tensors)
    parts = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned).split(sizes)
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)
    ]
