"""Gives a PreTrainedModel, in training or only scoring, one more method: `token_scores`.

    model.token_scores(micro, temperature, ask) -> TokenScores

scores the responses of a micro-batch, packed where the model can take that (extras/kernels/) and padded otherwise, by a
policy or a critic. Everything that trains or scores enters by it: that is where FSDP2 gathers the weights.
"""

from collections.abc import Callable, Collection
from functools import partial
from types import MethodType

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.errors import ConfigError
from configs.schema import ModelConfig
from workers.adapter import NoAdapter
from workers.collectives import common_notice
from workers.forward import forward_of
from workers.forward_check import (
    FAILURES,
    SHORTEST,
    TOLERANCE,
    Trial,
    compute_as_in_eval,
    fix_rope,
    ragged_batch,
    scaled_up_weights,
    trained_log_probs,
)
from workers.micro_batches import WHOLE_SEQUENCE, MicroBatch, TokenScores
from workers.parallel import Replicas
from workers.upstream import attention_of


def with_hooks(
    model: PreTrainedModel, parallel: Replicas | None = None, adapter: NoAdapter | None = None
) -> PreTrainedModel:
    """Has `model` carry how it is spread over workers, and what of it is trained; None: the core's."""
    model.parallel, model.adapter = parallel or Replicas(), adapter or NoAdapter()
    return model


def scoring_model(
    model: PreTrainedModel,
    settings: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    longest: int,
    sibling: PreTrainedModel | None = None,
) -> PreTrainedModel:
    """Moves `model`, which carries its hooks, to `device`, and gives it `token_scores` and `shares_prompts` (whether a
    micro-batch has each prompt computed once). A copy of it has both, and they are in no checkpoint.

    Args:
        settings: `kernels=off` leaves the layers as they are; `use_remove_padding=false` asks for the padded forward.
        dtype: compute precision of the run.
        longest: tokens of the run's longest sequence, prompt and response.
        sibling: a model of the same weights that has gone through this: its forward is taken, without a trial.

    Raises:
        ConfigError: no forward scores a row beside others as alone, or the model is not causal.
        ValueError: LoRA's matrices cannot be merged.
    """
    model.to(device)
    compute_as_in_eval(model)
    fix_rope(model, longest)
    model.kernels = forward_of(settings)
    set_forward(model, padded_scores, shares_prompts=False)
    if sibling is not None:
        take_forward(model, settings, sibling)
        return model
    with scaled_up_weights(model):
        trial = try_forward(model, settings, dtype, longest)
        problem = choose_forward(model, settings, trial, dtype)
        if problem is None:
            model.adapter.check(model, partial(trained_log_probs, batch=ragged_batch(model, SHORTEST)), TOLERANCE)
            model.parallel.set_gather_dtype(model, partial(trial.problem, dtype))
    if problem is not None:
        raise ConfigError(
            f"{type(model).__name__} does not score a row beside others, or in training, as alone and in eval mode "
            f"({problem}). Choose another model (docs/models.md), or try actor_rollout_ref.model.kernels=off."
        )
    return model


def try_forward(model: PreTrainedModel, settings: ModelConfig, dtype: torch.dtype, longest: int) -> Trial:
    """Returns a trial of the model's forward; raises ConfigError if it fails, or the model is not causal."""
    name = type(model).__name__
    try:
        trial = model.kernels.trial(model, dtype, longest)
    except FAILURES as error:
        raise ConfigError(
            f"{name} cannot be scored: its forward fails on a small batch ({type(error).__name__}: {error}). "
            f"Choose another model (docs/models.md).{model.adapter.hint}"
        ) from error
    if trial.looks_ahead():
        raise ConfigError(
            f"{settings.path}: {name} is not causal: what it says of a token depends on later ones, as in BERT and "
            "other encoders. Choose a model that continues a text (docs/models.md)."
        )
    return trial


def take_forward(model: PreTrainedModel, settings: ModelConfig, sibling: PreTrainedModel) -> None:
    packed = model.kernels.prepare(model) or padded_scores
    set_forward(model, packed if sibling.shares_prompts else padded_scores, sibling.shares_prompts)
    model.set_attn_implementation(attention_of(sibling))
    model.parallel.set_gather_dtype(model, lambda: None, sibling)


