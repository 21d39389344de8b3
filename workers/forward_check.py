"""Checks which forward of a model is right, against its eager attention, and makes rows score alike in any batch.

A model may attend in a way of its own, or do something to its logits, that a forward of ours, or SDPA, leaves out. The
reference is the model as transformers computes it, by its eager attention, on one row at a time, padded by nothing.
Log-probs of rows that were sampled one way and scored another are wrong, and nobody sees it: so layers compute in
training as in eval mode, and a rotary embedding is the same for every batch.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from data.protocol import DataProto
from workers.collectives import common_notice, largest
from workers.micro_batches import MicroBatchSize, cut, score_micro_batches

TOLERANCE = 1e-3  # log-probs and values of float32 weights agree far better, and a wrong forward is far worse
ROUNDINGS = 4  # so many times what rounding to the compute dtype does to the reference
# Tokens of a check's longest row, at least: in float32 on a CPU; in a lower precision, whose roundings take more scored
# tokens to know; and on a GPU, whose FlexAttention has kernels for blocks of 128 tokens and pads fewer than 256.
SHORTEST, ROUNDED, BLOCKS = 9, 32, 200
BEYOND, RESPONSE = 24, 16  # tokens behind a limit; those of its response, half of the row at most
EAGER_WIDTH = 4608  # tokens; eager attention holds the square of them for every head
FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of a forward that does not fit
LIMITS = ("window", "window_size", "chunk_size")  # how names of settings end behind which a model attends otherwise


class ForwardCheck:
    """Holds the forwards of `model` against what it makes now, in eval mode, of three ragged rows of two prompts.

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
        self.batch = ragged_batch(model, width)
        self.short = ragged_batch(model, min(width, BLOCKS))  # whose backward eager attention has the memory for
        self.wanted = {precision: self.scores(1, precision, training=False) for precision in {torch.float32, dtype}}
        self.gradients = {precision: self.gradient(1, precision) for precision in {torch.float32, dtype}}
        self.tolerances = {
            precision: tolerance(scores, self.wanted[torch.float32]) for precision, scores in self.wanted.items()
        }

    def problem(self, dtypes: Collection[torch.dtype]) -> str | None:
        """Says why the forward that the model has now is not to be used; None: it may. It is held against the reference
        on each row alone, and on all together as generation computes and as the trainer does; its gradient too. All
        ranks are told the same, as each has to take part in what is tried next."""
        differences, together = [], len(self.batch)
        try:
            for dtype in dtypes:
                for rows, training in ((1, False), (together, False), (together, True)):
                    distance = (self.scores(rows, dtype, training) - self.wanted[dtype]).abs().max().item()
                    if not distance < self.tolerances[dtype]:
                        differences.append(distance)
            if worst := largest(max(differences, default=0.0)):
                return f"{self.ask} then differ by {worst:.1g}"
            for dtype in dtypes:
                wanted, exact = self.gradients[dtype], self.gradients[torch.float32]
                distance, norm = (self.gradient(len(self.short), dtype) - wanted).norm(), wanted.norm()
                limit = max(TOLERANCE * norm, ROUNDINGS * (wanted - exact).norm())
                is_wrong = norm.isfinite() and not distance <= limit  # some enlarged weights have no gradient at all
                if worst := largest(float(distance / norm) if is_wrong else 0.0):
                    return f"gradients then differ by {worst:.1g} of their norm"
        except FAILURES as error:
            return f"{type(error).__name__}: {error}"
        return None

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
                    [found] = torch.autograd.grad(scores[micro.is_scored].sum(), [embedded])
                places = torch.searchsorted(known, ids.flatten())
                total += found.new_zeros(len(known), found.shape[-1]).index_add(0, places, found.flatten(0, -2))
        finally:
            hook.remove()
            model.train(mode)
        return total

    @torch.no_grad()
    def scores(self, rows: int, dtype: torch.dtype, training: bool) -> Tensor:
        """Scores the responses, [3, R], so many rows at a time; the model's mode is as it was."""
        mode, micros = self.model.training, cut(self.batch, MicroBatchSize(rows, 0), [], self.model)
        self.model.train(training)
        try:
            with torch.autocast(self.model.device.type, dtype, enabled=dtype != torch.float32):
                return score_micro_batches(self.model, self.batch, micros, temperature=1.0, ask=[self.ask])._asdict()[
                    self.ask
                ]
        finally:
            self.model.train(mode)


def first_problem(checks: Sequence[ForwardCheck], dtypes: Collection[torch.dtype]) -> str | None:
    """Says why the forward that the model has now is not to be used; None: it may."""
    problems = (check.problem(dtypes) for check in checks)
    return next((problem for problem in problems if problem is not None), None)


