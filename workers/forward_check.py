"""Tries whether a model scores rows together as each alone by its eager attention, and makes rows score alike.

A model may do something to its scores or logits that another forward, SDPA among them, leaves out; nobody would see it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from data.protocol import DataProto
from data.wire import positions
from workers.collectives import common_notice, largest
from workers.micro_batches import MicroBatchSize, cut, score_micro_batches
from workers.upstream import attention_of

TOLERANCE = 1e-3  # right forwards of float32 weights agree far better, wrong ones far worse
ROUNDINGS = 4  # times the change that rounding to the compute dtype makes
SHORTEST = 9  # tokens of a trial's longest row, at least
BEYOND, RESPONSE = 24, 16  # tokens behind a limit; those of its response, half of the row at most
EAGER_WIDTH = 4608  # tokens; eager attention holds the square of them for every head
FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of a forward that does not fit
LIMITS = ("window", "window_size", "chunk_size")  # endings of settings that limit how far a model attends


class Trial:
    """Compares the forwards of `model` with its eager attention in eval mode, on three ragged rows, each alone; they go
    past the lengths behind which it computes otherwise, if the run does. Kernels may add to it.

    Args:
        model: with the padded forward.
        dtype: compute precision of the run.
        longest: tokens of the run's longest sequence.

    Raises:
        one of FAILURES: the forward does not take such rows.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, longest: int) -> None:
        self.model, self.dtypes = model, {torch.float32, dtype}
        self.ask = "values" if model.get_output_embeddings() is None else "log_probs"
        self.width = check_width(model, longest, self.shortest(model, dtype))
        implementation = attention_of(model)
        try:
            model.set_attn_implementation("eager")
            self.refer(self.width if self.width <= EAGER_WIDTH else SHORTEST)
        finally:
            model.set_attn_implementation(implementation)

    @staticmethod
    def shortest(model: PreTrainedModel, dtype: torch.dtype) -> int:
        """Counts the tokens that the longest row has at least, unless the run's has fewer."""
        return SHORTEST

    def refer(self, width: int) -> None:
        """Computes the reference, of rows of up to `width` tokens, by the attention that the model has now."""
        self.batch = ragged_batch(self.model, width)
        self.reference = {dtype: self.scores(1, dtype, training=False) for dtype in self.dtypes}

    def problem(self, dtype: torch.dtype) -> str | None:
        """Says, on all ranks alike, why the forward that the model has now is not to be used; None: it may. It has each
        row alone, and all together as generation computes and as the trainer does."""
        reference, all_rows = self.reference[dtype], len(self.batch)
        limit, differences = tolerance(reference, self.reference[torch.float32]), []
        try:
            for rows, training in ((1, False), (all_rows, False), (all_rows, True)):
                distance = (self.scores(rows, dtype, training) - reference).abs().max().item()
                if not distance < limit:
                    differences.append(distance)
        except FAILURES as error:
            return f"{type(error).__name__}: {error}"
        worst = largest(max(differences, default=0.0))
        return f"{self.ask} then differ by {worst:.1g}" if worst else None

    def looks_ahead(self) -> bool:
        """Says, on all ranks alike, whether a token's score depends on a later one: of two rows that differ in the last
        token that is read, those before it."""
        batch, self.batch = self.batch, ragged_batch(self.model, SHORTEST).select_idxs([0, 0])
        for column in ("input_ids", "responses"):
            tokens = self.batch.batch[column]
            tokens[1, -2] = (tokens[1, -2] + 1) % self.model.get_input_embeddings().num_embeddings
        first, second = self.scores(1, torch.float32, training=False)[:, :-2]
        self.batch = batch
        return not largest((first - second).abs().max().item()) < TOLERANCE

    @torch.no_grad()
    def scores(self, rows: int, dtype: torch.dtype, training: bool) -> Tensor:
        """Scores the responses, [3, R], so many rows at a time; the model's mode is as it was."""
        mode, micros = self.model.training, cut(self.batch, MicroBatchSize(rows, 0), [], self.model)
        self.model.train(training)
        try:
            with torch.autocast(self.model.device.type, dtype, enabled=dtype != torch.float32):
                scores = score_micro_batches(self.model, self.batch, micros, temperature=1.0, ask=[self.ask])
            return scores._asdict()[self.ask]
        finally:
            self.model.train(mode)


@torch.no_grad()
def trained_log_probs(model: PreTrainedModel, batch: DataProto) -> Tensor:
    """Computes log-probs of the responses as the trainer does, at temperature 1: [B, R]; leaves it in train mode."""
    model.train()
    micros = cut(batch, MicroBatchSize(len(batch), 0), [], model)
    return score_micro_batches(model, batch, micros, temperature=1.0, ask=["log_probs"]).log_probs


def score_equally(models: Sequence[PreTrainedModel], dtype: torch.dtype) -> bool:
    """Says whether all `models` give a small batch the same log-probs in the compute `dtype`, to the last bit."""
    device, batch = models[0].device.type, ragged_batch(models[0], SHORTEST)
    with torch.autocast(device, dtype):
        try:
            first, *rest = (trained_log_probs(model, batch) for model in models)
        except FAILURES:
            return False
    return all(torch.equal(first, other) for other in rest)


