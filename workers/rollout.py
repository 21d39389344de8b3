"""Defines the contract of every rollout engine: token ids in, token ids out.

Requests are added at any time, each with its own sampling and seed; `step` advances them, and hands out those that
finished. An engine implements `step`, or `generate` alone, which answers a batch of requests: each works through the
other. `generate_sequences`, the rollout of a batch of prompts, is written once on top; an engine may define it itself
(extras/verl/engines.py).
Sampled ids are never decoded and encoded again. `actor_rollout_ref.rollout.name=my_engine.py` names the file of a
subclass of yours, and `my_engine.py:Class` one of several in it.
"""

import inspect
import math
import numbers
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from configs.errors import ConfigError, notice_once
from configs.extras import TABLE, present
from configs.import_utils import bind, callable_name, find, load_module, split_object
from configs.schema import RolloutConfig
from data.chat import Prompt, encode_prompt
from data.padding import PromptIds, collate, media_of
from data.pretrained import template_terminator
from data.protocol import DataProto
from data.seeding import derive_seed
from data.types import END_REASON_OF, Completion, Request, Sample, SamplingParams
from workers.deadlines import beat

KEY = "actor_rollout_ref.rollout"
OPTIONAL = (  # settings that some engines do not read
    "gpu_memory_utilization", "free_cache_engine", "enforce_eager", "max_model_len", "enable_prefix_caching",
    "enable_chunked_prefill", "load_format", "tensor_model_parallel_size",
)  # fmt: skip
ROUNDED = 0.1  # above 0, that a log-prob may be: the logits of a user's engine may be bfloat16
COLDEST = 0.01  # vLLM samples at no lower temperature


