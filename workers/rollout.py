"""The contract of every rollout engine: token ids in, token ids out.

Requests are added at any time, each with its own sampling and seed; `step` advances them, and hands out those that
finished. An engine implements `step`, or `generate` alone, which takes a batch of requests and returns when all have
finished: each works through the other. `generate_sequences`, the rollout of a batch of prompts, is written once on top;
an engine that defines it itself is asked for whole batches alone (workers/load_rollout.py).
Sampled ids are never decoded and encoded again. `actor_rollout_ref.rollout.name=my_engine.py` names the file of a
subclass of yours, and `my_engine.py:Class` one of several in it.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from configs.errors import ConfigError, notice_once
from configs.import_utils import callable_name
from configs.schema import RolloutConfig
from data.padding import collate
from data.pretrained import template_terminator
from data.protocol import DataProto
from data.seeding import derive_seed
from data.types import END_REASON_OF, Completion, Request, Sample, SamplingParams

KEY = "actor_rollout_ref.rollout"
OPTIONAL = (  # settings that some engines do not read
    "gpu_memory_utilization", "free_cache_engine", "enforce_eager", "max_model_len", "enable_prefix_caching",
    "enable_chunked_prefill", "load_format", "tensor_model_parallel_size",
)  # fmt: skip
COLDEST = 0.01  # vLLM samples at no lower temperature, whatever it is asked
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


@dataclass(frozen=True)
class Checksums:
    """The bits of weights in `dtype`, added up: by name, modulo the numbers that as many bits have.

    Weights that lie side by side in one tensor, in any order, or in parts, or padded by zeros, have the same total.
    """

    dtype: torch.dtype
    sums: dict[str, int]

    def total(self, without: Collection[str] = ()) -> int:
        """Adds up all but these names."""
        return sum(found for name, found in self.sums.items() if name not in without) % (1 << 8 * self.dtype.itemsize)


def bit_sum(tensor: Tensor, dtype: torch.dtype) -> int:
    """Adds up the bits of each number of `tensor`, in `dtype`, as an integer of their size, which may overflow."""
    bits = BITS[dtype.itemsize]
    return tensor.detach().to(dtype).contiguous().view(bits).sum(dtype=bits).item() % (1 << 8 * dtype.itemsize)


class Rollout:
    """Base of all engines, which implement `step`, or `generate` alone, or `generate_sequences` alone.

    Args:
        config: rollout settings.
        tokenizer: for the pad id and the stop set.
        model: the actor's, for its stop ids, and, as `module`, for engines that sample from it; None: there is none.

    Attributes:
        own_weights: whether it samples from a copy of the actor's weights, which `load_weights` has to bring, and not
            from the actor's own module.
        elsewhere: whether that copy is in a server, which was started with a model of its own: only a trainer exchanges
            its weights.
        is_probed: of one without a copy: whether what it draws is held against the trainer now and then all the same.
        takes_adapter: whether it adds LoRA's matrices itself: `load_adapter` brings them at every sync, `load_weights`
            the frozen model where it has `lost_weights`.
        lost_weights: whether that copy is gone, since it slept, and `load_weights` has to come before the next prompt.
        vocab_size: token ids of `model` are 0 to this number − 1.
        longest: most tokens of prompt and response together.
        reads: the OPTIONAL settings that have an effect.
    """

    vocab_size: int
    reads: tuple[str, ...] = OPTIONAL
    own_weights: bool = False
    elsewhere: bool = False
    is_probed: bool = False
    takes_adapter: bool = False
    lost_weights: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if all(vars(Rollout)[name] is getattr(cls, name) for name in ("generate", "step", "generate_sequences")):
            raise TypeError(
                f"{cls.__name__} cannot generate: a subclass of workers.rollout.Rollout defines "
                "generate(requests) -> list[Completion], in the order of the requests, or step() -> list[Completion], "
                "which advances the requests that it takes from self.waiting and returns those that finished, or "
                "generate_sequences(prompts) -> DataProto, which answers a whole batch."
            )

    @classmethod
    def check(cls, config: RolloutConfig, workers: int, gpus: int) -> None:
        """Checks settings before anything is started; tells of those that have no effect.

        Args:
            workers: of the run; `gpus`: of each.

        Raises:
            ConfigError: the engine cannot work by them.
        """
        defaults = {field.name: field.default for field in fields(RolloutConfig)}
        idle = [name for name in OPTIONAL if name not in cls.reads and config[name] != defaults[name]]
        if idle:
            notice_once(f"{KEY} sets {', '.join(idle)}, which the engine name={config.name} does not read.")
        most = config.max_model_len if "max_model_len" in cls.reads else None
        if most is not None and most < (longest := config.prompt_length + config.response_length):
            raise ConfigError(
                f"{KEY}.max_model_len={most} is below prompt_length + response_length = {longest}: leave it null."
            )

    @classmethod
    def workers_per_engine(cls, config: RolloutConfig) -> int:
        """Counts the neighbours in rank that one engine is split over."""
        return 1

    def __init__(self, config: RolloutConfig | None = None, tokenizer: Any = None, model: Any = None) -> None:
        if config is None:  # engines written for verl call it so; `build_rollout` has done the work before
            assert "longest" in vars(self), f"{type(self).__name__} needs a config, a tokenizer and a model"
            return
        self.config = config
        self.module = model
        self.longest = longest_sequence(config)
        if model is not None:
            self.vocab_size = model.config.get_text_config().vocab_size
        self.pad_token_id = tokenizer.pad_token_id
        self.stop_ids = stop_token_ids(tokenizer, model.generation_config if model else None)
        self.weight_version = 0
        self.waiting: dict[int, Request] = {}  # by id, in the order in which they came
        self.running: dict[int, Any] = {}  # by id, of an engine that keeps them here: the request, or what answers it

    def all_stop_ids(self, sampling: SamplingParams) -> set[int]:
        """Returns the ids that end a response: the engine's own, and those that were asked for."""
        return self.stop_ids.union(sampling.stop_token_ids)

    def add(self, request: Request) -> None:
        """Queues `request`, which may join while others are running.

        Raises:
            ValueError: the engine cannot answer it.
        """
        assert request.id not in self.waiting, f"request {request.id} is waiting already"
        assert request.id not in self.running, f"request {request.id} is running already"
        self.waiting[request.id] = request

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
        """These episodes are over: drops what the engine keeps for their next turns, if it keeps anything."""

    def has_unfinished_requests(self) -> bool:
        """Returns True if requests are waiting or running; an engine that keeps running ones elsewhere counts them."""
        return bool(self.waiting or self.running)

    def tokens_so_far(self, seen: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        """Token ids and log-probs of the running requests in `seen`, beyond the first `seen[id]`, for those who stream.

        They were added as `piecewise`. An engine that cannot look into running requests has none: all comes with the
        completion.
        """
        return {}

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """One completion per request, in their order, while nothing else is in flight. Equal prompts may be computed
        once."""
        assert type(self).step is not Rollout.step, f"{type(self).__name__} defines generate, which this would call"
        assert not self.has_unfinished_requests(), "other requests are in flight, whose completions would be lost"
        done: dict[int, Completion] = {}
        try:
            for request in requests:
                self.add(request)
            while self.has_unfinished_requests():
                for completion in self.step():
                    done[completion.id] = completion
        finally:
            if self.has_unfinished_requests():
                self.abort([request.id for request in requests])
        missing = [request.id for request in requests if request.id not in done]
        assert not missing, f"{type(self).__name__} ran dry without completions of the requests {missing}"
        return [done[request.id] for request in requests]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Samples from these weights from now on; whatever was cached under the old ones is dropped.

        `weights` are (name, tensor) as the actor's checkpoint has them, made as they are asked for. An engine that
        samples from the actor's own module needs none of them.
        """
        assert not self.has_unfinished_requests(), "the weights would change under requests in flight: abort them first"
        self.weight_version = version

    def held_weights(self) -> Checksums | None:
        """Returns the checksums of the weights that it samples from now, under names of its own; None: it cannot say.

        Called before the first `load_weights` and after each.
        """
        return None

    def _at_least_one(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Returns `weights`; raises ValueError if there are none."""
        remaining = iter(weights)
        first = next(remaining, None)
        if first is None:
            raise ValueError(
                f"the {self.config.name} engine was given no weights for version {self.weight_version}: it would go on "
                "sampling from the old ones. load_weights takes all of the actor's (workers/engine.py: "
                "TrainEngine.weights)."
            )
        return chain([first], remaining)

    def _sampling_fields(self, request: Request) -> dict[str, Any]:
        """Returns the request's sampling and stop ids as vLLM and its server name them."""
        sampling, drawn = request.sampling, {"temperature": 0.0}
        if sampling.do_sample:
            top_k = sampling.top_k if sampling.top_k > 0 else -1
            drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": sampling.min_p}
            drawn |= {"top_k": top_k, "seed": request.seed}
        stops = [stop for stop in self.all_stop_ids(sampling) if 0 <= stop < self.vocab_size]  # others are refused
        return {
            **drawn,
            "max_tokens": sampling.max_tokens,
            "stop_token_ids": sorted(stops),
            "ignore_eos": True,  # all stop ids are spelt out
            "logprobs": 0,  # of the token drawn, and of no other
        }

    def _completion(
        self, request: Request, token_ids: list[int], log_probs: list[float | None], finish_reason: str
    ) -> Completion:
        """Returns the completion that a server or library gave, whose finish_reason may be "abort".

        Raises:
            FloatingPointError: a log-prob is no finite number.
            ValueError: an unknown finish_reason.
        """
        reason = "aborted" if finish_reason == "abort" else finish_reason
        found = check_finite(log_probs, request, self.weight_version)
        return Completion(request.id, token_ids, found, reason, self.weight_version)

    def sleep(self) -> None:
        """Gives memory back until `wake_up`, where the engine has any to give."""

    def wake_up(self) -> None:
        """Takes the memory again that `sleep` gave back."""

    @contextmanager
    def together(self) -> Iterator[bool]:
        """Within the block the engine is asked; whether this worker asks. Where an engine is split over workers, all of
        them enter it at once, and the others do first what the one that asks tells them."""
        yield True

    def close(self) -> None:
        """Ends the engine, which is not asked again."""

    def generate_sequences(
        self, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int = 0
    ) -> DataProto:
        """Returns `prompts` (column raw_prompt_ids) with the columns of a rollout (data/padding.py: collate).

        P is prompt_length, R response_length. Row i draws by `seed` and by `first_row` + i, its place in the whole of
        which these prompts may be one worker's share.
        """
        requests = [
            Request(row, list(ids), sampling, derive_seed(seed, "row", first_row + row))
            for row, ids in enumerate(prompts.non_tensor_batch["raw_prompt_ids"])
        ]
        completions = self.generate(requests) if requests else []  # a share may be without rows
        check_completions(f"the engine {callable_name(type(self))}", requests, completions)
        samples = [sample_of(request, done) for request, done in zip(requests, completions, strict=True)]
        rollouts = collate(samples, self.config.prompt_length, self.config.response_length, self.pad_token_id)
        further = [name for name in prompts.tensors if name not in rollouts]
        return rollouts.union(prompts.select(further))


def check_completions(name: str, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Raises ValueError unless what the engine called `name` returned is one completion for each request, in
    their order, with a log-prob for each token, and no more tokens than were asked for."""
    rule = "generate must return a list of one Completion for each request, in the order of the requests"
    strangers = [completions] if not isinstance(completions, list | tuple) else completions
    if strange := [type(one).__name__ for one in strangers if not isinstance(one, Completion)]:
        raise ValueError(f"{name} returned {strange[0]}: {rule}.")
    if len(completions) != len(requests):
        raise ValueError(f"{name} returned {len(completions)} completions for {len(requests)} requests: {rule}.")
    for place, (request, done) in enumerate(zip(requests, completions, strict=True)):
        if done.id != request.id:
            raise ValueError(
                f"{name} returned the completion of request {done.id} where that of request {request.id} belongs, at "
                f"place {place}: {rule}."
            )
        tokens, log_probs, most = len(done.token_ids), len(done.log_probs), request.sampling.max_tokens
        if log_probs != tokens or tokens > most:
            raise ValueError(
                f"{name} returned {tokens} token_ids and {log_probs} log_probs for request {request.id}: there must be "
                f"a log-prob for each token, and at most request.sampling.max_tokens={most} tokens."
            )


def sample_of(request: Request, done: Completion) -> Sample:
    """Returns the row of a request and its completion; nothing is learnt from one that was aborted."""
    sample = Sample(request.prompt_ids, end_reason=END_REASON_OF[done.finish_reason])
    sample.extend(done.token_ids, done.log_probs, done.finish_reason != "aborted", done.weight_version)
    return sample


def longest_sequence(config: RolloutConfig) -> int:
    """Returns how many tokens of prompt and response together the engine takes."""
    return config.max_model_len or config.prompt_length + config.response_length


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None) -> set[int]:
    """generation_config's eos ids ∪ the tokenizer's eos ∪ the special token that ends a turn in its chat template."""
    declared = generation_config.eos_token_id if generation_config else None
    declared = declared if isinstance(declared, list) else [declared]
    found = {*declared, tokenizer.eos_token_id, template_terminator(tokenizer)}
    return {token_id for token_id in found if token_id is not None}


def check_request(request: Request, vocab_size: int, longest: int | None, limit: str = "the model's positions") -> None:
    """Refuses what cannot be answered by a model with so many token ids, in sequences of at most `longest` tokens.

    Args:
        longest: None: any number.
        limit: what sets `longest`.

    Raises:
        ValueError: an empty prompt, an unknown token id, no token asked for, or a sequence too long.
    """
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
            f"{limit}: shorten the prompt (data.max_prompt_length) or the response (data.max_response_length)."
        )


def check_temperature(request: Request) -> None:
    """Raises ValueError for a temperature at which vLLM would not sample: at a higher one instead, and in silence."""
    sampling = request.sampling
    if sampling.do_sample and sampling.temperature < COLDEST:
        raise ValueError(
            f"request {request.id} asks for temperature={sampling.temperature}: vLLM samples at {COLDEST} or more. "
            "Raise it, or sample greedily (do_sample=false)."
        )


def check_finite(log_probs: list[float | None], request: Request, weight_version: int) -> list[float]:
    """`log_probs` of the response to `request`; raises FloatingPointError if one of them is no number."""
    for place, value in enumerate(log_probs):
        if value is None or not math.isfinite(value):
            raise divergence(weight_version, f"request {request.id}, token {place + 1} of its response")
    return log_probs


def divergence(weight_version: int, where: str) -> FloatingPointError:
    """Returns the error of logits that nothing can be drawn from, found in `where`."""
    return FloatingPointError(
        f"the policy's logits are NaN or infinite after {weight_version} updates of its weights, in {where}: it has "
        "diverged, most often by a learning rate too high (actor_rollout_ref.actor.optim.lr). Start again from an "
        "earlier checkpoint, with a lower one. Before any update, the model's own weights are broken."
    )
