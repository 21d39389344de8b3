"""Cuts a batch into micro-batches that fit a forward pass, and lays out their results.

A micro-batch is trimmed to its own longest prompt and response. How a batch is cut changes nothing: results come back
as [B, R] in the batch's order, losses are normalised by counts of the whole mini-batch, and metrics are pooled exactly
over micro-batches and workers.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.checks import cuts_by_tokens
from configs.schema import ActorConfig, CriticConfig, RefConfig, RolloutConfig
from data.padding import prompt_width, repeats_prompt
from data.protocol import DataProto
from data.seqlen_balancing import micro_batch_indices
from workers.collectives import gather_shares
from workers.deadlines import beat


@dataclass(frozen=True)
class MicroBatchSize:
    """Either so many sequences, or (sequences None) as many as hold `tokens` real tokens."""

    sequences: int | None
    tokens: int

    @classmethod
    def of_updates(cls, config: ActorConfig | CriticConfig) -> "MicroBatchSize":
        """Reads off the size of a forward pass with a backward."""
        sequences = None if cuts_by_tokens(config) else config.ppo_micro_batch_size_per_gpu
        return cls(sequences, config.ppo_max_token_len_per_gpu)

    @classmethod
    def of_scoring(cls, config: RolloutConfig | RefConfig) -> "MicroBatchSize":
        """Reads off the size of a forward pass that only scores."""
        return cls(config.log_prob_micro_batch_size_per_gpu, config.log_prob_max_token_len_per_gpu)


class TokenScores(NamedTuple):
    """A model's scores of each token that the policy produced, [b, r] float32 each; None where not asked for."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None  # of the distribution that the token came from
    sum_pi_squared: Tensor | None = None  # the sum of its squared probabilities
    values: Tensor | None = None  # a critic's, before the token
    logits: Tensor | None = None  # [b, r, V], of that distribution


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of a batch: b rows, trimmed to p prompt and r response columns."""

    rows: Tensor  # [b] int64, their places in the batch
    columns: dict[str, Tensor]  # input_ids, attention_mask, position_ids [b, p+r]; all others [b, r]
    response_width: int  # r
    origin: "MicroBatch | None" = None  # on a GPU: the same on the host, where sizes are known without a wait
    media: Sequence[Any] | None = None  # b, what each prompt shows beside its text; None: no prompt shows anything

    def to(self, device: torch.device) -> "MicroBatch":
        """Copies to the device that it is to be computed on."""
        if device.type == "cpu":
            return self
        columns = {name: to_device(column, device) for name, column in self.columns.items()}
        return MicroBatch(to_device(self.rows, device), columns, self.response_width, self, self.media)

    @property
    def host(self) -> "MicroBatch":
        return self.origin or self

    @cached_property
    def policy_tokens(self) -> int:
        """The number of tokens that the policy produced, by a batch that says which."""
        return int(self.host.columns["response_mask"].sum())

    @cached_property
    def is_real(self) -> Tensor:
        """[b, r] bool: the tokens of the responses."""
        return self.columns["attention_mask"][:, -self.response_width :].bool()

    @cached_property
    def is_scored(self) -> Tensor:
        """[b, r] bool: those of them that the policy produced, where the batch says which."""
        policy = self.columns.get("response_mask")
        return self.is_real if policy is None else self.is_real & policy.bool()

    @property
    def is_dummy(self) -> bool:
        """Says whether it holds no row, and is only there so that all ranks run as many forward passes."""
        return len(self.rows) == 0

    @cached_property
    def scored_places(self) -> Tensor:
        """[N], the places of the scored tokens among the b·r of the responses."""
        return to_device(self.host.is_scored.flatten().nonzero()[:, 0], self.rows.device)

    def scatter(self, values: Tensor) -> Tensor:
        """Lays out the values of the scored tokens, in order, as [b, r, …]; 0 elsewhere."""
        shape, rest = self.is_scored.shape, values.shape[1:]
        return values.new_zeros(shape.numel(), *rest).index_copy(0, self.scored_places, values).view(*shape, *rest)


WHOLE_SEQUENCE = ("input_ids", "attention_mask", "position_ids")


def cut_share(
    batch: DataProto, size: MicroBatchSize, columns: list[str], model: PreTrainedModel
) -> Iterator[MicroBatch]:
    """Cuts this rank's share of a batch into micro-batches, with dummies up to as many as any rank has: all run the
    same number of forward passes, in which sharded weights are gathered. Every rank has to ask for them."""
    parts = micro_batch_rows(batch, size, model.shares_prompts)
    missing = max(gather_shares(len(parts))) - len(parts) if model.parallel.lockstep else 0
    return chain(micro_batches(batch, parts, columns, model.device), (dummy(model.device) for _ in range(missing)))


def cut(batch: DataProto, size: MicroBatchSize, columns: list[str], model: PreTrainedModel) -> Iterator[MicroBatch]:
    """Cuts `batch` into micro-batches, each row once; `columns` [B, R] travel along. By tokens, rows that share a
    prompt stay together as far as the budget goes, and where `model` computes it once it counts once."""
    return micro_batches(batch, micro_batch_rows(batch, size, model.shares_prompts), columns, model.device)


def micro_batches(
    batch: DataProto, parts: list[Tensor], columns: list[str], device: torch.device
) -> Iterator[MicroBatch]:
    """Yields a micro-batch for each of the `parts`, which are rows of `batch`."""
    columns = dict.fromkeys([*columns, *(["response_mask"] if "response_mask" in batch.batch else [])])
    split, mask, shown = prompt_width(batch), batch.batch["attention_mask"], batch.non_tensor_batch.get("media")
    for rows in parts:
        media = None if shown is None or not any(shown[rows.numpy()]) else shown[rows.numpy()]
        prompt = int(mask[rows, :split].sum(1).max())
        width = max(1, int(mask[rows, split:].sum(1).max()))
        span = slice(split - prompt, split + width)
        tensors = {name: batch.batch[name][rows, span] for name in WHOLE_SEQUENCE}
        tensors |= {name: batch.batch[name][rows, :width] for name in ["responses", *columns]}
        yield MicroBatch(rows, tensors, width, media=media).to(device)
        beat()


def dummy(device: torch.device) -> MicroBatch:
    """Makes a micro-batch of one prompt token and one response token, which are in no batch."""
    ids = torch.zeros(1, 2, dtype=torch.long)
    sequence = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(2).unsqueeze(0)}
    columns = {**sequence, "responses": ids[:, 1:]}
    return MicroBatch(torch.empty(0, dtype=torch.long), columns, response_width=1).to(device)


def micro_batch_rows(batch: DataProto, size: MicroBatchSize, shares_prompts: bool) -> list[Tensor]:
    """Chooses the rows of each micro-batch."""
    if size.sequences:
        return [*torch.arange(len(batch)).split(size.sequences)] if len(batch) else []
    split, mask = prompt_width(batch), batch.batch["attention_mask"]
    prompt_lengths, response_lengths = mask[:, :split].sum(1), mask[:, split:].sum(1)
    is_next = repeats_prompt(batch).tolist()
    units, tokens = [], []  # rows that share a prompt, and what a forward pass of them holds
    for row, (prompt, response) in enumerate(zip(prompt_lengths.tolist(), response_lengths.tolist(), strict=True)):
        if shares_prompts and is_next[row] and tokens[-1] + response <= size.tokens:
            units[-1].append(row)
            tokens[-1] += response
        else:
            units.append([row])
            tokens.append(prompt + response)
    parts = micro_batch_indices(tokens, size.tokens)
    return [torch.tensor([row for unit in part for row in units[unit]]) for part in parts]


def score_micro_batches(
    model: PreTrainedModel, batch: DataProto, micros: Iterable[MicroBatch], temperature: float, ask: Collection[str]
) -> TokenScores:
    """Scores all `micros` of `batch` by `model` and puts the results together, on the CPU once all are there."""
    columns = torch.zeros(len(ask), *batch.batch["responses"].shape, device=model.device)
    for micro in micros:
        scores = model.token_scores(micro, temperature, ask)._asdict()
        for name, column in zip(ask, columns, strict=True):
            column[micro.rows, : micro.response_width] = torch.where(micro.is_scored, scores[name], 0.0)
    model.parallel.reshard(model)
    return TokenScores(**dict(zip(ask, columns.cpu(), strict=True)))


@torch.no_grad()
def score(
    model: PreTrainedModel,
    batch: DataProto,
    size: MicroBatchSize,
    temperature: float,
    ask: Collection[str] = ("log_probs",),
) -> TokenScores:
    """Scores the policy's tokens in `batch`, this rank's share: [B, R] float32 on the CPU, 0 elsewhere. Every rank has
    to ask."""
    return score_micro_batches(model, batch, cut_share(batch, size, [], model), temperature, ask)


class PooledMetrics:
    """Pools metrics of one update exactly over its micro-batches and all workers: sums (parts of a normalised loss),
    means (weighted by their tokens) and maxima. Numbers on a GPU stay there until the end, so that nobody waits."""

    def __init__(self) -> None:
        self._added: list[tuple[str, str, float]] = []  # kind, name, and weight
        self._values: list[Tensor | float] = []  # of each

    def add_sum(self, name: str, value: Tensor | float, weight: float = 1) -> None:
        self._added.append(("sum", name, weight))
        self._values.append(value.detach() if isinstance(value, Tensor) else value)

    def add_mean(self, name: str, value: Tensor | float, weight: float) -> None:
        self._added.append(("mean", name, weight))
        self._values.append(value)

    def add_max(self, name: str, value: Tensor | float) -> None:
        self._added.append(("max", name, 1))
        self._values.append(value)

    def reduce(self) -> dict[str, float]:
        """Returns name → number, the same on every rank, all of which have to ask for it; a mean over nothing is 0."""
        local = [*zip(self._added, read_numbers(self._values), strict=True)]
        totals, weights, maxima = defaultdict(float), defaultdict(float), {}
        for (kind, name, weight), number in chain.from_iterable(gather_shares(local)):
            if kind == "max":
                maxima[name] = max(maxima.get(name, number), number)
                continue
            totals[name] += number * weight if weight else 0.0  # of no token it may be NaN
            if kind == "mean":
                weights[name] += weight
        means = {name: total / max(weights[name], 1) if name in weights else total for name, total in totals.items()}
        return means | maxima


def read_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Reads tensors of one element, and plain numbers; what is on a GPU in one transfer."""
    on_gpu = [value.reshape(()).double() for value in values if isinstance(value, Tensor) and value.is_cuda]
    if not on_gpu:
        return [*map(float, values)]
    read = iter(torch.stack(on_gpu).tolist())
    return [next(read) if isinstance(value, Tensor) and value.is_cuda else float(value) for value in values]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns `values` on `device`, to which the host copies without waiting for the work that it has launched there:
    a GPU waits by itself, if the memory is pinned."""
    if device.type != "cuda" or values.is_cuda:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