class Rollout:
    """Base of all engines, which implement `step`, or `generate` alone, or `generate_sequences` alone.

    Args:
        config: rollout settings.
        tokenizer: for the pad id and the stop set.
        model: the actor's, for its stop ids, and, as `module`, for engines that sample from it; None: there is none.

    Attributes:
        own_weights: whether it samples from a copy of the actor's weights, which `load_weights` has to bring, and not
            from the actor's own module.
        elsewhere: whether that copy is in a server, whose weights only a trainer exchanges.
        is_probed: of one without a copy: whether what it draws is held against the trainer now and then all the same.
        takes_adapter: whether it adds LoRA's matrices itself: `load_adapter` brings them at every sync, `load_weights`
            the frozen model where it has `lost_weights`.
        lost_weights: whether that copy is gone, since it slept, and `load_weights` has to come before the next prompt.
        takes_media: whether prompts may show images.
        vocab_size: token ids of `model` are 0 to this number − 1; without one, any.
        longest: most tokens of prompt and response together.
        reads: the OPTIONAL settings that have an effect.
    """

    vocab_size: int = sys.maxsize
    reads: tuple[str, ...] = OPTIONAL
    own_weights: bool = False
    elsewhere: bool = False
    is_probed: bool = False
    takes_adapter: bool = False
    lost_weights: bool = False
    takes_media: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if all(vars(Rollout)[name] is getattr(cls, name) for name in ("generate", "step", "generate_sequences")):
            raise TypeError(
                f"{cls.__name__} cannot generate: it must define generate(requests) -> list[Completion], in their "
                "order, or step() -> list[Completion], which takes requests from self.waiting and returns those that "
                "finished, or generate_sequences(prompts) -> DataProto."
            )

    @classmethod
    def check(cls, config: RolloutConfig, workers: int, gpus: int) -> None:
        """Checks settings before anything is started; tells of those that have no effect.

        Args:
            workers: of a machine, as an engine is not split over several; `gpus`: of each.
        """
        defaults = {field.name: field.default for field in fields(RolloutConfig)}
        idle = [name for name in OPTIONAL if name not in cls.reads and config[name] != defaults[name]]
        if idle:
            notice_once(f"{KEY} sets {', '.join(idle)}, which the engine name={config.name} does not read.")
        limit = config.max_model_len if "max_model_len" in cls.reads else None
        if limit is not None and limit < (longest := config.prompt_length + config.response_length):
            raise ConfigError(
                f"{KEY}.max_model_len={limit} is below prompt_length + response_length = {longest}: leave it null."
            )

    @classmethod
    def workers_per_engine(cls, config: RolloutConfig) -> int:
        """Counts the neighbours in rank that one engine is split over."""
        return 1

    def __init__(self, config: RolloutConfig | None = None, tokenizer: Any = None, model: Any = None) -> None:
        if config is None:  # engines written for verl call it so, after `build_rollout` has
            assert "longest" in vars(self), f"{type(self).__name__} needs a config, a tokenizer and a model"
            return
        self.config, self.tokenizer = config, tokenizer
        self.module = model
        self.longest = longest_sequence(config)
        if model is not None:
            self.vocab_size = model.config.get_text_config().vocab_size
        self.pad_token_id = tokenizer.pad_token_id
        self.stop_ids = stop_token_ids(tokenizer, model.generation_config if model else None)
        self.weight_version = 0
        self.waiting: dict[int, Request] = {}  # by id, in the order in which they came
        self.running: dict[int, Any] = {}  # by id, in an engine that keeps them here: the request or its answer

    def all_stop_ids(self, sampling: SamplingParams) -> set[int]:
        """Returns the ids that end a response: the engine's own, and those that were asked for."""
        return self.stop_ids.union(sampling.stop_token_ids)

    # Requests come, are answered, and go.

    def add(self, request: Request) -> None:
        """Queues `request`, which may join while others are running; raises ValueError if it cannot be answered."""
        assert request.id not in self.waiting, f"request {request.id} is waiting already"
        assert request.id not in self.running, f"request {request.id} is running already"
        self.check_takes(request.prompt_ids)
        self.waiting[request.id] = request

    def check_takes(self, *prompts: list[int]) -> None:
        """Raises ValueError for prompts with images that the engine would answer unseen."""
        if not self.takes_media and any(map(media_of, prompts)):
            raise ValueError(f"{KEY}.name={self.config.name} reads no images, and a prompt has some: set hf or vllm.")

    def step(self) -> list[Completion]:
        """Advances all requests a little; those that finished, in any order."""
        requests = list(self.waiting.values())
        self.waiting.clear()
        return self.generate(requests)

    def abort(self, ids: Iterable[int]) -> None:
        """Drops requests, waiting or running; nothing comes back of them, and unknown ids are ignored."""
        dropped = set(ids)
        for request_id in dropped:
            self.waiting.pop(request_id, None)
        if running := sorted(request_id for request_id in dropped if request_id in self.running):
            self._abort_running(running)

    def _abort_running(self, ids: Sequence[int]) -> None:
        """Drops these of the requests in `running`, of which there is at least one."""
        for request_id in ids:
            del self.running[request_id]

    def forget(self, episodes: Iterable[int]) -> None:
        """Drops what the engine keeps for the next turns of these episodes, which are over, if it keeps anything."""

    def has_unfinished_requests(self) -> bool:
        """Returns True if requests are waiting or running; an engine that keeps running ones elsewhere counts them."""
        return bool(self.waiting or self.running)

    def tokens_so_far(self, seen: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        """Returns tokens and log-probs of the running requests in `seen`, beyond the first `seen[id]`, for streaming.

        They were added as `piecewise`. An engine that cannot look into running requests has none.
        """
        return {}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Returns one completion per request, in their order, while nothing else is in flight. Equal prompts may be
        computed once."""
        assert type(self).step is not Rollout.step, f"{type(self).__name__} defines generate, which this would call"
        assert not self.has_unfinished_requests(), "other requests are in flight, whose completions would be lost"
        by_id: dict[int, Completion] = {}
        try:
            for request in requests:
                self.add(request)
            while self.has_unfinished_requests():
                for completion in self.step():
                    by_id[completion.id] = completion
                beat()
        finally:
            if self.has_unfinished_requests():
                self.abort([request.id for request in requests])
        missing = [request.id for request in requests if request.id not in by_id]
        assert not missing, f"{type(self).__name__} ran dry without completions of the requests {missing}"
        return [by_id[request.id] for request in requests]

    def generate_sequences(
        self, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int = 0
    ) -> DataProto:
        """Returns `prompts` (column raw_prompt_ids) with the columns of a rollout (data/padding.py: collate).

        P is prompt_length, R response_length. Row i draws by `seed` and by `first_row` + i, its place in the whole of
        which these prompts may be one worker's share.
        """
        requests = [
            Request(row, PromptIds(ids, media_of(ids)), sampling, derive_seed(seed, "row", first_row + row))
            for row, ids in enumerate(prompts.non_tensor_batch["raw_prompt_ids"])
        ]
        completions = self.generate(requests) if requests else []  # a share may be without rows
        check_completions(self, requests, completions)
        samples = [sample_of(request, completion) for request, completion in zip(requests, completions, strict=True)]
        rollouts = collate(samples, self.config.prompt_length, self.config.response_length, self.pad_token_id)
        further = [name for name in prompts.tensors if name not in rollouts]
        return rollouts.union(prompts.select(further))

    def batch_generation(self, prompts: Sequence[Prompt | list[int]], seed: int = 0) -> list[Completion]:
        """Answers texts, messages or token ids, without a run: a completion each, sampled as `config` says."""
        sampling, requests = SamplingParams.from_config(self.config, self.config.response_length), []
        for row, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts):
            ids = prompt if all(isinstance(item, int) for item in prompt) else encode_prompt(prompt, self.tokenizer)
            requests.append(Request(row, ids, sampling, derive_seed(seed, "row", row)))
        return self.generate(requests)

    def inference(self, prompts: Sequence[Prompt | list[int]], seed: int = 0) -> list[str]:
        """Returns the texts of `batch_generation`, without special tokens."""
        token_ids = [completion.token_ids for completion in self.batch_generation(prompts, seed)]
        return self.tokenizer.batch_decode(token_ids, skip_special_tokens=True)

    def check_completion(self, request: Request, answer: Completion) -> Completion:
        """Returns what answers `request`; raises ValueError for anything but token ids of the model, as many as were
        asked for at most, and a log-prob of each, FloatingPointError where a log-prob is NaN or infinite."""
        name, most = f"the engine {callable_name(type(self))}", request.sampling.max_tokens
        if len(answer.log_probs) != len(answer.token_ids) or len(answer.token_ids) > most:
            raise ValueError(
                f"{name} returned {len(answer.token_ids)} token_ids and {len(answer.log_probs)} log_probs for request "
                f"{request.id}: a log-prob for each token, and at most request.sampling.max_tokens={most} tokens."
            )
        last = self.vocab_size - 1
        for label, values, kind, low, high, rule in (
            ("token id", answer.token_ids, numbers.Integral, 0, last, f"they are integers from 0 to {last}"),
            ("log-prob", answer.log_probs, numbers.Real, -math.inf, ROUNDED, "they are numbers, and not above 0"),
        ):
            fits = all(issubclass(type_, kind) and type_ is not bool for type_ in {*map(type, values)})
            if fits and low <= min(values, default=low) <= max(values, default=low) <= high:
                continue  # there may be millions
            for value in values:
                if isinstance(value, bool) or not isinstance(value, kind) or value < low or value > high:
                    raise ValueError(f"{name} returned the {label} {value!r} for request {request.id}: {rule}.")
        if not math.isfinite(sum(answer.log_probs)):
            position = [math.isfinite(value) for value in answer.log_probs].index(False) + 1
            raise divergence(self.weight_version, f"request {request.id}, token {position} of its response")
        return answer

    @contextmanager
    def together(self) -> Iterator[bool]:
        """Yields whether this worker asks the engine within the block. Where an engine is split over workers, all of
        them enter it at once, and the others do first what the one that asks tells them."""
        yield True

    # Weights and memory come and go.

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Samples from these weights from now on; whatever was cached under the old ones is dropped.

        `weights` are (name, tensor) as the actor's checkpoint has them, made as they are asked for. An engine that
        samples from the actor's own module needs none of them.
        """
        assert not self.has_unfinished_requests(), "the weights would change under requests in flight: abort them first"
        self.weight_version = version

    def held_weights(self) -> tuple[torch.dtype, dict[str, int]] | None:
        """Returns what `WeightSync.held_by_vllm` does, of the model in use; None: it cannot say.

        Called before the first `load_weights` and after each.
        """
        return None

    def sleep(self) -> None:
        """Gives memory back until `wake_up`, where the engine has any to give."""

    def wake_up(self) -> None:
        """Takes the memory again that `sleep` gave back."""

    def close(self) -> None:
        """Ends the engine, which is not asked again."""

    # For engines by a library or a server.

    def _at_least_one(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Returns `weights`; raises ValueError if there are none."""
        remaining = iter(weights)
        first = next(remaining, None)
        if first is None:
            raise ValueError(
                f"the {self.config.name} engine was given no weights for version {self.weight_version}: load_weights "
                "takes all of the actor's (TrainEngine.weights)."
            )
        return chain([first], remaining)

    def _sampling_fields(self, request: Request) -> dict[str, Any]:
        """Returns the request's sampling and stop ids as vLLM and its server name them."""
        sampling, settings = request.sampling, {"temperature": 0.0}
        if sampling.do_sample:
            top_k = sampling.top_k if sampling.top_k > 0 else -1
            settings = {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
            settings |= {"top_k": top_k, "seed": request.seed}
        stops = [stop for stop in self.all_stop_ids(sampling) if 0 <= stop < self.vocab_size]  # others are refused
        return {
            **settings,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": sorted(stops),
            "ignore_eos": True,  # all stop ids are spelt out
            "logprobs": 0,  # of the token drawn, and of no other
        }

    def _completion(
        self, request: Request, token_ids: list[int], log_probs: list[float | None], finish_reason: str
    ) -> Completion:
        """Returns the completion that a server or library gave, whose finish_reason may be "abort"; raises ValueError
        for an unknown one, and as check_completion does."""
        reason = "aborted" if finish_reason == "abort" else finish_reason
        return self.check_completion(request, Completion(request.id, token_ids, log_probs, reason, self.weight_version))


def load_rollout_class(name: str) -> type[Rollout]:
    """Returns the engine that rollout.name names: a shipped one, or the subclass in a file or module."""
    key, (path, chosen) = f"{KEY}.name={name}", split_object(name)
    if name in TABLE["engine"] or chosen:
        engines = [find("engine", name, f"{KEY}.name")]
    else:
        module = load_module(path, f"{KEY}.name")
        engines = [value for value in vars(module).values() if is_engine(value) and value.__module__ == module.__name__]
        engines = list(dict.fromkeys(engines))
    if len(engines) != 1 or not is_engine(engines[0]):
        names = [value.__name__ if isinstance(value, type) else repr(value) for value in engines]
        choice = f"one of them, e.g. {path}:{names[0]}" if len(names) > 1 else f"from {', '.join(present('engine'))}"
        raise ValueError(
            f"{key}: the file must define exactly one subclass of workers.rollout.Rollout, it defines {names}. Choose "
            f"{choice}."
        )
    [engine_class] = engines
    constructor_arguments(engine_class, key, None, None, None)
    if engine_class.generate_sequences is not Rollout.generate_sequences:
        find("optional", "generate_sequences").check(engine_class, key)
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
    arguments = {"config": config, "tokenizer": tokenizer, "model": model}
    if "module" in inspect.signature(engine_class).parameters:
        arguments["module"] = model
    return bind(engine_class, arguments, key=key).keywords


def generate_batch(
    engine: Rollout, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int
) -> DataProto:
    """Returns `prompts` with the columns of a rollout, by the engine's generate_sequences, whoever wrote it."""
    engine.check_takes(*prompts.non_tensor_batch["raw_prompt_ids"])
    if type(engine).generate_sequences is Rollout.generate_sequences or not len(prompts):
        return Rollout.generate_sequences(engine, prompts, sampling, seed, first_row)
    return find("optional", "generate_sequences").answer(engine, prompts, sampling, seed, first_row)


def check_completions(engine: Rollout, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Raises ValueError unless what `engine` returned is one completion for each request, in their order, and as
    check_completion does."""
    name = f"the engine {callable_name(type(engine))}"
    rule = "generate must return a list of one Completion for each request, in the order of the requests"
    results = [completions] if not isinstance(completions, list | tuple) else completions
    if wrong_types := [type(result).__name__ for result in results if not isinstance(result, Completion)]:
        raise ValueError(f"{name} returned {wrong_types[0]}: {rule}.")
    if len(completions) != len(requests):
        raise ValueError(f"{name} returned {len(completions)} completions for {len(requests)} requests: {rule}.")
    for request, completion in zip(requests, completions, strict=True):
        if completion.id != request.id:
            raise ValueError(f"{name} returned that of request {completion.id} where {request.id} belongs: {rule}.")
        engine.check_completion(request, completion)


def sample_of(request: Request, answer: Completion) -> Sample:
    """Returns the row of a request and its completion; nothing is learnt from one that was aborted."""
    sample = Sample(request.prompt_ids, end_reason=END_REASON_OF[answer.finish_reason])
    sample.extend(answer.token_ids, answer.log_probs, answer.finish_reason != "aborted", answer.weight_version)
    return sample


def longest_sequence(config: RolloutConfig) -> int:
    """Returns how many tokens of prompt and response together the engine takes."""
    return config.max_model_len or config.prompt_length + config.response_length


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> set[int]:
    """Joins generation_config's eos ids, the tokenizer's eos and the special token that ends a turn in its template."""
    declared = generation_config.eos_token_id if generation_config else None
    declared = declared if isinstance(declared, list) else [declared]
    return {*declared, tokenizer.eos_token_id, template_terminator(tokenizer)} - {None}


def check_request(request: Request, vocab_size: int, longest: int | None, limit: str = "the model's positions") -> None:
    """Raises ValueError for an empty prompt, an unknown token id, no token asked for, or a sequence above `longest`
    (None: there is no limit), which `limit` sets."""
    ids, max_tokens = request.prompt_ids, request.sampling.max_tokens
    if not ids:
        raise ValueError(f"request {request.id} has an empty prompt: a response needs a token to follow.")
    if max_tokens < 1:
        raise ValueError(f"request {request.id} asks for max_tokens={max_tokens}: it must be 1 or more.")
    if not 0 <= min(ids) <= max(ids) < vocab_size:
        raise ValueError(
            f"request {request.id} has token ids from {min(ids)} to {max(ids)}, but the model's are 0 to "
            f"{vocab_size - 1}: encode the prompt with the model's own tokenizer."
        )
    if longest and len(ids) + max_tokens > longest:
        raise ValueError(
            f"request {request.id}: {len(ids)} tokens of prompt and max_tokens={max_tokens} are more than {longest}, "
            f"{limit}: lower data.max_prompt_length or data.max_response_length."
        )


def check_temperature(request: Request) -> None:
    """Raises ValueError for a temperature at which vLLM would not sample: at a higher one instead, and in silence."""
    sampling = request.sampling
    if sampling.do_sample and sampling.temperature < COLDEST:
        raise ValueError(
            f"request {request.id} asks for temperature={sampling.temperature}: vLLM samples at {COLDEST} or more. "
            "Raise it, or sample greedily (do_sample=false)."
        )


def divergence(weight_version: int, location: str) -> FloatingPointError:
    """Returns the error of logits that nothing can be drawn from, found at `location`."""
    return FloatingPointError(
        f"the policy's logits are NaN or infinite after {weight_version} updates of its weights, in {location}: it has "
        "diverged. Go on from an earlier checkpoint with a lower actor_rollout_ref.actor.optim.lr. Before any update, "
        "the model's own weights are broken."
    )
