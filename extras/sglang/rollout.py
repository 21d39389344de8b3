"""Rollouts by SGLang, in processes of its own that this one starts: continuous batching, a cache of prompts as a tree.

NOT RUN YET: written against the API of SGLang 0.5.23 (sglang.Engine), which needs a GPU and a torch of its own; tests
hold it against a stand-in for that class. Its log-probs are those after temperature and before top-k, top-p and min-p:
requests with such filters are refused. SGLang is imported here alone, and lazily.
"""

import asyncio
import tempfile
from collections.abc import Coroutine, Iterable
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.errors import ConfigError
from configs.schema import RolloutConfig
from data.types import Completion, Request
from extras.openai.async_rollout import AsyncRollout
from extras.openai.weight_transfer import buckets
from workers.rollout import KEY, longest_sequence
from workers.vllm_rollout_spmd import save_config

SEEDS = 1 << 31


class SGLangRollout(AsyncRollout):
    """Samples by SGLang; it starts from the model's config alone, and `load_weights` brings the weights."""

    own_weights = True
    counts_filters = False

    @classmethod
    def check(cls, config: RolloutConfig, workers: int, gpus: int) -> None:
        if find_spec("sglang") is None:
            raise ConfigError(f"{KEY}.name={config.name}: SGLang is not installed (docs/engines.md).")
        super().check(config, workers, gpus)

    def __init__(self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        from sglang import Engine

        super().__init__(config, tokenizer, model)
        self.sleeps = model.device.type == "cuda" and config.free_cache_engine
        self.asleep = False
        with tempfile.TemporaryDirectory(prefix="sglang_config_") as folder:
            save_config(model, folder)
            self.engine = Engine(**({"model_path": folder} | engine_settings(config, model)))

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.engine.loop.run_until_complete(work)

    def step(self) -> list[Completion]:
        if self.has_unfinished_requests():
            self.wake_up()
        return super().step()

    async def answer(self, request: Request) -> Completion:
        fields = self._sampling_fields(request)
        params = {
            "temperature": fields["temperature"],
            **({"sampling_seed": fields["seed"] % SEEDS} if "seed" in fields else {}),
            "max_new_tokens": fields["max_tokens"],
            "stop_token_ids": fields["stop_token_ids"],
            "ignore_eos": not fields["stop_token_ids"],  # where it is set, SGLang does not stop at these either
        }
        output = await self.engine.async_generate(
            input_ids=request.prompt_ids, sampling_params=params, return_logprob=True, rid=str(request.id)
        )
        meta = output["meta_info"]
        log_probs, token_ids = [[entry[part] for entry in meta.get("output_token_logprobs", [])] for part in (0, 1)]
        return self._completion(request, token_ids, log_probs, meta["finish_reason"]["type"])

    async def drop(self, tasks: dict[int, asyncio.Task[Completion]]) -> None:
        """SGLang is told to abort them, and answers each: an id is free again only then."""
        for request_id in tasks:
            self.engine.tokenizer_manager.abort_request(rid=str(request_id))
        await asyncio.gather(*tasks.values(), return_exceptions=True)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies `weights`, named as in a checkpoint, some at a time, and drops the caches.

        Raises ValueError if there are none, or if SGLang does not take them.
        """
        super().load_weights(weights, version)
        for bucket in buckets(self._at_least_one(weights)):
            accepted, message = self.engine.update_weights_from_tensor(bucket, flush_cache=False)
            if not accepted:
                raise ValueError(f"SGLang does not take the weights of version {version}: {message}")
        self.engine.flush_cache()

    def sleep(self) -> None:
        """The cache leaves the GPU; the weights stay, as what came back of them would be nothing."""
        if self.sleeps and not self.asleep:
            assert not self.has_unfinished_requests(), "requests are in flight, whose cache would be lost"
            self.engine.flush_cache()
            self.engine.release_memory_occupation(tags=["kv_cache"])
            self.asleep = True

    def wake_up(self) -> None:
        if self.asleep:
            self.engine.resume_memory_occupation(tags=["kv_cache"])
            self.asleep = False

    def close(self) -> None:
        """Ends SGLang's processes, which must not be asked again."""
        self.engine.shutdown()


def engine_settings(config: RolloutConfig, model: PreTrainedModel) -> dict[str, Any]:
    """Returns the arguments of SGLang's ServerArgs; engine_kwargs.sglang has the last word."""
    device = model.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
    settings = {
        "skip_tokenizer_init": True,
        "load_format": config.load_format,
        "dtype": str(dtype).removeprefix("torch."),
        "device": device,
        "base_gpu_id": model.device.index or 0,
        "context_length": longest_sequence(config),
        "max_running_requests": config.max_num_seqs,
        "mem_fraction_static": config.gpu_memory_utilization,
        "disable_cuda_graph": bool(config.enforce_eager),
        "disable_radix_cache": not config.enable_prefix_caching,
        "enable_memory_saver": config.free_cache_engine and device == "cuda",
        "enable_deterministic_inference": True,  # else a row's seed is ignored
    }
    kwargs = config.engine_kwargs.get("sglang") or {}
    return settings | {name: value for name, value in kwargs.items() if value is not None}
