"""Plays ranks of a training step that is too large for any machine here: python -m benchmarks.ranks 7b 8 [key=value …]

A rank is played alone: torch's fake process group answers at once, tensors of floats are fake (they have shapes and no
numbers), and all else is what a worker does. Its models are built, sharded and split as the keys say; it scores rows
where the run does, takes the step of every model that learns, and hands the policy's weights to an engine. Printed is a
row of the table in docs/sharding.md: the collectives, what they bring to a rank, and the bytes that are alive at once.
Ranks whose collectives differ would wait for each other for ever: then the first difference is printed, and the exit
status is 1.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import multiprocessing
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, PreTrainedModel, Qwen2Config

from benchmarks.models import QWEN2
from configs.import_utils import load_modules
from configs.loader import CONFIG_DIR, Arguments, load_config
from configs.schema import Config
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from extras.kernels import token_head
from extras.sharding import fsdp2
from training.mini_batches import PolicyUpdates, mini_batches
from training.roles import ROLES, columns_read, needed_roles
from workers import collectives, models
from workers.engine import TrainEngine
from workers.model_worker import ModelWorker
from workers.parallel import layout_of
from workers.scoring_model import scoring_model

ACTOR = "actor_rollout_ref.actor"
ATTENTION, VOCABULARY = "one_row", 152064
HANDED_OVER = "weights to an engine"
GIB, GB = 2**30, 10**9
KINDS = ("allgather", "reducescatter", "allreduce", "broadcast", "alltoall", "barrier")
FACTORIES = ("empty", "zeros", "ones", "full", "rand", "new_", "scalar_tensor")  # how their names begin
DIMENSIONS = {"replicate": "replicas", "shard": "shards", "part": "parts"}
HEAD = (
    "| model | ranks | all-gathers: GB | reduce-scatters: GB | all-reduces: GB | others | to an engine: GB "
    "| GiB held | GiB at most | CPU s | played |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
PPO, REPLICAS = "algorithm.adv_estimator=gae", f"{ACTOR}.fsdp_config.fsdp_size=8"
SPLIT, SPLIT_IN_4 = (f"{ACTOR}.tensor_parallel_size={size}" for size in (8, 4))
ALL = (
    *(("7b", 8, keys) for keys in ([], [PPO], [SPLIT_IN_4])),
    ("7b", 64, [REPLICAS]),
    *(("32b", 64, keys) for keys in ([], [PPO], [SPLIT])),
    ("72b", 64, [SPLIT]),
    *(("72b", 1024, keys) for keys in ([], [SPLIT], [SPLIT, PPO])),
)


class Call(NamedTuple):
    """A collective of `size` ranks, which are `stride` apart, and the bytes of its largest tensor."""

    phase: str
    kind: str
    size: int
    stride: int
    bytes: int

    @property
    def received(self) -> float:
        """Counts the bytes that reach a rank, if nothing is sent twice."""
        share = 1.0 if self.kind == "broadcast" else (self.size - 1) / self.size
        return (2 if self.kind == "allreduce" else 1) * share * self.bytes


class Watch(TorchDispatchMode):
    """Lists the collectives of the block, and adds up the fake storages that are alive.

    Args:
        fakes: of it are the tensors of floats that are made from none before; None: they have numbers.

    Attributes:
        live, peak: bytes.
    """

    def __init__(self, fakes: FakeTensorMode | None = None) -> None:
        super().__init__()
        self.fakes, self.phase, self.calls = fakes, "build", list[Call]()
        self.live = self.peak = 0
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own operations come here
        kwargs = kwargs or {}
        if self.fakes and func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return True if args[0].dtype == torch.bool else 2  # a norm of 2 is clipped
        if self.fakes and makes_floats(func, args, kwargs):
            with self.fakes:
                output = func(*args, **kwargs)
        else:
            output = func(*args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            self.note_call(func, args, kwargs, output)
        for value in tree_leaves(output):  # not those by which torch finds out the shapes of DTensors
            if isinstance(value, FakeTensor) and value.fake_mode is self.fakes and value.device.type != "meta":
                self.note(value.untyped_storage())
        return output

    def note_call(self, func: Any, args: Any, kwargs: Any, output: Any) -> None:
        name = func._schema.name.partition("::")[2].replace("_", "")
        kind = next((kind for kind in KINDS if kind in name), None)
        if kind is None:  # a wait
            return
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        group = given.get("process_group", given.get("group_name"))
        if not isinstance(group, dist.ProcessGroup):
            by_name = dist.distributed_c10d._resolve_process_group
            group = by_name(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)
        tensors = [value for value in tree_leaves((args, output)) if isinstance(value, Tensor)]
        self.note_exchange(kind, group, max(tensor.nbytes for tensor in tensors))

    def note_exchange(self, kind: str, group: dist.ProcessGroup, size: int) -> None:
        ranks = [*dist.get_process_group_ranks(group), 0, 0]
        self.calls.append(Call(self.phase, kind, len(ranks) - 2, ranks[1] - ranks[0], size))

    def gather_objects(self, gather: Callable[..., None], object_list: list, obj: Any, group: Any = None) -> None:
        """Stands for all_gather_object, and counts it as one call, whatever the lengths; fake ranks answer alike."""
        self.note_exchange("objects", group or dist.group.WORLD, 0)
        if self.fakes:
            object_list[:] = [obj] * len(object_list)
        else:
            calls, self.calls = self.calls, []
            gather(object_list, obj, group=group)
            self.calls = calls

    def note(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage until it is freed, and anew where its size has changed."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self.sizes:
            weakref.finalize(storage, lambda: setattr(self, "live", self.live - self.sizes.pop(key)))
        self.live += size - self.sizes.get(key, 0)
        self.sizes[key], self.peak = size, max(self.peak, self.live)


def makes_floats(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Says whether an operation makes a tensor of floats in memory, and is not torch's, to find out a shape."""
    name = func._schema.name.partition("::")[2]
    if not (name.startswith(FACTORIES) or name.endswith("_like")):
        return False
    like = args[0] if args and isinstance(args[0], Tensor) else None
    dtype = kwargs.get("dtype") or (torch.get_default_dtype() if like is None else like.dtype)
    device = kwargs.get("device") or (torch.get_default_device() if like is None else like.device)
    is_ours = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is None
    return is_ours and dtype.is_floating_point and torch.device(device).type != "meta"


