"""An engine whose model is split over several workers: the first of them leads, the others do the same, step by step.

vLLM's external launcher splits a model so (tensor parallelism): each worker has an engine of its own with a part of the
weights, and all of them must do the same things in the same order. The leader alone has rows to answer; it tells the
others each thing that it does before it does it.
"""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from workers.collectives import group_size, rank


class Lockstep:
    """A place among `size` workers with neighbouring ranks; every worker of the run makes one at the same time.

    Attributes:
        place: among them, from 0; the leader's is 0.
    """

    def __init__(self, size: int) -> None:
        assert group_size() % size == 0, f"{group_size()} workers cannot be dealt out to engines of {size}"
        self.size, self.place = size, rank() % size
        self.leader, self.group = rank() - self.place, None
        for first in range(0, group_size(), size) if size > 1 else ():
            group = dist.new_group([*range(first, first + size)], backend="gloo")
            if first == self.leader:
                self.group = group

    def tell(self, order: Any) -> None:
        """What the leader is about to do; the others hear it from `orders`. An engine of one worker tells nobody."""
        if self.size > 1:
            assert self.place == 0, "only the leader tells"
            dist.broadcast_object_list([order], src=self.leader, group=self.group)

    def orders(self) -> Iterator[Any]:
        """What the leader tells, until it tells None."""
        while True:
            heard = [None]
            dist.broadcast_object_list(heard, src=self.leader, group=self.group)
            if heard[0] is None:
                return
            yield heard[0]
