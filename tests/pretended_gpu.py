"""A pretended GPU: tensors that say cuda:0 to Python, compute on the CPU and cannot be mixed with those of the host.

    with PretendedGPU() as gpu:
        model.to("cuda")
        ...
    gpu.syncs      # how often the host waited for the device, by kind and line
    gpu.launches   # kernels, about: operations that are no views

An operation that a GPU would refuse raises `MixedDevices`, which names the line of ours that asked for it. For C++ such
a tensor is on the CPU, so autograd takes it, in a build of torch without CUDA too; autocast for cuda is autocast for
the CPU. FlexAttention is computed densely. What no pretence shows: speed, kernels' numbers, memory.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing

from configs.paths import ROOT

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
aten = torch.ops.aten
CONTAINERS = (tuple, list, dict)
LOOKED_INTO = (Tensor, *CONTAINERS)
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXED = {  # by tensors of the host, too, which are copied to the device
    *(aten.index.Tensor, aten._unsafe_index.Tensor),
    *(aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default),
}
SYNCS = {  # operations that read a number, or the size of their result, off the device
    *(aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default, aten.bincount.default),
    *(aten.nonzero.default, aten.masked_select.default, aten.masked_scatter_backward.default),
    *(aten._unique.default, aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default),
}


class MixedDevices(RuntimeError):
    """An operation on tensors of the device and of the host."""


class DeviceTensor(Tensor):
    """A tensor on cuda:0 to Python, on the CPU to C++; its numbers are in `numbers`."""

    numbers: Tensor
    device, is_cuda, is_cpu = CUDA, True, False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "DeviceTensor":
        shape = {"strides": numbers.stride(), "storage_offset": numbers.storage_offset(), "dtype": numbers.dtype}
        made = Tensor._make_wrapper_subclass(
            cls, numbers.shape, **shape, device="cpu", requires_grad=numbers.requires_grad
        )
        made.numbers = numbers
        return made

    def __init__(self, numbers: Tensor) -> None:
        super().__init__()

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "DeviceTensor":
        return DeviceTensor(inner["numbers"])

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({self.numbers!r})"

    def __reduce_ex__(self, protocol: int) -> Any:
        """Pickles the numbers as a plain tensor: a file says nothing of the device."""
        return self.numbers.detach().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        PretendedGPU.current.count_sync("tolist")
        return self.numbers.detach().tolist()

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    def numpy(self, *_: Any, **__: Any) -> None:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return PretendedGPU.current.run(func, args, kwargs or {})


def is_on_device(value: Any) -> bool:
    return isinstance(value, DeviceTensor)


def any_on_device(*values: Any) -> bool:
    return any(map(is_on_device, tensors_of(values)))


def numbers_of(value: Any) -> Any:
    """Takes the tensors in `value` off the device, without counting it."""
    return mapped(lambda tensor: tensor.numbers if is_on_device(tensor) else tensor, value)


def on_device(value: Any) -> Any:
    """Puts the tensors in `value` on the device, without counting it."""

    def put(tensor: Tensor) -> Tensor:
        return DeviceTensor(tensor) if not is_on_device(tensor) and tensor.device.type == "cpu" else tensor

    return mapped(put, value)


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Maps the tensors that operations take and return; torch's `tree_map` takes ten times as long here."""
    if isinstance(value, Tensor):
        return change(value)
    if not isinstance(value, CONTAINERS) or isinstance(value, torch.Size) or not value:
        return value
    if isinstance(value, dict):
        return {name: mapped(change, part) for name, part in value.items()}
    parts = [mapped(change, part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, CONTAINERS) or isinstance(value, torch.Size):
        return []
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts if isinstance(part, LOOKED_INTO) for tensor in tensors_of(part)]


