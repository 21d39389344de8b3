"""Memory of the running rows: the tokens that they have drawn, and the numbers by which they will draw."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from data.types import Request, SamplingParams


class Slots:
    """The tokens that the running rows have drawn, and the numbers by which they will draw.

    By slot: `tokens`, `log_probs` and `uniforms` [S, M]; `counts` of tokens so far, `max_tokens`, `kinds` (which of
    `samplings`) and `stopped` (whether the last token is a stop id) [S]. S and M are as large as it took so far.
    """

    def __init__(self, device: torch.device) -> None:
        self.requests: dict[int, Request] = {}  # by the slots in use
        self.free: list[int] = []
        self.samplings: dict[SamplingParams, int] = {}  # the distinct ones, numbered
        self.tokens = torch.zeros(0, 0, dtype=torch.long, device=device)
        self.log_probs = torch.zeros(0, 0, device=device)
        self.uniforms = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self.counts, self.max_tokens, self.kinds = (torch.zeros(0, dtype=torch.long, device=device) for _ in range(3))
        self.stopped = torch.zeros(0, dtype=torch.bool, device=device)

    def take(self, requests: Sequence[Request]) -> Tensor:
        """Returns a slot for each request: [n]."""
        limits = [request.sampling.max_tokens for request in requests]
        self._reserve(len(requests), max(limits))
        taken = [self.free.pop() for _ in requests]
        self.requests |= dict(zip(taken, requests, strict=True))
        uniforms = np.zeros((len(requests), max(limits)))
        for row, request in enumerate(requests):
            uniforms[row, : limits[row]] = np.random.default_rng(request.seed).random(limits[row])
        kinds = [
            self.samplings.setdefault(replace(request.sampling, max_tokens=0), len(self.samplings))
            for request in requests
        ]
        device = self.tokens.device
        slots = torch.tensor(taken, device=device)
        self.uniforms[slots, : max(limits)] = torch.from_numpy(uniforms).to(device)
        self.counts[slots] = 0
        self.max_tokens[slots], self.kinds[slots] = torch.tensor([limits, kinds], device=device)
        return slots

    def give_back(self, slots: Collection[int]) -> None:
        for slot in slots:
            del self.requests[slot]
        self.free += slots

    def _reserve(self, rows: int, width: int) -> None:
        """At least `rows` free slots, for `width` tokens each; what is too small doubles, so that it seldom is."""
        size, old_width = self.tokens.shape
        width = max(width, old_width)
        new_size = size if rows <= len(self.free) else max(len(self.requests) + rows, 2 * size)
        if (new_size, width) == (size, old_width):
            return
        for name in ("tokens", "log_probs", "uniforms"):
            setattr(self, name, enlarge(vars(self)[name], new_size, width))
        for name in ("counts", "max_tokens", "kinds", "stopped"):
            setattr(self, name, enlarge(vars(self)[name], new_size))
        self.free += range(size, new_size)

    def last_tokens(self, slots: Tensor) -> Tensor:
        """Returns the newest token of each of `slots` [b]: [b, 1]."""
        return self.tokens[slots, self.counts[slots] - 1, None]

    def read_ids(self, slot: int) -> list[int]:
        """Returns the ids that the model has read of a row: its prompt's and its own, without the newest."""
        return [*self.requests[slot].prompt_ids, *self.tokens[slot, : int(self.counts[slot]) - 1].tolist()]


def enlarge(memory: Tensor, *shape: int) -> Tensor:
    """`memory` as the first part of a tensor of this shape, which is 0 elsewhere."""
    larger = memory.new_zeros(shape)
    larger[tuple(map(slice, memory.shape))] = memory
    return larger
