"""RMSNorm with a backward of its own, for the float32 norms of known models on a CPU.

As autograd takes it apart, the backward is a dozen passes over its tensors and many times the forward. Here it is
LayerNorm's, a single pass of torch's, and a correction for the mean, which RMSNorm does not subtract.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from extras.kernels.products import is_float32

# Models of transformers whose norm is weight · values / √(mean of values² + ε), by the folder of each, with the name of
# the norm's class. Others' are left alone: Gemma's, say, scales by 1 + weight.
MODELS = {
    "apertus": "ApertusRMSNorm",
    "deepseek_v2": "DeepseekV2RMSNorm",
    "deepseek_v3": "DeepseekV3RMSNorm",
    "ernie4_5": "Ernie4_5RMSNorm",
    "exaone4": "Exaone4RMSNorm",
    "glm": "GlmRMSNorm",
    "glm4": "Glm4RMSNorm",
    "glm4_moe": "Glm4MoeRMSNorm",
    "gpt_oss": "GptOssRMSNorm",
    "granite": "GraniteRMSNorm",
    "granitemoe": "GraniteMoeRMSNorm",
    "hunyuan_v1_dense": "HunYuanDenseV1RMSNorm",
    "lfm2": "Lfm2RMSNorm",
    "llama": "LlamaRMSNorm",
    "minimax_m2": "MiniMaxM2RMSNorm",
    "ministral": "MinistralRMSNorm",
    "mistral": "MistralRMSNorm",
    "mixtral": "MixtralRMSNorm",
    "olmo2": "Olmo2RMSNorm",
    "olmo3": "Olmo3RMSNorm",
    "olmoe": "OlmoeRMSNorm",
    "phi3": "Phi3RMSNorm",
    "qwen2": "Qwen2RMSNorm",
    "qwen2_moe": "Qwen2MoeRMSNorm",
    "qwen3": "Qwen3RMSNorm",
    "qwen3_moe": "Qwen3MoeRMSNorm",
    "seed_oss": "SeedOssRMSNorm",
    "smollm3": "SmolLM3RMSNorm",
}
# (name of the class, its module) → the name under which it holds its ε
EPSILONS = {
    (name, f"transformers.models.{model}.modeling_{model}"): "variance_epsilon" for model, name in MODELS.items()
}


class RMSNorm(nn.Module):
    """Is mixed in before a norm's own class, which computes what is not float32. Hidden states are float32 under
    autocast, too, as it casts nothing in a norm."""

    epsilon_name: str

    def forward(self, values: Tensor) -> Tensor:
        weight = self.weight.float()  # of a sharded model it may have been gathered in bfloat16
        if not (is_float32(values) and is_float32(weight)):
            return super().forward(values)
        epsilon = getattr(self, self.epsilon_name)
        if torch.is_grad_enabled() and (values.requires_grad or weight.requires_grad):
            return _RMSNorm.apply(values, weight, epsilon)
        return normalize(values, weight, epsilon)[0]


def use_fast_norms(module: nn.Module) -> None:
    """Makes an `RMSNorm` of every layer of `module` whose class is known to compute one."""
    for layer in module.modules():
        if (type(layer).__name__, type(layer).__module__) in EPSILONS:
            layer.__class__ = faster(type(layer))


@cache
def faster(norm: type[nn.Module]) -> type[nn.Module]:
    """A class of `norm`'s name that goes by `RMSNorm` first."""
    name = EPSILONS[norm.__name__, norm.__module__]
    return type(norm.__name__, (RMSNorm, norm), {"epsilon_name": name})


def normalize(values: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns weight · values / √(mean of values² + ε), [..., d], and the 1 / √… of each token, [..., 1]."""
    length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    factor = length.square_().div_(values.shape[-1]).add_(eps).rsqrt_()
    return (values * factor).mul_(weight), factor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        output, factor = normalize(values, weight, eps)
        ctx.save_for_backward(values, weight, factor)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        values, weight, factor = ctx.saved_tensors
        wants_values, wants_weight, _ = ctx.needs_input_grad
        mean = torch.zeros_like(factor)
        d_values, d_weight, _ = torch.ops.aten.native_layer_norm_backward(
            gradient, values, weight.shape, mean, factor, weight, None, [wants_values, wants_weight, False]
        )
        if wants_values:  # LayerNorm has subtracted factor · mean(weight · gradient)
            with torch.autocast("cpu", enabled=False):
                d_values += (gradient @ weight).div_(len(weight)).unsqueeze(-1) * factor
        return d_values, d_weight, None
