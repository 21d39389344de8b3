"""Asks engines that define `generate_sequences` themselves, as verl's do, and makes the columns that they leave out.

They may return as little as `responses` with a mask.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from configs.import_utils import bind, callable_name
from data.padding import collate
from data.protocol import DataProto
from data.types import Completion, Request, Sample, SamplingParams
from workers.rollout import KEY, Rollout, sample_of

RULE = (
    "generate_sequences must return a DataProto with a row for each prompt, in their order: the tensor responses "
    "[B, R] of token ids, beside attention_mask ([B, P+R] or [B, R]: what is no padding), response_mask ([B, R]: what "
    "the policy produced) or both, and rollout_log_probs [B, R] if it knows them"
)


class WholeBatches:
    """Answers batches by an engine's own generate_sequences."""

    @staticmethod
    def check(engine_class: type[Rollout], key: str) -> None:
        """Raises ValueError if it cannot be called with what a worker has; `key` names the engine."""
        call_arguments(partial(engine_class.generate_sequences, None), key, None, None, 0, 0)

    @staticmethod
    def answer(engine: Rollout, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int) -> DataProto:
        """Returns `prompts` with the columns of a rollout. The engine is given input_ids, attention_mask and
        position_ids [B, P] as well, and in meta_info how to sample."""
        samples = [Sample(list(ids)) for ids in prompts.raw_prompt_ids]
        batch = collate(samples, engine.config.prompt_length, 0, engine.pad_token_id)
        padded = {name: batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
        stop_ids = engine.all_stop_ids(sampling)
        special = {"pad_token_id": engine.pad_token_id, "eos_token_id": sorted(stop_ids)}
        meta = {**vars(sampling), "response_length": sampling.max_tokens, **special}
        tensors = {**prompts.tensors, **padded}
        batch = DataProto.from_dict(tensors, prompts.non_tensor_batch, {**prompts.meta_info, **meta})
        ask = call_arguments(engine.generate_sequences, callable_name(type(engine)), batch, sampling, seed, first_row)
        with torch.no_grad():
            result = ask()
        return fill_rollout_columns(engine, result, prompts, sampling)


def call_arguments(
    function: Callable, key: str, prompts: Any, sampling: SamplingParams | None, seed: int, first_row: int
) -> partial:
    """Binds a generate_sequences to the prompts, and to what it names of the others, or with *args to all."""
    positional, optional = {"prompts": prompts}, {"sampling": sampling, "seed": seed, "first_row": first_row}
    if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(function).parameters.values()):
        positional |= optional
    return bind(function, optional, key=key, positional=positional)


def fill_rollout_columns(engine: Rollout, result: Any, prompts: DataProto, sampling: SamplingParams) -> DataProto:
    """Adds the columns of a rollout to `prompts`, from what an engine returned, and the columns that it added."""
    name, config = f"the engine {callable_name(type(engine))}", engine.config
    if not isinstance(result, DataProto) or len(result) != len(prompts):
        returned = f"{len(result)} rows for {len(prompts)} prompts" if isinstance(result, DataProto) else repr(result)
        raise ValueError(f"{name} returned {returned}: {RULE}.")
    columns = result.tensors
    responses, real, policy = response_columns(columns, name)
    check_prompts(columns, prompts, name)
    if (longest := int(real.sum(1).max())) > config.response_length:
        raise ValueError(
            f"{name} returned a response of {longest} tokens: at most {KEY}.response_length={config.response_length}."
        )
    log_probs, samples = columns.get("rollout_log_probs", torch.zeros(responses.shape)), []
    stop_ids = engine.all_stop_ids(sampling)
    for row, prompt_ids in enumerate(prompts.raw_prompt_ids):
        ids, mask = responses[row][real[row]].tolist(), real[row]
        reason = "aborted" if not ids else "stop" if ids[-1] in stop_ids else "length"
        drawn = log_probs[row, : len(mask)].where(policy[row], 0.0)[mask].tolist()
        request = Request(row, list(prompt_ids), sampling, seed=0)
        done = engine.check_completion(request, Completion(row, ids, drawn, reason, engine.weight_version))
        sample = sample_of(request, done)
        sample.policy_mask = policy[row][mask].long().tolist()
        samples.append(sample)
    batch = collate(samples, config.prompt_length, config.response_length, engine.pad_token_id)
    if "rollout_log_probs" not in columns:
        batch.pop(["rollout_log_probs"])
    batch = batch.union(prompts)
    batch.batch.update({column: values for column, values in columns.items() if column not in batch})
    further = {column: values for column, values in result.non_tensor_batch.items() if column not in prompts}
    batch.non_tensor_batch.update(further)
    return batch


def response_columns(columns: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns token ids, which are no padding, and which of those are the policy's: [B, R], the last two bool."""
    responses = columns.get("responses", torch.zeros(()))
    masks = {mask: columns[mask] for mask in ("attention_mask", "response_mask") if mask in columns}
    if responses.ndim != 2 or responses.is_floating_point() or not masks:
        shapes = {column: list(values.shape) for column, values in columns.items()}
        raise ValueError(f"{name} returned the tensors {shapes}: {RULE}.")
    width = responses.shape[1]
    for column in ("attention_mask", "response_mask", "rollout_log_probs"):
        shape = list(columns.get(column, responses).shape)
        if len(shape) != 2 or shape[0] != len(responses) or shape[1] < width:
            raise ValueError(f"{name} returned responses {list(responses.shape)} and {column} {shape}: {RULE}.")
    masks = {mask: values[:, values.shape[1] - width :].bool() for mask, values in masks.items()}
    policy = masks.get("response_mask", masks.get("attention_mask"))
    up_to_the_last = policy.flip(1).cumsum(1).flip(1) > 0
    real = masks.get("attention_mask", up_to_the_last)
    return responses, real, policy & real


def check_prompts(columns: dict[str, Tensor], prompts: DataProto, name: str) -> None:
    """Raises ValueError if the prompts in input_ids, where it is there, are not those that were given."""
    if "input_ids" not in columns or columns["input_ids"].shape != columns.get("attention_mask", torch.zeros(())).shape:
        return
    width = columns["input_ids"].shape[1] - columns["responses"].shape[1]
    for row, prompt_ids in enumerate(prompts.raw_prompt_ids):
        mask = columns["attention_mask"][row, :width].bool()
        if columns["input_ids"][row, :width][mask].tolist() != list(prompt_ids):
            raise ValueError(f"{name} returned another prompt in row {row} of input_ids than it was given: {RULE}.")
