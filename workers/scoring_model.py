"""What is trained and what scores: a PreTrainedModel with one more method, `token_scores`.

    model.token_scores(micro, temperature, ask) -> TokenScores

scores the responses of a micro-batch, packed where the model can take that (workers/kernels/) and padded otherwise. It
serves the policy, whose head is over the vocabulary, and the critic, whose head has one output a token. Everything
that trains or scores enters by it: that is where FSDP2 gathers the weights.
"""

from collections.abc import Callable, Collection, Iterable
from types import MethodType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.loader import notice
from configs.schema import ModelConfig
from data.protocol import DataProto
from training.torch_functional import (
    calculate_sum_pi_squared_from_logits,
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
)
from workers.kernels import prepare
from workers.micro_batches import WHOLE_SEQUENCE, MicroBatch, MicroBatchSize, TokenScores, cut, cut_share

TOLERANCE = 1e-3  # log-probs and values of float32 weights agree far better, and a wrong forward is far worse
ROUNDINGS = 4  # so many times what rounding to the compute dtype does to the padded forward
SHORTEST, BEYOND = 9, 8  # tokens of a trial's longest sequence; those behind the end of a sliding window


def scoring_model(
    model: PreTrainedModel, settings: ModelConfig, device: torch.device, dtype: torch.dtype, longest: int
) -> PreTrainedModel:
    """Moves `model` to `device` and gives it `token_scores` and `shares_prompts` (whether a micro-batch has each prompt
    computed once). A copy of it has both, and they are in no checkpoint.

    It is tried, not looked up in a list, whether the packed forward computes what the padded one does: a model may
    attend in a way of its own, or do something to its logits. Where it does not, a notice says so.

    Args:
        settings: `kernels=off` leaves the model as it is; `use_remove_padding=false` asks for the padded forward.
        dtype: compute precision of the run.
        longest: tokens of the run's longest sequence, prompt and response.
    """
    model.to(device)
    set_forward(model, padded_scores, shares_prompts=False)
    if settings.kernels == "off":
        return model
    attention = model.config._attn_implementation
    if settings.use_remove_padding:
        trial = Trial(model, dtype, longest)
        set_forward(model, prepare(model, device), shares_prompts=True)
        problem = trial.problem()
        if problem is None:
            return model
        notice(f"{type(model).__name__} takes its batches padded, as it does not work on packed ones ({problem}).")
    else:
        prepare(model, device)
    model.set_attn_implementation(attention)
    set_forward(model, padded_scores, shares_prompts=False)
    return model


def set_forward(model: PreTrainedModel, forward: Callable[..., TokenScores], shares_prompts: bool) -> None:
    model.token_scores, model.shares_prompts = MethodType(forward, model), shares_prompts


def padded_scores(
    model: PreTrainedModel, micro: MicroBatch, temperature: float, ask: Collection[str] = ("log_probs",)
) -> TokenScores:
    """Scores of the responses of a micro-batch under `model`.

    The token at column P+t is predicted at column P+t−1, and a critic's value of it read there; logits are divided by
    the sampling temperature.

    Args:
        ask: names of `TokenScores`: values, of a critic; any others, of a policy, and log_probs come with them.
    """
    # A sequence's last token predicts nothing and is left out. By `forward` itself: as a call, it would be a second
    # entry into a sharded model.
    inputs = {name: micro.columns[name][:, :-1] for name in WHOLE_SEQUENCE} | {"use_cache": False}
    if "values" in ask:
        return TokenScores(values=model.forward(**inputs).logits[:, -micro.response_width :, 0].float())
    labels = micro.columns["responses"]
    logits = model.forward(**inputs, logits_to_keep=micro.response_width).logits.float() / temperature
    squared = calculate_sum_pi_squared_from_logits(logits) if "sum_pi_squared" in ask else None
    if "entropy" in ask:
        return TokenScores(*logprobs_and_entropy_from_logits(logits, labels), squared)
    return TokenScores(logprobs_from_logits(logits, labels), None, squared)


@torch.no_grad()
def score(
    model: PreTrainedModel,
    batch: DataProto,
    size: MicroBatchSize,
    temperature: float,
    ask: Collection[str] = ("log_probs",),
) -> TokenScores:
    """Scores of every response token of `batch`, this rank's share: [B, R] float32 on the CPU, 0 after a response's
    end. Every rank has to ask."""
    return placed(model, batch, cut_share(batch, size, [], model), temperature, ask)


def placed(
    model: PreTrainedModel, batch: DataProto, micros: Iterable[MicroBatch], temperature: float, ask: Collection[str]
) -> TokenScores:
    """Scores of all `micros` of `batch`, put together."""
    columns = {name: torch.zeros(batch.batch["responses"].shape) for name in ask}
    for micro in micros:
        found = model.token_scores(micro, temperature, ask)._asdict()
        for name, into in columns.items():
            micro.place(found[name], into)
    return TokenScores(**columns)


class Trial:
    """The packed forward of a model against its padded one, on three rows of two prompts, all ragged.

    Where the model attends no further than a sliding window, the rows go past its end, if the run does. A row's scores
    are those that it has alone, padded by nothing, whatever its company.

    Args:
        model: with the padded forward.
        dtype, longest: as `scoring_model` has them.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, longest: int) -> None:
        self.model, self.dtype = model, dtype
        self.ask = "values" if model.get_output_embeddings() is None else "log_probs"
        self.batch = trial_batch(model, longest)
        self.wanted = self.scores(rows=1, dtype=dtype)
        exact = self.wanted if dtype == torch.float32 else self.scores(rows=1, dtype=torch.float32)
        self.tolerance = max(TOLERANCE, ROUNDINGS * (self.wanted - exact).abs().max().item())

    def problem(self) -> str | None:
        """Why the forward that the model has now is not to be used; None: it may."""
        try:
            found = [self.scores(rows, self.dtype) for rows in (1, len(self.batch))]
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        differs = max((scores - self.wanted).abs().max().item() for scores in found)
        return None if differs < self.tolerance else f"{self.ask} then differ by {differs:.1g}"

    @torch.no_grad()
    def scores(self, rows: int, dtype: torch.dtype) -> Tensor:
        """[3, R] of the trial's responses, so many rows at a time."""
        micros = cut(self.batch, MicroBatchSize(rows, 0), [], self.model)
        with torch.autocast(self.model.device.type, dtype, enabled=dtype != torch.float32):
            scores = placed(self.model, self.batch, micros, temperature=1.0, ask=[self.ask])
        return getattr(scores, self.ask)


def trial_batch(model: PreTrainedModel, longest: int) -> DataProto:
    """Rows as a run of `longest` tokens has them: two responses to a prompt, one to another."""
    config = model.config.get_text_config().to_dict()
    windows = [config.get(name) or 0 for name in ("sliding_window", "attention_chunk_size")]
    limited = max((window for window in windows if window < longest), default=0)
    width, most = max(SHORTEST, min(longest, limited + BEYOND)), 4  # tokens a row, and of its response
    prompt = width - most
    mask = torch.tensor(
        [
            [0] * (prompt - length) + [1] * (length + response) + [0] * (most - response)
            for length, response in [(prompt, most), (prompt, 2), (prompt // 2, 1)]
        ]
    )
    ids = torch.arange(3 * width).view(3, width) * 7 % model.get_input_embeddings().num_embeddings
    ids[1, :prompt] = ids[0, :prompt]
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    return DataProto.from_dict(columns | {"responses": ids[:, prompt:]})
