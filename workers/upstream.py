"""Keeps in one place what is used of other packages although it is private there, or is not in all versions that
requirements.txt allows; what is FSDP2's is in extras/sharding/private_names.py. tests/test_upstream.py looks each up by
its name. Seen in torch 2.11, 2.13 and 2.14, transformers 5.17, 5.19 and 5.23, Ray 2.60, vLLM 0.32. Ray and vLLM are
imported at their first use: a run may do without.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from configs.errors import ConfigError

TRITON_LOGGER = "torch._library.triton"
is_view = Tensor._is_view  # FlexAttention is compiled anew for each


class _Ray:
    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(import_module("ray"), name)
        except ModuleNotFoundError as error:
            text = f"trainer.executor=ray, or more than one worker, needs the package ray ({error})."
            raise ConfigError(f"{text} Install requirements.txt, or set trainer.executor=local.") from None


ray = _Ray()


@cache
def ray_store() -> SimpleNamespace:
    """Returns get, put and delete of Ray's key-value store, for signs of life: a stuck worker can still write there."""
    from ray.experimental import internal_kv as table

    return SimpleNamespace(get=table._internal_kv_get, put=table._internal_kv_put, delete=table._internal_kv_del)


def ray_address_file() -> Path:
    """Returns the file to which `ray start` writes its address; Ray reads it only when it joins."""
    return Path(ray._private.utils.get_ray_address_file(None))


def take_ray_token() -> None:
    """Has Ray read its token, if there is one; by itself, Ray does so only for the address "auto"."""
    from ray._private.authentication import authentication_token_setup as setup

    setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def memory_of_vllm() -> Any:
    """Returns the class by which vLLM names the shared memory of its processes on a CPU, the same name in all runs."""
    from vllm.distributed.device_communicators import cpu_communicator

    return cpu_communicator._CPUSHMDistributed


def vllm_ops() -> Any:
    """Returns vLLM's operators, one of which binds the memory of the whole process."""
    return torch.ops._C


def attention_of(model: PreTrainedModel) -> str:
    """Returns the attention set by `set_attn_implementation`; there is no public getter."""
    return model.config._attn_implementation


def has_adapter(model: PreTrainedModel) -> bool:
    """Says whether `model` has LoRA matrices; then only they are trained."""
    return model._hf_peft_config_loaded


@contextmanager
def without_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Has `model.save_pretrained` write the full config, which it leaves out for a model with an adapter."""
    before, model._hf_peft_config_loaded = model._hf_peft_config_loaded, False
    try:
        yield
    finally:
        model._hf_peft_config_loaded = before


def schema_of_hints(function: Callable) -> dict[str, Any]:
    """Returns the JSON schema of a function's type hints; the public one insists on Google's docstrings."""
    return import_module("transformers.utils.chat_template_utils")._convert_type_hints_to_json_schema(function)


def dynamo() -> ModuleType:
    """Returns torch's compiler, for limits of one function, and the error beyond them; importing it takes a second."""
    return torch._dynamo


def onednn_has_bfloat16() -> bool:
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def onednn_layout(weight: Tensor, rows: int) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, rows)


def onednn_linear(values: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")