class Transfer(torch.autograd.Function):
    """A copy from the host to the device, or the other way, and of its gradient back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype | None) -> Tensor:
        ctx.dtype, ctx.device = values.dtype, values.device
        copied = numbers_of(values).detach().to(dtype or values.dtype, copy=True)
        return copied if is_on_device(values) else DeviceTensor(copied)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        back = numbers_of(gradient).to(ctx.dtype)
        return DeviceTensor(back) if ctx.device == CUDA else back, None


class PretendedGPU(TorchFunctionMode):
    """While it is entered, "cuda" names the pretended device.

    Attributes:
        syncs: (kind, line) → times that the host waited for all that it had launched: numbers read, sizes that depend
            on numbers, and copies to the device that do not come from pinned memory with non_blocking=True.
        launches: operations on the device that are no views.
        flex_calls: (shape of the query, dtype) of each FlexAttention.
    """

    current: "PretendedGPU"

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.syncs, self.launches = Counter(), 0
        self.flex_calls: list[tuple[tuple[int, ...], torch.dtype]] = []

    def __enter__(self) -> "PretendedGPU":
        PretendedGPU.current = self
        self.stack = ExitStack()
        # Torch's own: vLLM, where it has run in this process on a CPU, has put one there that does nothing.
        self.stack.enter_context(patch.object(Tensor, "pin_memory", torch._C.TensorBase.pin_memory))
        for target, name, new in stand_ins(self):
            self.stack.enter_context(patch.object(target, name, new))
        future = torch.__future__  # so that module.to keeps tied weights tied
        self.stack.callback(future.set_swap_module_params_on_conversion, future.get_swap_module_params_on_conversion())
        future.set_swap_module_params_on_conversion(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.stack.close()

    def table(self) -> str:
        """Lays out the syncs, a line each."""
        lines = [f"{count:8}  {kind:34s}{place}" for (kind, place), count in self.syncs.most_common()]
        return "\n".join([f"{self.syncs.total():8}  syncs, {self.launches} launches", *lines])

    def count_sync(self, kind: str) -> None:
        if (line := place()) is not None:
            self.syncs[kind, line] += 1

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Takes the calls of Python that name a device."""
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        kwargs.pop("pin_memory", None)  # a build without CUDA has none
        if name in ("to", "cuda", "cpu") and isinstance(args[0], Tensor):
            return self.move(func, name, args, kwargs)
        if name == "pin_memory":
            pinned = args[0].clone()
            pinned.is_pinned_here = True
            return pinned
        if func in (Tensor.backward, torch.autograd.grad):  # where checkpointing computes again, and names devices
            (losses, *inputs), backward = args, func is Tensor.backward
            [loss] = [losses] if backward else losses
            given = [*inputs, *kwargs.values()]
            assert not (backward and any(given)), "the pretended GPU has backward() without arguments alone"
            with self.entered_again():
                options = {"allow_unreachable": True, "accumulate_grad": backward}
                return torch.autograd.graph._engine_run_backward(
                    (loss,), (torch.ones_like(loss),), False, False, tuple(*inputs), **options
                )
        if name == "pad_sequence" and any_on_device(args, kwargs):
            # C++ makes its result where C++ takes the device to be.
            self.launches += 1
            return on_device(func(*numbers_of(args), **numbers_of(kwargs)))
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if device is not None and device.type == "cuda":
            made = func(*numbers_of(args), **{**numbers_of(kwargs), "device": CPU})
        elif name == "new_tensor" and is_on_device(args[0]) and device is None:
            made = func(*numbers_of(args), **kwargs)
        elif device == CPU and (name.startswith("new_") or name.endswith("_like")) and any_on_device(args, kwargs):
            return func(*numbers_of(args), **kwargs)
        else:
            return func(*args, **kwargs)
        if name in ("tensor", "as_tensor", "asarray", "new_tensor"):
            self.count_sync("copy to the device")
        else:
            self.launches += 1
        return on_device(made)

    @contextmanager
    def entered_again(self) -> Iterator[None]:
        """Has the mode on within what it handles, where it is off otherwise."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def move(self, func: Callable, name: str, args: tuple, kwargs: dict) -> Any:
        """Does Tensor.to, .cuda and .cpu."""
        values, *rest = args
        named = [part for part in [*rest, kwargs.get("device")] if isinstance(part, torch.device | str | int)]
        dtypes = [part for part in [*rest, kwargs.get("dtype")] if isinstance(part, torch.dtype)]
        likes = [part for part in [*rest, kwargs.get("other")] if isinstance(part, Tensor)]
        named += [like.device for like in likes] + {"cuda": [CUDA], "cpu": [CPU]}.get(name, [])
        dtypes += [like.dtype for like in likes]
        target, dtype = torch.device(named[0]) if named else values.device, dtypes[0] if dtypes else None
        if target.type == values.device.type:
            return func(values, dtype, copy=kwargs.get("copy", False)) if name == "to" and dtype else values
        if target.type == "meta" or values.device.type == "meta":
            return func(numbers_of(values), *numbers_of(rest), **numbers_of(kwargs))
        if is_on_device(values):
            self.count_sync("copy to the host")
        elif not (kwargs.get("non_blocking") and hasattr(values, "is_pinned_here")):
            self.count_sync("copy to the device")
        return Transfer.apply(values, dtype)

    def run(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Runs an operation in which a tensor of the device takes part."""
        tensors = tensors_of((args, kwargs))
        host = [part for part in tensors if part.device == CPU and part.ndim > 0]
        if func in COPIES:
            if not all(map(is_on_device, tensors)):
                self.count_sync("copy to the device" if is_on_device(tensors[0]) else "copy to the host")
        elif host and func in INDEXED and is_on_device(args[0]) and all(map(is_on_device, args[2:3])):
            self.count_sync("index of the host")
        elif host:
            shapes = ", ".join(str(tuple(part.shape)) for part in host)
            raise MixedDevices(f"{place()}: {func} of tensors on {CUDA} and tensors on the host, of shape {shapes}.")
        is_mask = func in INDEXED and any(part is not None and part.dtype == torch.bool for part in args[1])
        sizeless = func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None
        if func in SYNCS or is_mask or sizeless:
            self.count_sync("index by a mask" if is_mask else func.overloadpacket.__name__)
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": "meta" if torch.device(kwargs["device"]).type == "meta" else CPU}
        found = func(*numbers_of(args), **numbers_of(kwargs))
        if not func.is_view and func is not aten.detach.default:
            self.launches += 1
            if not func._schema.is_mutable:
                return on_device(found)
        return return_and_correct_aliasing(func, args, kwargs, on_device(found))


