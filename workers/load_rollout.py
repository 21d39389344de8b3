"""Finds rollout engines, shipped or the user's, builds them, and asks and checks those that answer whole batches.

`StandaloneRollout` is an engine with the model of a folder, for commands that generate and do not train.

An engine that defines `generate_sequences` itself may return as little as `responses` with a mask: what else a rollout
has is made here, in the layout of `data.padding.collate`.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.extras import TABLE, find, present
from configs.import_utils import bind, callable_name, load_module, load_modules, split_object
from configs.process import worker_threads
from configs.schema import ModelConfig, RolloutConfig
from data.padding import collate
from data.pretrained import check_is_decoder, check_positions, load_model_config
from data.protocol import DataProto
from data.types import Sample, SamplingParams
from workers.engine import compute_dtype
from workers.models import load_causal_lm, training_device
from workers.rollout import KEY, Rollout

RULE = (
    "generate_sequences must return a DataProto with a row for each prompt, in their order: the tensor responses "
    "[B, R] of token ids, beside attention_mask ([B, P+R] or [B, R]: what is no padding), response_mask ([B, R]: what "
    "the policy produced) or both, and rollout_log_probs [B, R] if it knows them"
)


def load_rollout_class(name: str) -> type[Rollout]:
    """Returns the engine that actor_rollout_ref.rollout.name names: a shipped one, or the subclass in a file or module.

    `file.py:Class` chooses one of several.

    Raises:
        ValueError: there is none, or several, or it cannot be called with what a worker has.
    """
    key, (path, chosen) = f"{KEY}.name={name}", split_object(name)
    if name in TABLE["engine"] or chosen:
        found = [find("engine", name, f"{KEY}.name")]
    else:
        module = load_module(path)
        own = (value for value in vars(module).values() if is_engine(value) and value.__module__ == module.__name__)
        found = list(dict.fromkeys(own))
    if len(found) != 1 or not is_engine(found[0]):
        names = [value.__name__ if isinstance(value, type) else repr(value) for value in found]
        shipped = f" Shipped engines: {', '.join(present('engine'))}."
        choice = f" Choose one of them, e.g. {path}:{names[0]}." if len(names) > 1 else shipped
        raise ValueError(
            f"{key}: the file must define exactly one subclass of workers.rollout.Rollout, it defines {names}.{choice}"
        )
    [engine_class] = found
    constructor_arguments(engine_class, key, None, None, None)
    call_arguments(partial(engine_class.generate_sequences, None), key, None, None, 0, 0)
    return engine_class


def is_engine(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Rollout)


def build_rollout(
    engine_class: type[Rollout], config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> Rollout:
    """Builds an engine; what every one has is there before its own constructor runs, which may know nothing of it."""
    engine = engine_class.__new__(engine_class)
    Rollout.__init__(engine, config, tokenizer, model)
    engine.__init__(**constructor_arguments(engine_class, engine_class.__name__, config, tokenizer, model))
    return engine


def constructor_arguments(
    engine_class: type[Rollout], key: str, config: Any, tokenizer: Any, model: Any
) -> dict[str, Any]:
    """Returns what the class names of config, tokenizer, model (or module); raises ValueError if it needs more."""
    offered = {"config": config, "tokenizer": tokenizer, "model": model}
    if "module" in inspect.signature(engine_class).parameters:
        offered["module"] = model
    return bind(engine_class, offered, key=key).keywords


def call_arguments(
    function: Callable, key: str, prompts: Any, sampling: SamplingParams | None, seed: int, first_row: int
) -> partial:
    """Binds a generate_sequences to the prompts, and to what it names of the others, or with *args to all."""
    given, others = {"prompts": prompts}, {"sampling": sampling, "seed": seed, "first_row": first_row}
    if any(p.kind is p.VAR_POSITIONAL for p in inspect.signature(function).parameters.values()):
        given |= others
    return bind(function, others, key=key, positional=given)


def generate_batch(
    engine: Rollout, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int
) -> DataProto:
    """Returns `prompts` with the columns of a rollout, by the engine's generate_sequences, whoever wrote it.

    One of the user's gets them with input_ids, attention_mask and position_ids [B, P] as well, and in meta_info how to
    sample.

    Raises:
        ValueError: it returned anything but a row for each prompt, or too little to know what was sampled.
    """
    if type(engine).generate_sequences is Rollout.generate_sequences or not len(prompts):
        return Rollout.generate_sequences(engine, prompts, sampling, seed, first_row)
    samples = [Sample(list(ids)) for ids in prompts.raw_prompt_ids]
    batch = collate(samples, engine.config.prompt_length, 0, engine.pad_token_id)
    padded = {name: batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    stop_ids = engine.all_stop_ids(sampling)
    special = {"pad_token_id": engine.pad_token_id, "eos_token_id": sorted(stop_ids)}
    meta = {**vars(sampling), "response_length": sampling.max_tokens, **special}
    batch = DataProto.from_dict({**prompts.tensors, **padded}, prompts.non_tensor_batch, {**prompts.meta_info, **meta})
    ask = call_arguments(engine.generate_sequences, callable_name(type(engine)), batch, sampling, seed, first_row)
    with torch.no_grad():
        result = ask()
    return fill_rollout_columns(engine, result, prompts, stop_ids)


def fill_rollout_columns(engine: Rollout, result: Any, prompts: DataProto, stop_ids: set[int]) -> DataProto:
    """Adds the columns of a rollout to `prompts`, from what an engine returned, and the columns that it added."""
    name = f"the engine {callable_name(type(engine))}"
    if not isinstance(result, DataProto) or len(result) != len(prompts):
        found = f"{len(result)} rows for {len(prompts)} prompts" if isinstance(result, DataProto) else repr(result)
        raise ValueError(f"{name} returned {found}: {RULE}.")
    columns = result.tensors
    responses, real, policy = response_columns(columns, name)
    check_prompts(columns, prompts, name)
    if (longest := int(real.sum(1).max())) > engine.config.response_length:
        raise ValueError(
            f"{name} returned a response of {longest} tokens: at most actor_rollout_ref.rollout.response_length="
            f"{engine.config.response_length} are asked for."
        )
    log_probs, samples = columns.get("rollout_log_probs", torch.zeros(responses.shape)), []
    for row, prompt_ids in enumerate(prompts.raw_prompt_ids):
        ids, kept = responses[row][real[row]].tolist(), real[row]
        reason = "aborted" if not ids else "terminated" if ids[-1] in stop_ids else "max_tokens"
        sample = Sample(list(prompt_ids), end_reason=reason)
        sample.extend(ids, log_probs[row][kept].tolist(), policy=True, weight_version=engine.weight_version)
        sample.policy_mask = policy[row][kept].long().tolist()
        samples.append(sample)
    config = engine.config
    batch = collate(samples, config.prompt_length, config.response_length, engine.pad_token_id)
    if "rollout_log_probs" not in columns:
        batch.pop(["rollout_log_probs"])
    batch = batch.union(prompts)
    batch.batch.update({column: values for column, values in columns.items() if column not in batch})
    own = {column: values for column, values in result.non_tensor_batch.items() if column not in prompts}
    batch.non_tensor_batch.update(own)
    return batch


def response_columns(columns: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns token ids, which are no padding, and which of those are the policy's: [B, R], the last two bool."""
    responses = columns.get("responses", torch.zeros(()))
    masks = {mask: columns[mask] for mask in ("attention_mask", "response_mask") if mask in columns}
    if responses.ndim != 2 or responses.is_floating_point() or not masks:
        found = {column: list(values.shape) for column, values in columns.items()}
        raise ValueError(f"{name} returned the tensors {found}: {RULE}.")
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