def tolerance(scores: Tensor, exact: Tensor) -> float:
    """Bounds how far scores in the precision of `scores` may be apart; `exact` are the same in float32."""
    return max(TOLERANCE, ROUNDINGS * (scores - exact).abs().max().item())


def check_width(model: PreTrainedModel, longest: int, shortest: int = SHORTEST) -> int:
    """Counts the tokens of a trial's longest row: `shortest` or more, and no more than the run's `longest`."""
    text = model.config.get_text_config().to_dict()
    limits = [value or 0 for name, value in text.items() if name.endswith(LIMITS) and isinstance(value, int | None)]
    passed = [limit + BEYOND for limit in [*limits, *rope_changes(model.config)] if 0 < limit < longest]
    return max(SHORTEST, min(longest, max([*passed, shortest])))


def ragged_batch(model: PreTrainedModel, width: int) -> DataProto:
    """Makes rows as a run has them, of up to `width` tokens: two responses to a prompt, one to another."""
    longest = min(RESPONSE, width // 2)
    prompt = width - longest
    mask = torch.tensor(
        [
            [0] * (prompt - length) + [1] * (length + response) + [0] * (longest - response)
            for length, response in [(prompt, longest), (prompt, longest // 2), (prompt // 2, longest // 4)]
        ]
    )
    ids = torch.arange(3 * width).view(3, width) * 7 % model.get_input_embeddings().num_embeddings
    ids[1, :prompt] = ids[0, :prompt]
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}
    return DataProto.from_dict(columns | {"responses": ids[:, prompt:]})


@contextmanager
def scaled_up_weights(model: PreTrainedModel) -> Iterator[None]:
    """Makes the small matrices of `model` larger for the block, by powers of two, which rounds nothing: with those that
    training from scratch starts from, a model attends to all alike, and no check would see what a forward left out."""
    factors = {parameter: enlargement(parameter.detach()) for parameter in model.parameters() if parameter.ndim > 1}
    try:
        for parameter, factor in factors.items():
            parameter.data.mul_(factor)
        yield
    finally:
        for parameter, factor in factors.items():
            parameter.data.div_(factor)


def enlargement(matrix: Tensor) -> float:
    """Finds the power of two, 1 or more, that brings outputs of `matrix` [..., in] to about the size of its inputs."""
    gain = torch.linalg.vector_norm(matrix) * (matrix.shape[-1] / matrix.numel()) ** 0.5
    return float((-gain.log2().round()).clamp(min=0).exp2()) if gain > 0 else 1.0


def compute_as_in_eval(model: PreTrainedModel) -> None:
    """Has every layer of `model` compute as in eval mode, in training too: without dropout or the noise of routers.
    Gradient checkpointing asks a layer for its mode, so those that do it are left alone."""
    for module in model.modules():
        if module is not model:
            module.train = MethodType(train_as_eval, module)
    model.train(model.training)


def train_as_eval(module: nn.Module, mode: bool = True) -> nn.Module:
    """Does nn.Module.train, after which `module` itself is in training mode only if it is checkpointed."""
    nn.Module.train(module, mode)
    module.training = mode and bool(vars(module).get("gradient_checkpointing"))
    return module


def fix_rope(model: PreTrainedModel, longest: int) -> None:
    """Has rotary embeddings whose parameters depend on the longest position in a batch (longrope, dynamic) use those of
    `longest` tokens in every batch, if the run goes past the length at which they change; a notice says so."""
    changes = [length for length in rope_changes(model.config) if length < longest]
    if not changes:
        return
    for module in model.modules():
        if changes_by_length(vars(module).get("rope_type")):
            module.register_forward_pre_hook(partial(add_position, last=longest - 1), with_kwargs=True)
            module.register_forward_hook(drop_position)
    common_notice(
        f"{type(model).__name__} turns positions otherwise behind {min(changes)} tokens: all rows are taken as of "
        f"{longest}, as whoever serves the model must."
    )


def rope_changes(config: PretrainedConfig) -> list[int]:
    """Lists the lengths behind which a rotary embedding of `config` has other parameters for the whole batch."""
    text = config.get_text_config().to_dict()
    parameters = text.get("rope_parameters") or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]  # one, or by layer type
    return [
        kind.get("original_max_position_embeddings") or text["max_position_embeddings"]
        for kind in kinds
        if changes_by_length(kind.get("rope_type"))
    ]


def changes_by_length(rope_type: Any) -> bool:
    """Says whether rotary embeddings of this type, or of one of these by layer type, look at the longest position."""
    kinds = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
    return any(kind == "longrope" or "dynamic" in (kind or "") for kind in kinds)


def add_position(module: nn.Module, args: tuple, kwargs: dict[str, Any], last: int) -> tuple[tuple, dict[str, Any]]:
    """Adds the column `last` to position_ids [b, q], before the forward of a rotary embedding."""
    positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
    longer = torch.cat([positions, torch.full_like(positions[:, :1], last)], dim=1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": longer}
    return (args[0], longer, *args[2:]), kwargs


def drop_position(module: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Drops that column from cosines and sines, [b, q, d] each."""
    cosines, sines = output
    return cosines[:, :-1], sines[:, :-1]
