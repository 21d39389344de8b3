"""Rollouts by the Hugging Face model itself: no second copy of the weights, nothing to synchronise.

A sampling loop of our own in place of `generate`. Finished rows leave at once and waiting ones take their places; the
log-prob comes out of the softmax that is sampled from. No CUDA graphs: on a GPU, a step costs the launch of its
kernels. From the first request until none is left, the module is set up for decoding and must not be trained.
"""

from collections.abc import Iterable
from contextlib import ExitStack
from itertools import islice

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from configs.schema import RolloutConfig
from workers.hf.batch import RunningBatch
from workers.kernels import decoding
from workers.rollout import Completion, Request, Rollout

REFILL = 1 / 8  # of max_num_seqs: so many places have to be free before waiting rows are prefilled


class HFRollout(Rollout):
    """Samples from `model`, which is the actor's own."""

    def __init__(self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        super().__init__(config, tokenizer, model)
        text = model.config.get_text_config()
        self.vocab_size, self.positions = text.vocab_size, position_count(text)
        self.running: RunningBatch | None = None  # while there are requests
        self.set_up = ExitStack()  # what the module is set up with meanwhile
        kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
        if unknown := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
            names = ", ".join(sorted(kind.__name__ for kind in unknown))
            raise ValueError(
                f"{type(model).__name__} keeps more than keys and values from token to token ({names}), which "
                "actor_rollout_ref.rollout.name=hf cannot do: use vllm or sglang"
            )

    def add(self, request: Request) -> None:
        check_request(request, self.vocab_size, self.positions)
        assert self.running is None or request.id not in self.running, f"request {request.id} is running already"
        super().add(request)

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Lets waiting requests join, if it is time, and draws one token of every row."""
        if not self.has_unfinished_requests():
            return []
        goes_on = False
        try:
            if self.running is None:
                self._start()
            finished = self._join()
            if len(self.running):
                finished += self.running.step()
            goes_on = self.has_unfinished_requests()
        finally:
            if not goes_on:  # nothing is left to do, or it failed
                self._stop()
        return finished

    @torch.no_grad()
    def abort(self, ids: Iterable[int]) -> None:
        dropped = set(ids)
        super().abort(dropped)
        if self.running is not None:
            self.running.drop(dropped)
            if not self.has_unfinished_requests():
                self._stop()

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting) or (self.running is not None and len(self.running) > 0)

    def _join(self) -> list[Completion]:
        """Waiting requests take the free places, once there are enough of them; those that end by their first token."""
        free = self.config.max_num_seqs - len(self.running)
        # An attention that does not share prompts takes rows of one age only (workers/hf/cache.py).
        wanted = self.config.max_num_seqs * (REFILL if self.running.shares_prompts else 1)
        if not self.waiting or free < wanted:
            return []
        return self.running.join([self.waiting.pop(request_id) for request_id in [*islice(self.waiting, free)]])

    def _start(self) -> None:
        rows = min(len(self.waiting), self.config.max_num_seqs)
        steps = max(request.sampling.max_tokens for request in self.waiting.values()) - 1
        self.module.eval()
        self.set_up.callback(self.module.train)
        shares_prompts = self.set_up.enter_context(decoding(self.module, steps, rows))
        self.running = RunningBatch(
            self.module,
            self.stop_ids,
            self.pad_token_id,
            self.weight_version,
            shares_prompts=shares_prompts,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )

    def _stop(self) -> None:
        """Forgets all requests, and leaves the module as it was before them, to be trained."""
        self.waiting.clear()
        self.running = None
        self.set_up.close()


def check_request(request: Request, vocab_size: int, positions: int | None) -> None:
    """Refuses what a model with so many token ids and positions (None: any number) cannot answer.

    Raises:
        ValueError: an empty prompt, an unknown token id, no token asked for, or more tokens than positions.
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
    if positions and len(ids) + max_tokens > positions:
        raise ValueError(
            f"request {request.id}: {len(ids)} tokens of prompt and max_tokens={max_tokens} are more than the model's "
            f"{positions} positions: shorten the prompt (data.max_prompt_length) or the response "
            "(data.max_response_length)."
        )


def position_count(config: PreTrainedConfig) -> int | None:
    """How many positions a model of this `config` was made for; None: it does not say."""
    name = "max_position_embeddings"
    return config.to_dict().get(config.attribute_map.get(name, name))
