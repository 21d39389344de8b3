"""Splits the layers of a model over neighbours in rank, which compute rows together, by torch's tensor parallelism.

Attention is split by heads and the network after it by columns, as transformers' plan for a family says, and a head
that is no embedding by its vocabulary; embeddings and norms stay whole. Only heads have to be dealt out evenly.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism", 2019.
"""

import logging
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from transformers import PretrainedConfig, PreTrainedModel

from configs.errors import ConfigError
from extras.sharding.private_names import SHARDS_LOGGER

# What is both sharded and split is gathered in two goes, of which torch says that one would be faster.
logging.getLogger(SHARDS_LOGGER).setLevel(logging.ERROR)

KEY = "actor_rollout_ref.actor.tensor_parallel_size"
PARTIAL = "replicated_with_grad_allreduce"  # norms of heads: each rank has the gradient of its own heads


class AnyColumns(RowwiseParallel):
    """Takes columns of which ranks have different numbers, which torch's own style takes to be the same."""

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Sequence[Placement],
        desired_input_layouts: Sequence[Placement],
        module: nn.Linear,
        inputs: tuple[Tensor],
        mesh: DeviceMesh,
    ) -> DTensor:
        [part] = inputs
        full = torch.empty(*part.shape[:-1], module.in_features, device="meta")
        return DTensor.from_local(part, mesh, input_layouts, run_check=False, shape=full.shape, stride=full.stride())


STYLES = {"colwise": ColwiseParallel, "rowwise": AnyColumns}
# q, k and v, or gate and up, share their input: its gradients are added up on each rank, then in one all-reduce.
INPUTS = {
    "layers.*.self_attn": PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Replicate()}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    ),
    "layers.*.mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
}


def check_split(config: PretrainedConfig, size: int, workers_a_node: int) -> None:
    """Raises ConfigError if the layers of a model cannot be split over `size` neighbours: its numbers do not divide,
    its family has no such plan, or neighbours would be on two machines."""
    text, plan = config.get_text_config(), layer_plan(config)
    if not plan or set(plan.values()) - {*STYLES, PARTIAL}:
        raise ConfigError(
            f"{KEY}={size}: the layers of {text.model_type} cannot be split. Set it to 1, and shard the model instead."
        )
    heads = text.num_attention_heads
    key_heads = text.to_dict().get("num_key_value_heads") or heads
    if heads % size or key_heads % size:
        raise ConfigError(
            f"{KEY}={size}: this model has {heads} heads, {key_heads} key heads. Take a divisor of both, or 1 and "
            "shard the model instead."
        )
    if workers_a_node % size:
        raise ConfigError(
            f"{KEY}={size}: {workers_a_node} a machine cannot be dealt out in groups of {size}. Take a divisor of "
            f"{workers_a_node}."
        )


def layer_plan(config: PretrainedConfig) -> dict[str, str]:
    """Reads off transformers' names of what is split in a layer, and how; embeddings stay whole."""
    plan = config.get_text_config().base_model_tp_plan or {}
    return {name: style for name, style in plan.items() if name.startswith("layers.")}


def split_layers(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Splits the layers of `model` over the ranks of `mesh`, [size]; before they are sharded, and have weights."""
    plan = layer_plan(model.config)
    styles = {name: STYLES[style]() for name, style in plan.items() if style in STYLES}
    styles |= {parent: INPUTS[parent] for name in plan if (parent := name.rpartition(".")[0]) in INPUTS}
    parallelize_module(model.base_model, mesh, styles, src_data_rank=None)
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear) and head.weight is not model.get_input_embeddings().weight:
        parallelize_module(head, mesh, ColwiseParallel(output_layouts=Replicate()), src_data_rank=None)
    ends = tuple(name.removeprefix("layers.*") for name, style in plan.items() if style == PARTIAL)
    model.partial_layers = [part for name, part in model.base_model.named_modules() if name.endswith(ends)]
    model.split_over = mesh.get_group()


@torch.no_grad()
def sum_partial_gradients(model: PreTrainedModel) -> None:
    """Adds up the gradients of weights that each rank has whole, and uses for its own heads alone."""
    for weight in (weight for layer in model.partial_layers for weight in layer.parameters()):
        dist.all_reduce(weight.grad.to_local(), group=model.split_over)


def same_on_peers(norm: Tensor) -> Tensor:
    """Returns the first rank's `norm`: others may add up in another order, and peers have to scale by the same."""
    dist.broadcast(norm, src=0)
    return norm


def by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Groups `tensors` by the ranks that they are spread over, as torch takes together what is spread alike."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device_mesh if isinstance(tensor, DTensor) else None, []).append(tensor)
    return list(groups.values())
