"""Counts the bytes that one packed forward and backward takes at a model's real shapes, without their memory.

Fake tensors have shapes and no values, and autograd and autocast treat them as any others; added up are the storages
alive, operation by operation. Attention is a stand-in that keeps what FlexAttention keeps. For models of Qwen2.5's
sizes, `python -m tests.fake_memory` prints what is counted, and what workers/memory_needs.py says.
"""

import weakref
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, Qwen2Config
from transformers.integrations import moe

from data.pretrained import ModelSize
from extras.kernels import token_head
from workers.forward_check import compute_as_in_eval
from workers.memory_needs import GIB

SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}  # of Qwen2.5: hidden, intermediate, layers, heads, heads of keys, vocabulary, tied embeddings
NAME = "keeps_like_flex"
SCORED = 0.8  # of the tokens


def qwen(name: str, layers: int | None = None) -> Qwen2Config:
    hidden, inner, all_layers, heads, key_heads, vocabulary, tied = SHAPES[name]
    return Qwen2Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers or all_layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
    )


class Counted(TorchDispatchMode):
    """Adds up the storages that operations make, until they are freed. Attributes: live, peak, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for value in tree_leaves(output):
            if isinstance(value, Tensor):
                self.note(value.untyped_storage())
        return output

    def note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self.free, key)

    def free(self, key: int) -> None:
        self.live -= self.sizes.pop(key, 0)


class KeepsLikeFlex(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, output, query.new_empty(query.shape[:3], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        query, key, value, _, sums = ctx.saved_tensors
        torch.empty_like(sums)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


class KeepsLikeGrouped(torch.autograd.Function):
    """A product of rows with the experts that they are sorted by, which autocast leaves in float32."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(values, weight)
        return values.new_empty(len(values), weight.shape[2])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        values, weight = ctx.saved_tensors
        return torch.empty_like(values), torch.empty_like(weight)


def grouped(values: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return KeepsLikeGrouped.apply(values.to(weight.dtype), weight)


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    query, key = query.to(value.dtype), key.to(value.dtype)
    return KeepsLikeFlex.apply(query, key, value).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)


def peak_bytes(config: PretrainedConfig, tokens: int, checkpointed: bool, updates: bool = True) -> int:
    """Counts the largest sum of bytes beside the float32 weights, in bfloat16, of a mini-batch's second micro-batch:
    its gradients are there already. Without `updates`: of a pass that only scores."""
    tiles = patch.dict(token_head.TILE_BYTES, cpu=token_head.TILE_BYTES["cuda"])
    with tiles, patch.object(moe, "_grouped_mm", grouped), FakeTensorMode():
        return _peak_bytes(config, tokens, checkpointed, updates)


def _peak_bytes(config: PretrainedConfig, tokens: int, checkpointed: bool, updates: bool) -> int:
    model = AutoModelForCausalLM.from_config(config)
    if checkpointed:
        model.gradient_checkpointing_enable()
    compute_as_in_eval(model)
    model.set_attn_implementation(NAME)
    model.train()
    with Counted() as counted:
        for weight in model.parameters():
            counted.note(weight.untyped_storage())
        weights = counted.live
        for _ in range(2):
            counted.peak = counted.live
            ids = torch.zeros(1, tokens, dtype=torch.long)
            casts = torch.autocast("cpu", torch.bfloat16, cache_enabled=not (checkpointed and updates))
            with torch.set_grad_enabled(updates), casts:
                mask = ids.new_zeros(1, 1, 1, 1)
                hidden = model.base_model(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False)
                hidden = hidden.last_hidden_state[0, : int(SCORED * tokens)]
                head = model.get_output_embeddings().weight
                log_probs = token_head.score_tokens(hidden, head, ids[0, : len(hidden)])[0]
            del hidden
            if updates:
                log_probs.sum().backward()
            del log_probs
    return counted.peak - weights


def main() -> None:
    for name, tokens in (("0.5B", 16384), ("1.5B", 16384), ("7B", 8192), ("0.5B", 4096), ("7B", 32768)):
        config = qwen(name)
        size = ModelSize.of(config)
        for checkpointed in (False, True):
            counted = peak_bytes(config, tokens, checkpointed)
            said = sum(size.update_bytes(tokens, 2, checkpointed, by_tiles=True).values())
            row = f"{name:4} {tokens:6} {'checkpointed' if checkpointed else '':12} {counted / GIB:6.1f}"
            print(f"{row} {said / GIB:6.1f} GiB {said / counted - 1:+.1%}")


if __name__ == "__main__":
    main()
