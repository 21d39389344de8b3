"""Spreads a model over the workers of a group by FSDP2, and puts its weights together again.

With several workers every model is wrapped, also where each of them holds all of it: N replicas and one shard.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint import load as load_checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from configs.errors import notice_once
from configs.schema import OptimConfig
from data.pretrained import vision_of
from extras.sharding.offload import bytes_trained, make_optimizer
from extras.sharding.private_names import fill_empty, forget_forward, gather_in, shard_slices, sum_unused
from extras.sharding.settings import shard_count
from extras.sharding.tensor_parallel import by_mesh, same_on_peers, split_layers, sum_partial_gradients
from workers.collectives import Peers, common_notice, gather, group_size, rank
from workers.parallel import Replicas

# Scores are such views, and nobody writes into them.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)


def make_mesh(fsdp_size: int, device: torch.device, tensor_parallel_size: int = 1) -> DeviceMesh | None:
    """Arranges the ranks as replicas × shards × parts of a layer, with the parts on neighbours; None: there is one
    worker. Dimensions of one replica or one part are left out."""
    workers = group_size()
    if workers == 1:
        return None
    groups = workers // tensor_parallel_size
    shards = shard_count(fsdp_size, groups)
    sizes = {"replicate": groups // shards, "shard": shards, "part": tensor_parallel_size}
    dimensions = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    return init_device_mesh(device.type, tuple(dimensions.values()), mesh_dim_names=tuple(dimensions))


@dataclass(frozen=True, eq=False)
class Sharding(Replicas):
    """Says which ranks a model is spread over, and what is kept where.

    Attributes:
        mesh: the ranks, as `make_mesh` arranges them.
        reshard_after_forward: drop the others' parts of a layer after its forward, and gather them for its backward.
        offload: keep this rank's part, its gradients and its moments in main memory.
        param_dtype: what weights are gathered in to train and to score.
        reduce_dtype: what gradients are summed in. Shards, their gradients and moments are float32 all the same.
    """

    mesh: DeviceMesh
    reshard_after_forward: bool = True
    offload: bool = False
    param_dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype = torch.float32
    lockstep: ClassVar[bool] = True

    @property
    def device(self) -> torch.device:
        """The device that this rank's parts are on."""
        return torch.device("cpu" if self.offload else self.mesh.device_type)

    def build(
        self, read: Callable[[], PreTrainedModel], empty: Callable[[], PreTrainedModel], prepare: Callable, folder: Path
    ) -> PreTrainedModel:
        model = empty()
        prepare(model)
        shard(model, self)
        at = self.device  # where room is made for this rank's parts of weights that are nowhere yet
        fill_empty(model, lambda tensor: torch.empty_like(tensor, device=at) if tensor.is_meta else tensor.to(at))
        fill(model, folder, read)
        return model

    def bytes_held(self, numbers: int, optim: OptimConfig | None) -> int:
        shards = self.mesh.shape[self.mesh.mesh_dim_names.index("shard")]
        size = 4 * numbers if optim is None else bytes_trained(numbers, optim)
        return 0 if self.offload else size // shards

    def set_method(self, model: nn.Module, name: str, method: Callable[..., Any]) -> None:
        setattr(model, name, method)
        register_fsdp_forward_method(model, name)  # it gathers weights, as the forward does

    def set_gather_dtype(self, model: PreTrainedModel, problem: Callable[[], str | None], sibling: Any = None) -> None:
        """Has weights gathered in `param_dtype`, if with them it scores as where only products round them."""
        if sibling is not None:
            gather_as(model, sibling.param_dtype)
            return
        if model.param_dtype == torch.float32:
            return
        forget_forward(model, sharded_parts(model))  # the packed one may have raised
        gather_as(model, model.param_dtype)
        if reason := problem():
            common_notice(
                f"the weights of {type(model).__name__} are gathered in float32: in {model.param_dtype}, {reason}."
            )
            forget_forward(model, sharded_parts(model))
            gather_as(model, torch.float32)

    def on_device(self, model: PreTrainedModel) -> Callable[[], AbstractContextManager]:
        return partial(self._on_device, model)

    @contextmanager
    def _on_device(self, model: nn.Module) -> Iterator[None]:
        try:
            yield
        finally:
            self.reshard(model)

    def reshard(self, model: nn.Module) -> None:
        if not model.stays_gathered:
            for part in sharded_parts(model):
                part.reshard()

    def keeps_weights(self, model: nn.Module) -> bool:
        return model.stays_gathered

    @contextmanager
    def full_weights(self, model: nn.Module) -> Iterator[None]:
        """Holds all of `model` in float32: forwards communicate nothing, so ranks may differ in how many they run."""
        parts = sharded_parts(model)
        self.reshard(model)
        _set_gathered(model, torch.float32)
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        model.stays_gathered = True
        try:
            yield
        finally:
            model.stays_gathered = False
            self.reshard(model)
            for part in parts:
                part.set_reshard_after_forward(part is not model and model.reshards_layers, recurse=False)
            _set_gathered(model, model.param_dtype)

    @contextmanager
    def without_sums(self, model: nn.Module) -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)

    def optimizer(self, weights: Iterable[nn.Parameter], optim: OptimConfig) -> torch.optim.Optimizer:
        return make_optimizer(iter(weights), optim, in_main_memory=False)  # shards see to it by themselves

    def sum_gradients(self, model: nn.Module) -> None:
        if Peers.size > 1:  # the others are summed in the backward
            sum_partial_gradients(model)

    def clip(self, model: nn.Module, limit: float) -> float:
        groups = by_mesh([weight for weight in model.parameters() if weight.grad is not None]) or [[]]
        norms = [full_tensor(torch.nn.utils.get_total_norm([weight.grad for weight in group])) for group in groups]
        norm = norms[0] if len(norms) == 1 else same_on_peers(torch.stack(norms).norm())
        if (size := norm.item()) > limit:
            for group in groups:
                torch.nn.utils.clip_grads_with_norm_(group, limit, norm)
        return size

    def full(self, tensor: Tensor) -> Tensor:
        return full_tensor(tensor)

    def part(self, tensor: Tensor, like: Tensor | None) -> Tensor:
        return local_shard(tensor, like)


