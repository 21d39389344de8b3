"""Tries of a packed forward what the core tries of none: its gradient, roundings, and the kernels of long rows."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.collectives import largest
from workers.forward_check import FAILURES, ROUNDINGS, SHORTEST, TOLERANCE, Trial, ragged_batch
from workers.micro_batches import MicroBatchSize, cut

# Tokens of the longest row, at least: in a lower precision, whose roundings take more scored tokens to know; and on a
# GPU, whose FlexAttention has kernels for blocks of 128 tokens and pads fewer than 256.
ROUNDED, BLOCKS = 32, 200


class PackedTrial(Trial):
    """Adds the gradient."""

    @staticmethod
    def shortest(model: PreTrainedModel, dtype: torch.dtype) -> int:
        if model.device.type != "cpu":
            return BLOCKS
        return ROUNDED if dtype != torch.float32 else SHORTEST

    def refer(self, width: int) -> None:
        super().refer(width)
        self.short = ragged_batch(self.model, min(width, BLOCKS))  # whose backward eager attention has the memory for
        self.gradients = {dtype: self.gradient(1, dtype) for dtype in self.dtypes}

    def problem(self, dtype: torch.dtype) -> str | None:
        return super().problem(dtype) or self.wrong_gradient(dtype)

    def wrong_gradient(self, dtype: torch.dtype) -> str | None:
        """Says by how much the gradient is wrong, of all rows together; None: it is not."""
        reference, exact = self.gradients[dtype], self.gradients[torch.float32]
        try:
            distance, norm = (self.gradient(len(self.short), dtype) - reference).norm(), reference.norm()
        except FAILURES as error:
            return f"{type(error).__name__}: {error}"
        limit = max(TOLERANCE * norm, ROUNDINGS * (reference - exact).norm())
        is_wrong = norm.isfinite() and not distance <= limit  # some enlarged weights have no gradient at all
        worst = largest(float(distance / norm) if is_wrong else 0.0)
        return f"gradients then differ by {worst:.1g} of their norm" if worst else None

    @torch.enable_grad()
    def gradient(self, rows: int, dtype: torch.dtype) -> Tensor:
        """Computes the gradient of the summed scores to the embeddings of each token id, [ids, d], so many rows at a
        time; that reaches every layer, and the weights get none."""
        model, mode, leaves = self.model, self.model.training, []
        known, total = self.short.batch["input_ids"].unique().to(model.device), 0.0

        def cut_off(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
            leaves.append((output.detach().requires_grad_(), *args))
            return leaves[-1][0].clone()  # which a model may change in place

        model.train()
        hook = model.get_input_embeddings().register_forward_hook(cut_off)
        try:
            for micro in cut(self.short, MicroBatchSize(rows, 0), [], model):
                with torch.autocast(model.device.type, dtype, enabled=dtype != torch.float32):
                    scores = model.token_scores(micro, 1.0, [self.ask])._asdict()[self.ask]
                embedded, ids = leaves[-1]
                with model.parallel.without_sums(model):
                    [gradient] = torch.autograd.grad(scores[micro.is_scored].sum(), [embedded])
                places = torch.searchsorted(known, ids.flatten())
                zeros = gradient.new_zeros(len(known), gradient.shape[-1])
                total += zeros.index_add(0, places, gradient.flatten(0, -2))
        finally:
            hook.remove()
            model.train(mode)
        return total
