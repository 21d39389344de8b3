"""Sets vLLM up: the arguments of vllm.EngineArgs, the models it takes, and the process in which it runs."""

import gc
import logging
import multiprocessing
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from configs.schema import RolloutConfig
from data.seeding import forked_rng
from workers.rollout import KEY, longest_sequence
from workers.upstream import TRITON_LOGGER, vllm_ops

BLOCK = 32  # tokens of a cache block on CPUs, the smallest there: prompts share whole blocks
CPU_CACHE_BYTES = 1 << 30  # of the cache on a CPU, at most; engine_kwargs.vllm.kv_cache_memory_bytes wins
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for
VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads are the worker's (configs/process.py)
    "VLLM_LOGGING_LEVEL": "ERROR",  # it warns ten times at every start, and for every tensor of a sync
    "VLLM_NO_USAGE_STATS": "1",
}
ON_CPU = {"TORCHDYNAMO_DISABLE": "1"}  # the first generation compiles nothing: 17 to 37 s less


def engine_settings(config: RolloutConfig, model: PreTrainedModel) -> dict[str, Any]:
    """Returns the arguments of vllm.EngineArgs.

    The dtype is that of the trainer: of its autocast if that is on, else of its weights.
    """
    device = model.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
    settings = {
        "model": model.name_or_path,
        "skip_tokenizer_init": True,
        "load_format": config.load_format,
        "enable_sleep_mode": device == "cuda" and config.free_cache_engine,
    }
    if (size := config.tensor_model_parallel_size) > 1:
        check_splits(model.config.get_text_config(), size)
        settings |= {"tensor_parallel_size": size, "distributed_executor_backend": "external_launcher"}
        settings["disable_custom_all_reduce"] = True  # it needs the other parts' GPUs, which a worker does not see
        settings["async_scheduling"] = False  # by default vLLM schedules a step ahead on a GPU: untried with parts
    if model.adapter.is_sent_alone(config):
        settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": vllm_rank(model.adapter.largest_rank(model))}
    return settings | shared_settings(config, model.config.get_text_config(), device, dtype)


def shared_settings(config: RolloutConfig, text: PretrainedConfig, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the arguments of vllm.EngineArgs, as far as they are the same where vLLM serves
    (extras/server/__main__.py); engine_kwargs.vllm has the last word."""
    settings = {
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": longest_sequence(config),
        "max_num_seqs": min(config.max_num_seqs, config.max_num_batched_tokens),  # a step takes a token a row
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": bool(config.enforce_eager),
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # sampling is spelt out, never inherited
    }
    if device == "cpu":
        check_head_size(text)
        cache = {"block_size": BLOCK, "kv_cache_memory_bytes": cpu_cache_bytes(config, text, dtype.itemsize)}
        settings |= cache | {"enforce_eager": True}  # compiling takes a CPU longer than it gains
        # A cut prompt draws a token in vain, and vLLM cannot put a CPU's generator back after that.
        uncut = max(config.max_num_batched_tokens, settings["max_model_len"])
        settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": uncut}
    engine_kwargs = config.engine_kwargs.get("vllm") or {}
    return settings | {name: value for name, value in engine_kwargs.items() if value is not None}


def vllm_rank(rank: int) -> int:
    """Returns the smallest rank of LoRA that vLLM has room for such matrices in; raises ValueError if there is none."""
    fitting = [size for size in LORA_RANKS if size >= rank]
    if not fitting:
        raise ValueError(
            f"{KEY}.load_lora=adapter: vLLM takes ranks up to {LORA_RANKS[-1]}, not {rank}. Set it to merge, or lower "
            "actor_rollout_ref.model.lora_rank."
        )
    return fitting[0]


def head_size(text: PretrainedConfig) -> int:
    values = text.to_dict()
    return values.get("head_dim") or text.hidden_size // text.num_attention_heads


def check_head_size(text: PretrainedConfig) -> None:
    """Raises ValueError for heads that vLLM's attention on CPUs does not know: it would fail at the first prompt."""
    if head_size(text) not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise ValueError(
            f"{KEY}.name=vllm: on a CPU, vLLM has attention for heads of {sizes} numbers, and this model's have "
            f"{head_size(text)}. Set rollout.name=hf, or choose another model."
        )


def check_splits(text: PretrainedConfig, size: int) -> None:
    """Raises ValueError for a model that vLLM cannot split over `size` workers."""
    widths = {"num_attention_heads": text.num_attention_heads, "intermediate_size": text.intermediate_size}
    if uneven := {name: width for name, width in widths.items() if width % size}:
        widths = ", ".join(f"{name}={width}" for name, width in uneven.items())
        raise ValueError(
            f"{KEY}.tensor_model_parallel_size={size}: the model has {widths}, which cannot be divided by {size}. Take "
            "a divisor of both, or 1."
        )


def cpu_cache_bytes(config: RolloutConfig, text: PretrainedConfig, number_bytes: int) -> int:
    """Sizes a cache for as many of the longest sequences as run side by side, within CPU_CACHE_BYTES; of one, always.

    On a CPU vLLM would take gpu_memory_utilization of all memory.
    """
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    block = 2 * text.num_hidden_layers * heads * head_size(text) * number_bytes * BLOCK
    blocks = -(-longest_sequence(config) // BLOCK)
    spare = 2  # vLLM keeps one for padding
    return block * max(blocks + spare, min(config.max_num_seqs * blocks + spare, CPU_CACHE_BYTES // block))


def vllm_environment(device_type: str) -> dict[str, str]:
    """Returns the environment, with the variables that vLLM is to find; those that the user has set stay."""
    return VARIABLES | ({} if device_type == "cuda" else ON_CPU) | os.environ


@contextmanager
def vllm_process(device_type: str) -> Iterator[None]:
    """Sets what vLLM needs in this process, and restores it after the block."""
    with process_as_it_is():
        os.environ |= vllm_environment(device_type)
        yield


@contextmanager
def process_as_it_is() -> Iterator[None]:
    """Puts back, after the block, what vLLM changes in the process when it starts and ends."""
    environment, frozen = dict(os.environ), gc.get_freeze_count()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision, show_error = torch.get_float32_matmul_precision(), sys.excepthook
    start_method = multiprocessing.get_start_method(allow_none=True)
    logging.getLogger(TRITON_LOGGER).setLevel(logging.ERROR)  # silences that there is none on a CPU
    try:
        with forked_rng(0), unbound_memory(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about vLLM
            yield
    finally:
        sys.excepthook = show_error
        multiprocessing.set_start_method(start_method, force=True)
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        os.environ.clear()
        os.environ.update(environment)
        if not frozen:
            gc.unfreeze()
        elif not gc.get_freeze_count():
            gc.freeze()


@contextmanager
def unbound_memory() -> Iterator[None]:
    """Keeps vLLM from binding this whole process's memory to one NUMA node: a trainer may need that of all."""
    vllm_ops().init_cpu_memory_env = lambda nodes: None
    try:
        yield
    finally:
        del vllm_ops().init_cpu_memory_env
