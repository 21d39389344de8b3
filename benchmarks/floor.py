"""The least time that a GRPO step can take on this machine: its arithmetic at the speed of a large matrix product.

Counts what no implementation can leave out: each prompt once, each response token but the last once more, logits only
where a token is drawn or learnt. The reading of weights and of the key-value cache counts where memory is slower than
arithmetic. What a memory-bound kernel in between costs (norms, softmax, rotary embedding) is left out, so 100 % is not
to be had.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from transformers import PretrainedConfig

from workers.upstream import onednn_linear

BYTES = 4  # of a float32


@dataclass(frozen=True)
class Machine:
    flops: float  # floating-point operations a second
    bandwidth: float  # bytes a second, reading and writing


def typical(machines: list[Machine]) -> Machine:
    """Medians, as of the steps that were taken meanwhile."""
    return Machine(median(each.flops for each in machines), median(each.bandwidth for each in machines))


@dataclass(frozen=True)
class Shape:
    """A Llama: its widths, and from them the weights that take part in matrix products."""

    layers: int
    width: int  # of the hidden states, and of the queries
    key_width: int
    inner_width: int
    vocabulary: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> "Shape":
        key_width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
        return cls(config.num_hidden_layers, config.hidden_size, key_width, config.intermediate_size, config.vocab_size)

    @property
    def body(self) -> int:
        return self.layers * self.width * (2 * self.width + 2 * self.key_width + 3 * self.inner_width)

    @property
    def head(self) -> int:
        return self.width * self.vocabulary


def update_floor(shape: Shape, machine: Machine, prompts: list[int], samples: int, responses: list[int]) -> float:
    """Seconds of forward, backward (twice the forward) and AdamW, which reads p, g, m, v and writes p, m, v.

    Args:
        prompts: lengths, each prompt once.
        samples: responses a prompt.
        responses: lengths, the samples of a prompt together.
    """
    arithmetic = update_flops(shape, prompts, samples, responses) / machine.flops
    return arithmetic + 7 * BYTES * (shape.body + shape.head) / machine.bandwidth


def update_flops(shape: Shape, prompts: list[int], samples: int, responses: list[int]) -> float:
    """Floating-point operations of forward and backward, arguments as for `update_floor`."""
    return 3 * (body_flops(shape, prompts, samples, responses) + 2 * shape.head * sum(responses))


def rollout_floor(shape: Shape, machine: Machine, prompts: list[int], samples: int, responses: list[int]) -> float:
    """Seconds of prefill and decoding, arguments as for `update_floor`: by arithmetic, or by the bytes that every
    decoding step reads (all weights, and each sequence's keys and values), whichever takes longer."""
    drawn_from = len(prompts) + sum(responses) - len(responses)  # a group's first tokens come from the same logits
    flops = body_flops(shape, prompts, samples, responses) + 2 * shape.head * drawn_from
    weights = (max(responses) - 1) * (shape.body + shape.head)
    cache = 2 * shape.layers * shape.key_width * seen_by_responses(prompts, samples, responses)
    return max(flops / machine.flops, BYTES * (weights + cache) / machine.bandwidth)


def body_flops(shape: Shape, prompts: list[int], samples: int, responses: list[int]) -> float:
    """Counts the operations of the layers' forward: two per weight and token, four per channel of a query and key that
    it sees. Nothing is predicted from a response's last token, so it is left out."""
    tokens = sum(prompts) + sum(responses) - len(responses)
    pairs = sum(length * (length + 1) / 2 for length in prompts) + seen_by_responses(prompts, samples, responses)
    return 2 * shape.body * tokens + 4 * shape.layers * shape.width * pairs


def seen_by_responses(prompts: list[int], samples: int, responses: list[int]) -> float:
    """Sums, over all response tokens in the forward, the keys that each sees: its prompt's, earlier ones, its own."""
    starts = [length for length in prompts for _ in range(samples)]
    return sum((length - 1) * (start + length / 2) for start, length in zip(starts, responses, strict=True))


def measure_machine(shape: Shape) -> Machine:
    """The best of several: products of a large square and of a layer's size, by either library that torch has for
    them, and a copy much larger than any cache."""
    sizes = [(1024, 1024, 1024), (2048, shape.width, shape.inner_width)]
    flops = max(2 * m * k * n / best_seconds(run) for m, k, n in sizes for run in products_of(m, k, n))
    source, target = torch.ones(2, 2**25).unbind()
    return Machine(flops, 2 * BYTES * source.numel() / best_seconds(lambda: target.copy_(source)))


def products_of(m: int, k: int, n: int) -> list[Callable[[], torch.Tensor]]:
    left, right, out = torch.randn(m, k), torch.randn(k, n), torch.empty(m, n)
    products = [lambda: torch.mm(left, right, out=out)]
    if torch.backends.mkldnn.is_available():
        weight = right.T.contiguous()
        products.append(lambda: onednn_linear(left, weight))
    return products


def best_seconds(run: Callable[[], object], repeats: int = 15) -> float:
    def once() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return min(once() for _ in range(repeats))
