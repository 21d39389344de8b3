"""The step of `SharedPrompts` compiled: actor_rollout_ref.rollout.enforce_eager=false.

One graph serves all numbers of rows, prompts and columns, as the cache has fixed shapes. On a GPU its kernels are
recorded as a CUDA graph and repeated until the cache's layout changes: the next step is then run once as it is, and the
one behind it recorded. Recordings end with the batch, and so before weights change or move.
"""

from functools import cache
from typing import Any

import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor

from extras.kernels.generation import SharedPrompts
from workers.hf.batch import last_logits

MOST_GRAPHS = 16  # of a process; beyond it raises. A model makes one for each precision


@cache
def compiled_logits() -> Any:
    """Compiles `last_logits`, for any sizes; it rounds to bfloat16 where that does."""
    options = {"emulate_precision_casts": True}
    return torch.compile(last_logits, dynamic=True, fullgraph=True, recompile_limit=MOST_GRAPHS, options=options)


def compiled_forward(*args: Any, **kwargs: Any) -> Tensor:
    """Does what `last_logits` does."""
    # Sizes that are equal by chance are not taken to be so always, and no number becomes a tensor on the host.
    with fx_config.patch(use_duck_shape=False), torch._dynamo.config.patch(specialize_float=True):
        return compiled_logits()(*args, **kwargs)


class CompiledPrompts(SharedPrompts):
    """Rows that share prompts, whose step is compiled; it computes for places that no row has, too."""

    is_compiled = True
    has_fixed_shapes, layout = True, -1  # of the cache, that the following is for
    graph: torch.cuda.CUDAGraph | None = None
    ids: Tensor  # [places, 1], which a step reads
    logits: Tensor | None = None  # [places, V], which it writes

    def _next_logits(self) -> Tensor:
        is_new, self.layout = self.layout != self.cache.layout, self.cache.layout
        if is_new:
            self.graph, self.logits, self.ids = None, None, self.last.new_zeros(self.cache.places, 1)
            for layer in self.cache.layers:
                for memory in (layer.prompt_keys, layer.prompt_values, layer.keys, layer.values):
                    torch._dynamo.mark_static(memory, [1, 3])
        self.ids[: len(self), 0] = self.last
        if self.graph is None and self.ids.is_cuda and not is_new:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.logits = self._logits_after(self.ids, compiled_forward)
        if self.graph is not None:
            self.graph.replay()
        else:
            self.logits = self._logits_after(self.ids, compiled_forward)
        return self.logits[: len(self)]