@dataclass
class Played:
    """Counts what a rank has done in a step.

    Attributes:
        held, peak: bytes, before the step and at most in it.
        seconds: of the CPU, for building the models, and for the step.
    """

    rank: int
    layout: str
    calls: list[Call]
    held: int
    peak: int
    seconds: tuple[float, float]


def play(config: Config, batch: DataProto, watch: Watch) -> Played:
    """Does what this rank's worker does in a step, in the group that it has joined; `batch` are its rows."""
    gather_objects = partial(watch.gather_objects, dist.all_gather_object)
    with patch.object(dist, "all_gather_object", gather_objects), watch:
        began = time.process_time()
        load_modules(config.actor_rollout_ref.model.external_lib)
        worker = ModelWorker(config, 10, [name for name in needed_roles(config) if name != "rollout"])
        for role in worker.roles.values():
            if hasattr(role, "engine"):
                make_moments(role.engine)
        watch.calls, watch.peak, held = [], watch.live, watch.live
        built = time.process_time()
        for watch.phase, act in step(worker, batch):
            act()
    mesh = worker.layouts["policy"].mesh
    layout = [f"{size} {DIMENSIONS[name]}" for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True)]
    seconds = built - began, time.process_time() - built
    return Played(dist.get_rank(), " × ".join(layout), watch.calls, held, watch.peak, seconds)


def make_moments(engine: TrainEngine) -> None:
    """Makes AdamW's moments, which are there from a run's second step on."""
    for weight in engine.module.parameters():
        weight.grad = torch.zeros_like(weight)
    engine.optimizer.step()
    engine.optimizer.zero_grad(set_to_none=True)


