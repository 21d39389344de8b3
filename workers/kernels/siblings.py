"""Layers that read the same tensor, trained as one: attention's query, key and value, an MLP's gate and up.

oneDNN's copy of the tensor for the gradients of their weights is then made once, and the tensor's own gradient is added
up within the products. (One wide product would gain nothing more and cost a copy of the weights or of the gradients;
in generation, where weights stay, `workers/kernels/decode.py` has it.)
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from workers.kernels.products import Linear, is_for_onednn, linear, linears

NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Siblings:
    """Asked for the output of one of its layers, it makes the others' too, and keeps each until it is asked for."""

    def __init__(self, layers: list[Linear]) -> None:
        self.layers = layers
        self.read: tuple[Tensor | None, int] = (None, 0)  # the tensor, and how often it had been written to
        self.waiting: dict[Linear, Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy has layers of its own, and none of the outputs."""
        return {"layers": self.layers, "read": (None, 0), "waiting": {}}

    def __call__(self, layer: Linear, values: Tensor) -> Tensor:
        """The output of `layer` for `values`."""
        tensor, version = self.read
        # Whatever the names say, layers share an input only where it is the same.
        if values is not tensor or values._version != version or layer not in self.waiting:
            if not all(is_for_onednn(values, each.weight) for each in self.layers):
                return linear(values, layer.weight, layer.bias)
            outputs = linears(values, [each.weight for each in self.layers], [each.bias for each in self.layers])
            self.read, self.waiting = (values, values._version), dict(zip(self.layers, outputs, strict=True))
        output = self.waiting.pop(layer)
        if not self.waiting:
            self.read = (None, 0)  # or it would be kept until the next step
        return output


def join_siblings(module: nn.Module) -> None:
    """Has the `Linear` layers of `module` that are siblings by their names trained as one."""
    for parent in module.modules():
        for group in groups({name: layer for name, layer in parent.named_children() if isinstance(layer, Linear)}):
            siblings = Siblings(group)
            for layer in group:
                layer.siblings = siblings


def groups(layers: dict[str, Linear]) -> Iterator[list[Linear]]:
    """The groups of siblings among one parent's `layers`, which are given by name."""
    for names in NAMES:
        group = [layers[name] for name in names if name in layers]
        if len(group) == len(names) and len({layer.in_features for layer in group}) == 1:
            yield group