@torch.no_grad()
def trained_log_probs(model: PreTrainedModel, batch: DataProto) -> Tensor:
    """Computes log-probs of the responses as the trainer does, at temperature 1: [B, R]. It leaves the model in train
    mode."""
    model.train()
    micros = cut(batch, MicroBatchSize(len(batch), 0), [], model)
    return score_micro_batches(model, batch, micros, temperature=1.0, ask=["log_probs"]).log_probs


def score_equally(models: Sequence[PreTrainedModel], dtype: torch.dtype) -> bool:
    """Says whether all `models` give a small batch the same log-probs in the compute `dtype`, to the last bit."""
    device, batch = models[0].device.type, ragged_batch(models[0], SHORTEST)
    with torch.autocast(device, dtype):
        try:
            first, *others = (trained_log_probs(model, batch) for model in models)
        except FAILURES:
            return False
    return all(torch.equal(first, other) for other in others)


def tolerance(scores: Tensor, exact: Tensor) -> float:
    """Bounds how far scores in the precision of `scores` may be apart; `exact` are the same in float32."""
    return max(TOLERANCE, ROUNDINGS * (scores - exact).abs().max().item())


def forward_checks(model: PreTrainedModel, dtype: torch.dtype, longest: int) -> list[ForwardCheck]:
    """Makes the checks against eager attention; for rows too long for it, also one against the model's usual attention,
    for which the short check vouches.

    Args:
        longest: tokens of the run's longest sequence.
    """
    usual, width = model.config._attn_implementation, check_width(model, longest, dtype)
    fits = width <= EAGER_WIDTH
    try:
        model.set_attn_implementation("eager")
        found = [ForwardCheck(model, dtype, width if fits else SHORTEST)]
    finally:
        model.set_attn_implementation(usual)
    return found if fits else [*found, ForwardCheck(model, dtype, width)]


def check_width(model: PreTrainedModel, longest: int, dtype: torch.dtype = torch.float32) -> int:
    """Counts the tokens of a check's longest row in this precision, where the run's has `longest`."""
    text, tried = model.config.get_text_config().to_dict(), ROUNDED if dtype != torch.float32 else SHORTEST
    limits = [value or 0 for name, value in text.items() if name.endswith(LIMITS) and isinstance(value, int | None)]
    passed = [limit + BEYOND for limit in [*limits, *rope_changes(model.config)] if 0 < limit < longest]
    return max(SHORTEST, min(longest, max([*passed, tried if model.device.type == "cpu" else BLOCKS])))


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
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return DataProto.from_dict(columns | {"responses": ids[:, prompt:]})


@contextmanager
def scaled_up_weights(model: PreTrainedModel) -> Iterator[None]:
    """Makes the small matrices of `model` larger until the end of the block, by powers of two, which rounds nothing.

    With the weights that training from scratch starts from, a model attends to all alike and answers with all alike:
    whatever a forward left out, no check would see. Matrices of trained models are large enough as they are.
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
    """Finds the power of two, 1 or more, that brings outputs of `matrix` [..., in] to about the size of its inputs."""
    gain = torch.linalg.vector_norm(matrix) * (matrix.shape[-1] / matrix.numel()) ** 0.5
    return float((-gain.log2().round()).clamp(min=0).exp2()) if gain > 0 else 1.0


def compute_as_in_eval(model: PreTrainedModel) -> None:
    """Has every layer of `model` compute as in eval mode, in training too: without dropout, and without the noise of
    routers (PhiMoE, Mixtral). Gradient checkpointing asks a layer for its mode, so those that do it are left alone."""
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
    `longest` tokens, in every batch, if the run goes past the length at which they change. A notice says so."""
    changes = [length for length in rope_changes(model.config) if length < longest]
    if not changes:
        return
    for module in model.modules():
        if changes_by_length(vars(module).get("rope_type")):
            module.register_forward_pre_hook(partial(add_position, last=longest - 1), with_kwargs=True)
            module.register_forward_hook(drop_position)
    common_notice(
        f"{type(model).__name__} turns positions otherwise in batches of more than {min(changes)} tokens: as the run's "
        f"longest sequence has {longest}, all sequences are taken as such, short ones too. So must whoever serves the "
        "model. To keep to the shorter form, lower data.max_prompt_length or data.max_response_length."
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

    def longer(positions: Tensor) -> Tensor:
        return torch.cat([positions, torch.full_like(positions[:, :1], last)], dim=1)

    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": longer(kwargs["position_ids"])}
    values, positions, *others = args
    return (values, longer(positions), *others), kwargs


def drop_position(module: nn.Module, args: tuple, output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Drops that column from cosines and sines, [b, q, d] each."""
    cosines, sines = output
    return cosines[:, :-1], sines[:, :-1]
