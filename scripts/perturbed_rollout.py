"""A rollout engine that samples from the wrong weights, as a quantised or stale engine does, only worse.

For scripts/rollout_drift.py, which shows what that does to training and what rollout correction does about it. Its
log-probs are those of the weights it samples from, and validation is by the true weights.
"""

import copy

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import RolloutConfig
from data.protocol import DataProto
from data.seeding import torch_generator
from data.types import SamplingParams
from workers.hf.rollout import HFRollout

NOISE = 1.0  # standard deviation of what is added to each weight, in units of its matrix's own


class PerturbedRollout(HFRollout):
    is_probed = False  # it would fail

    def __init__(self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        super().__init__(config, tokenizer, model)
        self.true = model

    def generate_sequences(
        self, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int = 0
    ) -> DataProto:
        validates = prompts.meta_info.get("validate", False)
        self.module = self.true if validates else perturbed(self.true, seed)
        return super().generate_sequences(prompts, sampling, seed, first_row)


@torch.no_grad()
def perturbed(module: PreTrainedModel, seed: int) -> PreTrainedModel:
    """A copy of `module` with normal noise, drawn by `seed`, on its matrices."""
    noisy = copy.deepcopy(module)
    generator = torch_generator(seed, "perturbation")
    for weight in noisy.parameters():
        if weight.ndim == 2:
            weight += NOISE * weight.std() * torch.randn(weight.shape, generator=generator).to(weight)
    return noisy