def shard(model: PreTrainedModel, sharding: Sharding) -> None:
    """Spreads the weights of `model` over the ranks: each decoder layer by itself, and the rest with the root.

    Gradients are plain sums over ranks, as a loss is divided by the counts of the whole mini-batch.
    """
    mesh, reshards, kind = sharding.mesh, sharding.reshard_after_forward, type(model)
    if "part" in mesh.mesh_dim_names:
        split_layers(model, mesh["part"])
        mesh = mesh[mesh.mesh_dim_names[:-1]]
    on_gpu = mesh.device_type != "cpu"
    policy = CPUOffloadPolicy(pin_memory=on_gpu) if sharding.offload else OffloadPolicy()
    precision = MixedPrecisionPolicy(reduce_dtype=sharding.reduce_dtype, cast_forward_inputs=False)
    options = {"mesh": mesh, "offload_policy": policy, "mp_policy": precision}
    for layer in decoder_layers(model):
        fully_shard(layer, reshard_after_forward=reshards, **options)
    fully_shard(model, reshard_after_forward=False, **options)
    model.reshards_layers, model.stays_gathered = reshards, False
    model.computes_on = torch.device(mesh.device_type)
    made = type(model)  # by FSDP2, of the model's own class
    made.__name__, made.__module__ = kind.__name__, kind.__module__  # by which transformers knows its weights' names
    made.device = property(lambda sharded: sharded.computes_on)  # transformers' is where its shards are
    model.param_dtype = sharding.param_dtype  # from `gather_as` on; until then float32
    if sharding.param_dtype != torch.float32:
        read_in_float32(model.get_input_embeddings())
    for part in sharded_parts(model):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)
        sum_unused(part)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Lists the layers of `model` that are sharded each by itself: all but those that read images, which a rank without
    an image does not enter, and which the root gathers."""
    tower = vision.tower if (vision := vision_of(model.config)) else ()
    layers = {name: part for name, part in model.named_modules() if isinstance(part, GradientCheckpointingLayer)}
    return [layer for name, layer in layers.items() if not name.startswith(tower)]


def sharded_parts(model: nn.Module) -> list[FSDPModule]:
    """Lists the parts of `model` whose weights are gathered together; none, where it is not sharded."""
    return [part for part in model.modules() if isinstance(part, FSDPModule)]


def gather_as(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Has the weights of a sharded `model` gathered in `dtype` from now on."""
    _set_gathered(model, dtype)
    model.param_dtype = dtype


