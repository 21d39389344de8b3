"""Memory, time and traffic of a model over several workers: python -m benchmarks.shards [--layers N] [--dtype D]

One worker, N replicas, and N shards load a Llama of SmolLM2-135M's shape with random weights, take two updates of the
same rows by gloo on this machine, and hand their weights over as to an engine. Each worker is a process of its own with
one thread. Memory is the highest of a process (VmHWM) above what it had with all imports done. Bytes are those that a
worker receives when it gathers and sends when it reduces; beside them is what the formula of docs/sharding.md says.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from transformers import LlamaConfig, LlamaForCausalLM

from configs.schema import ActorConfig, ModelConfig, OptimConfig
from data.protocol import DataProto
from extras.kernels.memory import give_back_memory
from extras.sharding.fsdp2 import Sharding, local, make_mesh
from tests.batches import padded, update_of
from tests.ranks import Ranks
from workers.collectives import data_rank, group_size
from workers.dp_actor import DataParallelPPOActor
from workers.engine import TrainEngine
from workers.group import shares_of
from workers.micro_batches import MicroBatchSize
from workers.models import load_causal_lm

SHAPE = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
ROWS, PROMPT, RESPONSE, SEED = 8, 32, 32, 0
MIB = 1 << 20
COLUMNS = (
    *("peak MiB", "weights MiB", "load s", "load CPU s", "update s", "update CPU s", "hand over s"),
    *("gathered MB", "reduced MB"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=30, help="decoder layers (30)")
    parser.add_argument("--workers", type=int, default=2, help="workers of the arms that have several (2)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="computed and gathered in")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    print(f"{'workers':<12}", *(f"{name:>12}" for name in COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        config = LlamaConfig(**SHAPE, **HEADS, num_hidden_layers=arguments.layers)
        LlamaForCausalLM(config).save_pretrained(folder)
        for name, workers, size in (
            ("one", 1, 1),
            ("replicas", arguments.workers, 1),
            ("shards", arguments.workers, -1),
        ):
            ranks = Ranks(workers)
            try:
                found = ranks.run(measure, folder, size, dtype)[0]
            finally:
                ranks.pool.shutdown()
            print(f"{name:<12}", *(f"{found[column]:>12.1f}" for column in COLUMNS))
    share, total, layers = (arguments.workers - 1) / arguments.workers, found["total MB"], found["layers MB"]
    gathered = share * dtype.itemsize / 4 * (total + layers)
    print(f"by the formula, shards gather {gathered:.1f} MB and reduce {share * total:.1f} MB.")


def measure(folder: str, fsdp_size: int, dtype: torch.dtype) -> dict[str, float]:
    """Loads, updates twice and hands over, as one rank of however many there are."""
    cpu, before = torch.device("cpu"), highest_memory()
    mesh = make_mesh(fsdp_size, cpu)
    start, start_cpu = perf_counter(), process_time()
    sharding = None if mesh is None else Sharding(mesh, param_dtype=dtype)
    module = load_causal_lm(ModelConfig(path=folder), dtype=dtype, sharding=sharding)
    give_back_memory()
    found = {"load s": perf_counter() - start, "load CPU s": process_time() - start_cpu}
    config = ActorConfig(optim=OptimConfig(lr=1e-5))
    engine = TrainEngine(module, config.optim, 10, cpu, dtype)
    actor = DataParallelPPOActor(config, engine, MicroBatchSize(ROWS, 0), MicroBatchSize(ROWS, 0))
    batch = rows_to_learn()
    own = shares_of(batch, group_size())[data_rank()]
    for _ in range(2):  # the second has its moments
        with counted_bytes() as received:
            start, start_cpu = perf_counter(), process_time()
            actor.update_policy(own, update_of(batch, config))
            found |= {"update s": perf_counter() - start, "update CPU s": process_time() - start_cpu}
    start = perf_counter()
    for _ in engine.weights():
        pass
    found |= {"hand over s": perf_counter() - start, "peak MiB": (highest_memory() - before) / MIB}
    found["weights MiB"] = sum(local(weight).nbytes for weight in module.parameters()) / MIB
    for name, part in (("total MB", module), ("layers MB", module.model.layers)):
        found[name] = sum(4 * weight.numel() for weight in part.parameters()) / 1e6
    return found | {f"{name} MB": number / 1e6 for name, number in received.items()}


def rows_to_learn() -> DataProto:
    """Some rows of random tokens that have advantages."""
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.randint(0, SHAPE["vocab_size"], (ROWS, PROMPT + RESPONSE), generator=generator).tolist()
    batch = padded([row[:PROMPT] for row in ids], [row[PROMPT:] for row in ids], PROMPT, RESPONSE, pad_token_id=0)
    batch.batch["advantages"] = torch.randn(ROWS, RESPONSE, generator=generator)
    return batch


@contextmanager
def counted_bytes() -> Iterator[dict[str, float]]:
    """Counts the bytes that this rank receives in gathers, and that it sends in reductions, of the block."""
    counts = {"gathered": 0.0, "reduced": 0.0}
    own_gather, own_reduce = collectives.DefaultAllGather.__call__, collectives.DefaultReduceScatter.__call__

    def gather(self, output_tensor, input_tensor, group, async_op=False):
        counts["gathered"] += output_tensor.nbytes - input_tensor.nbytes
        return own_gather(self, output_tensor, input_tensor, group, async_op)

    def reduce(self, output_tensor, input_tensor, group, op, async_op=False):
        counts["reduced"] += input_tensor.nbytes - output_tensor.nbytes
        return own_reduce(self, output_tensor, input_tensor, group, op, async_op)

    collectives.DefaultAllGather.__call__, collectives.DefaultReduceScatter.__call__ = gather, reduce
    try:
        yield counts
    finally:
        collectives.DefaultAllGather.__call__, collectives.DefaultReduceScatter.__call__ = own_gather, own_reduce


def highest_memory() -> int:
    """Reads the most bytes that this process has ever had resident."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    main()