class StandaloneRollout:
    """The engine that `rollout.name` names, around the model at `model.path`, or, if it is a server, around the
    server's, which should be the same.

    Args:
        n_threads: CPU threads; None: OMP_NUM_THREADS, else the cores.

    Attributes:
        engine: the engine; call it within `precision`.
        vocab_size: token ids of the model are 0 to this number − 1.

    Raises:
        ValueError: no such model or engine, or lengths that the model was not made for.
    """

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, n_threads: int | None
    ) -> None:
        torch.set_num_threads(worker_threads(n_threads).number)
        load_modules(model.external_lib)
        self.device = training_device(n_gpus=None)
        engine_class = load_rollout_class(rollout.name)
        engine_class.check(rollout, workers=1, gpus=int(self.device.type == "cuda"))
        longest = rollout.prompt_length + rollout.response_length
        model_config = load_model_config(model, model.path, "model.path")
        check_is_decoder(model_config, "model.path")
        check_positions(model_config, longest, "model.path", "data.max_prompt_length + max_response_length")
        find("adapter", model.adapter).check_settings(model, "model")
        self.vocab_size = model_config.get_text_config().vocab_size
        self.dtype = compute_dtype("auto", self.device)
        module = load_causal_lm(model, self.device, self.dtype, longest)
        with self.precision():  # an engine may try what it can do, in the precision that it will do it in
            self.engine = build_rollout(engine_class, rollout, tokenizer, module)
        if not engine_class.elsewhere:
            self.engine.load_weights(module.adapter.weights(module), version=0)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The compute precision of a run on this device, for the thread that enters it."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            yield