def place() -> str | None:
    """Names the innermost running line of ours, or of transformers; None within vmap, which asks in C++."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        file = frame.f_code.co_filename
        if "_functorch" in file:
            return None
        if found is None and (short := name_of_interest(file)):
            found = f"{short}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return found or "?"


@cache
def name_of_interest(file: str) -> str | None:
    if file.startswith(str(ROOT)) and ".venv" not in file and file != __file__:
        return file.removeprefix(f"{ROOT}/")
    return f"transformers/{Path(file).name}" if "/transformers/" in file else None


def stand_ins(gpu: PretendedGPU) -> list[tuple[Any, str, Any]]:
    """(module, name, what stands for it) of what C++ or a compiler would do on a GPU."""
    real, enabled, dtype = torch.autocast, torch.is_autocast_enabled, torch.get_autocast_dtype
    group_in_c = clip_grad._group_tensors_by_device_and_dtype

    def on_cpu(device: Any = "cuda") -> str:
        return "cpu" if str(device).startswith("cuda") else device

    class Autocast(real):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            super().__init__(on_cpu(device_type), *args, **kwargs)

    def groups(tensors: list[list[Tensor]], *args: Any) -> dict:
        found = group_in_c(tensors, *args)
        return {(group[0][0][0].device, dtype): (group, places) for (_, dtype), (group, places) in found.items()}

    def compiled(function: Callable | None = None, **_: Any) -> Callable:
        return function if function is not None else compiled

    def flex(query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: tuple, scale: float, *_: Any) -> tuple:
        """FlexAttention's operator, without its blocks: [1, heads, T, d], on all pairs of tokens."""
        assert query.dtype == key.dtype == value.dtype, "FlexAttention takes one dtype"
        gpu.flex_calls.append((tuple(query.shape), query.dtype))
        places = torch.arange(query.shape[2], device=CUDA)
        seen = mask[-1](places[:1] * 0, places[:1] * 0, places[:, None], places)
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        scores = (query.float() @ key.float().transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1).to(value.dtype) @ value, scores.logsumexp(-1), scores.amax(-1)

    return [
        (torch, "autocast", Autocast),
        (torch.amp, "autocast", Autocast),
        (torch, "is_autocast_enabled", lambda device="cuda": enabled(on_cpu(device))),
        (torch, "get_autocast_dtype", lambda device="cuda": dtype(on_cpu(device))),
        (torch, "compile", compiled),
        (clip_grad, "_group_tensors_by_device_and_dtype", groups),
        (flex_attention, "flex_attention_hop", flex),
        (flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),  # neither compiled here, nor warned of
    ]