def choose_forward(model: PreTrainedModel, settings: ModelConfig, trial: Trial, dtype: torch.dtype) -> str | None:
    """Gives `model` the first forward that computes what transformers' eager attention does: packed, padded by its
    usual one, padded by the eager; a notice tells of the others. Says why not even the last may be used, or None."""
    implementation, name = attention_of(model), type(model).__name__
    packed = model.kernels.prepare(model)
    if packed is not None and settings.use_remove_padding:
        set_forward(model, packed, shares_prompts=True)
        problem = trial.problem(dtype)
        if problem is None:
            return None
        common_notice(f"{name} takes its batches padded, as it does not work on packed ones ({problem}).")
    set_forward(model, padded_scores, shares_prompts=False)
    model.set_attn_implementation(implementation)
    problem = trial.problem(torch.float32)  # in float32: rounding may choose other experts
    if problem is None or implementation == "eager":
        return problem
    common_notice(f"{name} takes eager attention, which is slower: by {implementation}, {problem}.")
    model.set_attn_implementation("eager")
    return trial.problem(torch.float32)


def set_forward(model: PreTrainedModel, forward: Callable[..., TokenScores], shares_prompts: bool) -> None:
    model.parallel.set_method(model, "token_scores", MethodType(forward, model))
    model.shares_prompts = shares_prompts


def padded_scores(
    model: PreTrainedModel, micro: MicroBatch, temperature: float, ask: Collection[str] = ("log_probs",)
) -> TokenScores:
    """Scores the responses of a micro-batch by `model`: the token at column P+t at column P+t−1, logits divided by the
    sampling temperature. `ask`: values, of a critic; of a policy others of `TokenScores`, with log_probs."""
    # The last token predicts nothing. By `forward` itself: a call would be a second entry into a sharded model.
    inputs = {name: micro.columns[name][:, :-1] for name in WHOLE_SEQUENCE} | {"use_cache": False}
    if micro.media is not None:
        inputs |= model.vision.inputs(inputs.pop("input_ids"), inputs["attention_mask"], micro.media)
    keep = {} if "values" in ask else {"logits_to_keep": micro.response_width}
    logits = model.forward(**inputs, **keep).logits
    if "values" in ask:
        return TokenScores(values=logits[:, -micro.response_width :, 0].float())
    labels, logits = micro.columns["responses"], logits.float() / temperature
    squared = calculate_sum_pi_squared_from_logits(logits) if "sum_pi_squared" in ask else None
    kept_logits = logits if "logits" in ask else None
    if "entropy" in ask:
        return TokenScores(*logprobs_and_entropy_from_logits(logits, labels), squared, logits=kept_logits)
    return TokenScores(logprobs_from_logits(logits, labels), None, squared, logits=kept_logits)


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Computes the log-prob of each label: logits [..., V] of any float dtype, labels [...] int64 -> [...] float32."""
    return _chosen(logits, labels) - logits.float().logsumexp(-1)


def logprobs_and_entropy_from_logits(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Computes `logprobs_from_logits`, and the entropy in nats of each softmax, [...] float32, from one logsumexp."""
    logits = logits.float()
    log_normalizer = logits.logsumexp(-1)
    log_probs = logits - log_normalizer.unsqueeze(-1)
    # not normalizer - Σ p·logits, which cancels where logits are large
    return _chosen(logits, labels) - log_normalizer, -(log_probs.exp() * log_probs).sum(-1)


def calculate_sum_pi_squared_from_logits(logits: Tensor) -> Tensor:
    """Computes Σ_v π_v² of the softmax π of logits [..., V]: [...] float32, 1 for a certain token, 1/V at the least.

    As exp(logsumexp(2z) - 2 logsumexp(z)).
    """
    logits = logits.float()
    return ((2 * logits).logsumexp(-1) - 2 * logits.logsumexp(-1)).exp()


def _chosen(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1).float()