def step(worker: ModelWorker, batch: DataProto) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields what a worker is asked for in a step, in the trainer's order, each with a name."""
    config, read = worker.config, columns_read(worker.config)
    for name, spec in ((name, ROLES[name]) for name in worker.roles):
        facts = {"temperature": 1.0, "columns": sorted(read.intersection(spec.columns))}
        if facts["columns"]:
            arguments = [facts[fact] for fact in spec.arguments]
            yield f"{name} scores", partial(getattr(worker.roles[name], spec.compute), batch, *arguments)
    for name in sorted((name for name in worker.roles if ROLES[name].update), reverse=True):  # the policy last
        parts = partial(mini_batches, config=config, role=ROLES[name].settings(config))
        for rows, update in (PolicyUpdates(config) if name == "actor" else parts)(batch, step=1):
            yield f"{name} learns", partial(getattr(worker.roles[name], ROLES[name].update), rows, update)
    yield HANDED_OVER, partial(hand_over, worker.policy)


def hand_over(engine: TrainEngine) -> None:
    """Goes through the weights as an engine that copies them does."""
    with engine.on_device(), torch.no_grad():
        for _ in engine.weights():
            pass


def rows_of_a_rank(config: Config, prompts: int) -> DataProto:
    """Makes so many prompts with all their samples, each of the greatest length."""
    length, width = config.data.max_prompt_length, config.actor_rollout_ref.rollout.response_length
    uid = np.arange(prompts).repeat(config.actor_rollout_ref.rollout.n)
    ids = torch.from_numpy(uid).unsqueeze(1).repeat(1, length + width)
    mask = torch.ones_like(ids)
    floats = ("advantages", "values", "returns", "old_log_probs", "ref_log_prob")
    columns = dict.fromkeys(floats, torch.ones(len(ids), width))
    columns |= {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}
    columns |= dict.fromkeys(["loss_mask", "response_mask"], mask[:, length:]) | {"responses": ids[:, length:]}
    return DataProto.from_dict(columns, non_tensors={"uid": uid.astype(object)})


@contextmanager
def pretended(rank: int, size: int) -> Iterator[Watch]:
    """Makes this process rank `rank` of `size` for the block, in a group that is not there, with models that take no
    memory."""
    watch = Watch(FakeTensorMode(allow_non_fake_inputs=True))
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    def noted(resize: Callable[[Tensor], None], tensor: Tensor) -> None:
        resize(tensor)  # FSDP2's own way to allocate and to free, which is no operation
        watch.note(tensor.untyped_storage())

    stand_ins = [
        (models, "empty_model", partial(unwatched, models.empty_model)),
        (models, "scoring_model", untried),
        (fsdp2, "shard", partial(unwatched, fsdp2.shard)),  # each part of a weight, of all ranks, would be a fake
        (fsdp2, "fill", lambda *_: None),
        (collectives, "new_group", lambda ranks=None: dist.new_group(ranks)),
        *((_fsdp_param, name, partial(noted, vars(_fsdp_param)[name])) for name in ("alloc_storage", "free_storage")),
    ]
    with ExitStack() as patches:
        for stand_in in stand_ins:
            patches.enter_context(patch.object(*stand_in))
        patches.enter_context(patch.dict(token_head.TILE_BYTES, cpu=token_head.TILE_BYTES["cuda"]))
        yield watch
    dist.destroy_process_group()


def unwatched(function: Callable[..., Any], *given: Any) -> Any:
    with _disable_current_modes():
        return function(*given)


def untried(model: PreTrainedModel, *given: Any) -> PreTrainedModel:
    """Does what `scoring_model` does to a model whose sibling has passed the trial of the packed forward."""
    config = SimpleNamespace(_attn_implementation=ATTENTION)
    sibling = SimpleNamespace(shares_prompts=True, config=config, param_dtype=model.param_dtype)
    return scoring_model(model, *given[:4], sibling)


def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Attends within one row, and keeps for a backward what FlexAttention keeps of a packed one."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, attention)


def play_ranks(config: Config, prompts: int, ranks: Sequence[int]) -> list[Played]:
    """Plays each of `ranks`, with rows of so many prompts, in a process of its own, one after the other."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workers.model_worker", "extras.sharding.fsdp2"])  # not this, their main module
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return [*pool.map(partial(play_alone, config, prompts), ranks)]


def play_alone(config: Config, prompts: int, rank: int) -> Played:
    with pretended(rank, config.trainer.workers) as watch:
        return play(config, rows_of_a_rank(config, prompts), watch)


def first_difference(played: Sequence[Played]) -> str | None:
    """Says where a rank's collectives are not those of the first; None: nowhere."""
    first, *rest = played
    for other in rest:
        for index, (one, two) in enumerate(zip_longest(first.calls, other.calls)):
            if one != two:
                return f"collective {index}: rank {first.rank} has {one}, rank {other.rank} has {two}"
    return None