def _set_gathered(model: nn.Module, dtype: torch.dtype) -> None:
    for part in sharded_parts(model):
        gather_in(part, dtype)


def read_in_float32(table: nn.Module) -> None:
    """Has an embedding return float32, whatever its weight is gathered in: layers add to it, and norms read the sum."""
    if type(table) is nn.Embedding:
        table.__class__ = Embedding
    else:
        table.register_forward_hook(lambda table, ids, output: output.float())


class Embedding(nn.Embedding):
    """Adds the gradients of a token that comes often up in float32, in which they are rounded once."""

    def forward(self, ids: Tensor) -> Tensor:
        if isinstance(self.weight, DTensor):
            return super().forward(ids).float()
        return _Lookup.apply(self.weight, ids, -1 if self.padding_idx is None else self.padding_idx)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, ids: Tensor, padding_id: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.numbers = len(weight), padding_id, False
        return F.embedding(ids, weight).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        [ids] = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(gradient, ids, *ctx.numbers), None, None


def full_tensor(tensor: Tensor) -> Tensor:
    """Returns all of a tensor of which this rank may have a part; then every rank has to ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_shard(tensor: Tensor, target: Tensor | None) -> Tensor:
    """Returns this rank's part of a `tensor` that every rank has whole, cut as `target` is."""
    if not isinstance(target, DTensor):
        return tensor
    mesh, placements = target.device_mesh, target.placements
    part = tensor[shard_slices(target.shape, mesh, placements)]
    part = part.to(target.to_local().device).contiguous()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=target.shape, stride=target.stride())


def fill(model: PreTrainedModel, folder: Path, read: Callable[[], nn.Module]) -> None:
    """Gives a sharded `model`, for which there is room alone, the weights of `folder`: each rank reads its parts where
    the files have the model's own names; else the first `read`s the model whole, and deals it out."""
    reason = next(filter(None, gather(other_weights(folder, model))), None)
    if reason is None:
        load_checkpoint(tensors_of(model), storage_reader=HuggingFaceStorageReader(str(folder)))
    else:
        if rank() == 0:
            notice_once(f"{type(model).__name__} is read whole by the first worker: in {folder}, safetensors {reason}.")
        source = dict(read().state_dict()) if rank() == 0 else {}
        for name, target in tensors_of(model).items():
            write(target, source.pop(name, None))


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Maps the names of a pretrained folder to this rank's weights and buffers, a tied one under its first name only;
    without LoRA's matrices."""
    names = model.state_dict(keep_vars=True).keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in names}
    tensors = (dict(model.named_parameters()) | buffers).items()
    return {name.replace(".base_layer", ""): tensor.detach() for name, tensor in tensors if ".lora_" not in name}


def other_weights(folder: Path, model: PreTrainedModel) -> str | None:
    """Says in what the safetensors files of `folder` differ from the weights of `model` under its own names; None: they
    hold all of them, and no others."""
    files = sorted(folder.glob("*.safetensors"))
    if len(files) > 1 and folder / "model.safetensors" in files:
        return "are of two kinds, model.safetensors and parts"
    names: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names |= set(opened.keys())
    expected = tensors_of(model).keys()
    tied = expected | model.state_dict(keep_vars=True).keys()  # in which a tied one is again
    unlike = [f"lack {name}" for name in sorted(expected - names)]
    unlike += [f"have also {name}" for name in sorted(names - tied)]
    return "are missing" if not files else unlike[0] if unlike else None


@torch.no_grad()
def write(target: Tensor, value: Tensor | None) -> None:
    """Sets `target`, of which each rank may have a part, to the `value` that the first rank has."""
    full = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    if rank() == 0:
        full.copy_(value)
    dist.broadcast(full, src=0)
    target.copy_(local_shard(full, target))
