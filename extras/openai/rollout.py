"""Rollouts by a server: any that takes token ids at /v1/completions and returns token ids with their log-probs.

Tried with vLLM's server, and with ours (extras/server/__main__.py). One request a row: over a list of prompts one seed
would draw the same for all. The server's weights are a copy: `load_weights` hands them over in shared memory or by
NCCL (extras/openai/weight_transfer.py).
"""

import asyncio
import resource
from collections import deque
from collections.abc import Coroutine, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import RolloutConfig
from data.types import Completion, Request, SamplingParams
from extras.http.http import Json, RequestRefused, api_root, ask, open_session
from extras.openai.async_rollout import AsyncRollout
from extras.openai.settings import KEY, openai_settings
from extras.openai.weight_transfer import check_weight_transfer, weight_transfer
from workers.collectives import gather, rank
from workers.rollout import check_temperature, divergence

RETRIES = 3  # within seconds, and no longer: a server that was started anew meanwhile has its first weights
SURE = 1e-3  # a log-prob this near 0 is that of the only choice
NOT_IN_JSON = "not JSON compliant"  # how a server in Python says that a log-prob is NaN


class OpenAIRollout(AsyncRollout):
    """Samples by a server; its address is in engine_kwargs.openai (settings.py).

    Raises ValueError if it does not answer as is needed, ServerError if it does not answer at all.
    """

    own_weights = True
    elsewhere = True
    reads = ("max_model_len",)

    @classmethod
    def check(cls, config: RolloutConfig, workers: int, gpus: int) -> None:
        check_weight_transfer(openai_settings(config), gpus)
        super().check(config, workers, gpus)

    def __init__(self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        super().__init__(config, tokenizer, model)
        self.settings = settings = openai_settings(config)
        self.url, self.runner = api_root(settings.base_url), asyncio.Runner(loop_factory=asyncio.new_event_loop)
        connections = min(config.max_num_seqs, files_allowed() // 2)
        self.session = self.run(open_session(settings.api_key, settings.timeout, connections))
        self.transfer = weight_transfer(settings)
        with ExitStack() as failed:
            failed.callback(self.close)
            self.model_name = self._choose_model()
            self.ignore_eos = True
            self.counts_filters = self._try_log_probs()
            self.ignore_eos = self._try_stops()
            failed.pop_all()

    def add(self, request: Request) -> None:
        check_temperature(request)
        super().add(request)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def close(self) -> None:
        """Hangs up."""
        self.transfer.close()
        self.run(self.session.close())
        self.runner.close()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hands `weights` over, named as in a checkpoint, tied ones under each of their names; caches are dropped.

        Of several workers the first sends them; the others go through them too, as all make those that are sharded.
        Raises ValueError if there are none, and as `WeightTransfer.send`.
        """
        super().load_weights(weights, version)
        weights = self._at_least_one(weights)
        if rank() == 0:
            self.transfer.send(weights, version)
        else:
            deque(weights, maxlen=0)
        gather(version)  # nobody samples before the server has them

    def held_weights(self) -> tuple[torch.dtype, dict[str, int]] | None:
        return gather(self.transfer.held_weights() if rank() == 0 else None)[0]

    async def answer(self, request: Request) -> Completion:
        """Returns the server's completion; raises ValueError if what one needs is not in its answer."""
        try:
            answer = await self._ask("POST", "/v1/completions", self._body(request))
        except RequestRefused as error:
            if NOT_IN_JSON in str(error):
                raise divergence(self.weight_version, f"request {request.id}") from error
            raise
        match answer:
            case {
                "choices": [{"finish_reason": reason, "token_ids": [*ids], "logprobs": {"token_logprobs": [*values]}}]
            }:
                return self._completion(request, ids, values, reason)
            case _:
                raise ValueError(
                    f"{self.url} answers /v1/completions without token_ids and logprobs.token_logprobs: train with "
                    "vLLM's server, from version 0.10.2 on, or `python -m extras.server`."
                )

    async def _ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """Asks the server, again where that fails: requests have seeds, so a lost answer is given a second time."""
        return await ask(self.session, method, self.url + path, body, retries=RETRIES, setting=f"{KEY}.base_url")

    def _body(self, request: Request) -> Json:
        fields = self._sampling_fields(request) | {"ignore_eos": self.ignore_eos}
        return {"model": self.model_name, "prompt": request.prompt_ids, "return_token_ids": True, **fields}

    def _choose_model(self) -> str:
        """Returns the name of the model that the server is to answer by.

        Raises ValueError if it has none of that name, or several and none is chosen, or if its sequences are too short.
        """
        answer = self.run(self._ask("GET", "/v1/models"))
        cards = {card["id"]: card for card in answer.get("data", [])}
        name = self.settings.model or (next(iter(cards)) if len(cards) == 1 else None)
        if name not in cards:
            raise ValueError(f"{KEY}.model={name}: {self.url} has the models {', '.join(cards)}. Choose one of them.")
        room = cards[name].get("max_model_len")
        if room is not None and room < self.longest:
            raise ValueError(
                f"{self.url} takes sequences of {room} tokens, and prompt and response have up to {self.longest}: "
                f"start it with --max-model-len {self.longest}, or lower data.max_prompt_length or max_response_length."
            )
        return name

    def _try(self, temperature: float = 1.0, max_tokens: int = 1) -> Completion:
        """Returns the server's answer to a prompt of ours, by the likeliest token at each place."""
        prompt = [7 * index % self.vocab_size for index in range(min(16, self.config.prompt_length))]
        sampling = SamplingParams(True, temperature, top_k=1, top_p=1.0, max_tokens=max_tokens)
        return self.run(self.answer(Request(0, prompt, sampling, seed=0)))

    def _try_log_probs(self) -> bool:
        """Returns True if the server's log-probs count top-k, top-p and min-p; those of a single choice are then 0.

        Raises ValueError if they do not even know the temperature, or if there are none.
        """
        plain = self._try().log_probs[0]
        if plain > -SURE:
            return True
        if abs(self._try(temperature=0.5).log_probs[0] - plain) < SURE:
            start = "start vLLM's server with --logprobs-mode processed_logprobs"
            raise ValueError(f"the log-probs of {self.url} are those before temperature, top-k and top-p: {start}.")
        return False

    def _try_stops(self) -> bool:
        """Returns True if it stops at stop_token_ids under ignore_eos; SGLang's does not, and stops at its own eos."""
        if self.config.response_length == 1:
            return True
        stop_ids, [first] = self.stop_ids, self._try().token_ids
        self.stop_ids = {*stop_ids, first}
        try:
            return len(self._try(max_tokens=2).token_ids) == 1
        finally:
            self.stop_ids = stop_ids


def files_allowed() -> int:
    """Returns how many files this process may have open, sockets included."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft
