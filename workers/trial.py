"""Which forward of a model is right: it is tried, not looked up in a list.

A model may attend in a way of its own, or do something to its logits, that a forward of ours, or SDPA, leaves out. The
reference is the model as transformers computes it, by its eager attention, on one row at a time, padded by nothing.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from data.protocol import DataProto
from workers.micro_batches import MicroBatchSize, cut, placed
from workers.repeatable import rope_changes

TOLERANCE = 1e-3  # log-probs and values of float32 weights agree far better, and a wrong forward is far worse
ROUNDINGS = 4  # so many times what rounding to the compute dtype does to the reference
SHORTEST, BEYOND, RESPONSE = 9, 8, 4  # tokens of a trial's longest row; those behind a limit; those of its response
EAGER_WIDTH = 4608  # tokens; eager attention holds the square of them for every head
FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of a forward that does not fit
LIMITS = ("window", "window_size", "chunk_size")  # how names of settings end behind which a model attends otherwise


class Trial:
    """Three rows of two prompts, all ragged, and what `model` makes of them as it is, in eval mode.

    Where the model computes otherwise behind some length, the rows go past it, if the run does.

    Args:
        model: with the padded forward.
        dtype: compute precision of the run.
        width: tokens of the longest row.

    Raises:
        one of FAILURES: the forward does not take such rows.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, width: int) -> None:
        self.model = model
        self.ask = "values" if model.get_output_embeddings() is None else "log_probs"
        self.batch = trial_batch(model, width)
        self.wanted = {precision: self.scores(1, precision, training=False) for precision in {torch.float32, dtype}}
        self.tolerances = {
            precision: tolerance(scores, self.wanted[torch.float32]) for precision, scores in self.wanted.items()
        }

    def problem(self, dtypes: Collection[torch.dtype]) -> str | None:
        """Why the forward that the model has now is not to be used; None: it may. It is tried on each row alone and on
        all together, as the trainer computes and as generation does."""
        differences = []
        for dtype in dtypes:
            for training in (True, False):
                for rows in (1, len(self.batch)):
                    try:
                        found = self.scores(rows, dtype, training)
                    except FAILURES as error:
                        return f"{type(error).__name__}: {error}"
                    distance = (found - self.wanted[dtype]).abs().max().item()
                    if not distance < self.tolerances[dtype]:
                        differences.append(distance)
        return f"{self.ask} then differ by {max(differences):.1g}" if differences else None

    @torch.no_grad()
    def scores(self, rows: int, dtype: torch.dtype, training: bool) -> Tensor:
        """[3, R] of the trial's responses, so many rows at a time; the model's mode is as it was."""
        mode, micros = self.model.training, cut(self.batch, MicroBatchSize(rows, 0), [], self.model)
        self.model.train(training)
        try:
            with torch.autocast(self.model.device.type, dtype, enabled=dtype != torch.float32):
                return placed(self.model, self.batch, micros, temperature=1.0, ask=[self.ask])._asdict()[self.ask]
        finally:
            self.model.train(mode)


@torch.no_grad()
def trained_log_probs(model: PreTrainedModel, batch: DataProto) -> Tensor:
    """Log-probs of the responses as the trainer has them, at temperature 1: [B, R]. The model is then in train mode."""
    model.train()
    micros = cut(batch, MicroBatchSize(len(batch), 0), [], model)
    return placed(model, batch, micros, temperature=1.0, ask=["log_probs"]).log_probs


def tolerance(scores: Tensor, exact: Tensor) -> float:
    """How far scores in the precision of `scores` may be apart; `exact` are the same in float32."""
    return max(TOLERANCE, ROUNDINGS * (scores - exact).abs().max().item())


def trials(model: PreTrainedModel, dtype: torch.dtype, longest: int) -> list[Trial]:
    """Against eager attention; of rows too long for it, against the model's usual one, which a short trial vouches for.

    Args:
        longest: tokens of the run's longest sequence.
    """
    usual, width = model.config._attn_implementation, trial_width(model.config, longest)
    fits = width <= EAGER_WIDTH
    try:
        model.set_attn_implementation("eager")
        found = [Trial(model, dtype, width if fits else SHORTEST)]
    finally:
        model.set_attn_implementation(usual)
    return found if fits else [*found, Trial(model, dtype, width)]


def trial_width(config: PretrainedConfig, longest: int) -> int:
    """Tokens of a trial's longest row, where the run's has `longest`."""
    text = config.get_text_config().to_dict()
    limits = [value or 0 for name, value in text.items() if name.endswith(LIMITS) and isinstance(value, int | None)]
    passed = [limit for limit in [*limits, *rope_changes(config)] if limit < longest]
    return max(SHORTEST, min(longest, max(passed, default=0) + BEYOND))


def trial_batch(model: PreTrainedModel, width: int) -> DataProto:
    """Rows as a run has them, of up to `width` tokens: two responses to a prompt, one to another."""
    prompt = width - RESPONSE
    mask = torch.tensor(
        [
            [0] * (prompt - length) + [1] * (length + response) + [0] * (RESPONSE - response)
            for length, response in [(prompt, RESPONSE), (prompt, 2), (prompt // 2, 1)]
        ]
    )
    ids = torch.arange(3 * width).view(3, width) * 7 % model.get_input_embeddings().num_embeddings
    ids[1, :prompt] = ids[0, :prompt]
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return DataProto.from_dict(columns | {"responses": ids[:, prompt:]})


@contextmanager
def sharpened(model: PreTrainedModel) -> Iterator[None]:
    """Makes the small matrices of `model` larger until the end of the block, by powers of two, which rounds nothing.

    With the weights that training from scratch starts from, a model attends to all alike and answers with all alike:
    whatever a forward left out, no trial would see. Matrices of trained models are large enough as they are.
    """
    factors = {parameter: enlargement(parameter.detach()) for parameter in model.parameters() if parameter.ndim > 1}
    try:
        for parameter, factor in factors.items():
            parameter.data.mul_(factor)
        yield
    finally:
        for parameter, factor in factors.items():
            parameter.data.div_(factor)


def enlargement(matrix: Tensor) -> float:
    """The power of two, 1 or more, that brings the outputs of `matrix` [..., in] to about the size of its inputs."""
    gain = torch.linalg.vector_norm(matrix) * (matrix.shape[-1] / matrix.numel()) ** 0.5
    return float((-gain.log2().round()).clamp(min=0).exp2()) if gain > 0 else 1.0