def save_empty_model(folder: Path, **sizes: Any) -> None:
    """Writes a model's folder without its weights."""
    Qwen2Config(**sizes).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def config_of(folder: Path, ranks: int, overrides: Sequence[str] = ()) -> Config:
    """Composes the config of a run by GRPO in bfloat16, as on GPUs; `overrides` come last."""
    own = [f"actor_rollout_ref.model.path={folder}", f"trainer.n_workers_per_node={ranks}", "trainer.n_gpus_per_node=0"]
    own += ["actor_rollout_ref.model.enable_gradient_checkpointing=true", "algorithm.adv_estimator=grpo"]
    own += [f"{ACTOR}.fsdp_config.dtype=bfloat16", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=auto"]
    own += ["actor_rollout_ref.rollout.n=8", "data.max_prompt_length=512", "data.max_response_length=960"]
    config = load_config(Arguments("ppo_trainer", CONFIG_DIR, [*own, *overrides], print_config=False), Config)
    layout_of(config, ranks).check(config, ranks)
    return config


def table_row(size: str, config: Config, played: Sequence[Played]) -> str:
    algorithm = config.algorithm.adv_estimator.replace("gae", "ppo")
    first, cells = played[0], [f"{size.upper()} {algorithm.upper()}", played[0].layout]
    calls = [call for call in first.calls if call.phase != HANDED_OVER]
    alike = [[call for call in calls if call.kind == kind] for kind in KINDS[:3]]
    rest = [call for call in calls if call.kind not in KINDS[:3]]
    handed = [call for call in first.calls if call.phase == HANDED_OVER]
    summed = [f"{len(part)}: {sum(call.received for call in part) / GB:.1f}" for part in (*alike, handed)]
    cells += [*summed[:3], str(len(rest)), summed[3]]
    cells += [f"{max(getattr(each, name) for each in played) / GIB:.1f}" for name in ("held", "peak")]
    cells.append(" + ".join(f"{max(seconds):.0f}" for seconds in zip(*(each.seconds for each in played), strict=True)))
    return f"| {' | '.join([*cells, ', '.join(str(each.rank) for each in played)])} |"


def show(size: str, ranks: int, overrides: Sequence[str], prompts: int, chosen: Sequence[int]) -> bool:
    """Prints the row of a run. Returns whether all ranks that were played have the same collectives."""
    with tempfile.TemporaryDirectory() as folder:
        save_empty_model(Path(folder), vocab_size=VOCABULARY, **QWEN2[f"qwen2-{size}"])
        config = config_of(Path(folder), ranks, overrides)
        played = play_ranks(config, prompts, chosen or [0, ranks - 1])
    print(table_row(size, config, played), flush=True)
    difference = first_difference(played)
    if difference:
        print(difference, flush=True)
    return difference is None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", nargs="?", choices=[name.removeprefix("qwen2-") for name in QWEN2], help="of Qwen2.5")
    parser.add_argument("ranks", nargs="?", type=int, help="how many the run has")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the run")
    parser.add_argument("--play", default="", metavar="0,7", help="ranks that are played; else the first and the last")
    parser.add_argument("--prompts", type=int, default=4, help="of a rank, with 8 responses each; 2 make a micro-batch")
    parser.add_argument("--all", action="store_true", help="print the whole table of docs/sharding.md")
    arguments = parser.parse_intermixed_args()
    if not arguments.all and arguments.ranks is None:
        parser.error("a size and a number of ranks, or --all")
    runs = ALL if arguments.all else [(arguments.size, arguments.ranks, arguments.overrides)]
    chosen = [int(rank) for rank in arguments.play.split(",") if rank]
    print(HEAD, flush=True)
    alike = [show(*run, arguments.prompts, chosen) for run in runs]
    sys.exit(not all(alike))


if __name__ == "__main__":
    main()
