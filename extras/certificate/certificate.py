"""Adds two proofs to a sync of weights, beyond names and log-probs. The bits of all numbers in the engine, added up,
are the trainer's: this finds a tensor that was not updated, however small the step. And the engine's log-probs move
when the trainer's move. docs/engines.md says what both miss.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from configs.errors import notice
from data.protocol import DataProto
from workers.collectives import Peers, gather, rank
from workers.engine import TrainEngine
from workers.rollout import Rollout
from workers.weight_sync import WeightSync, first_names

MOVED = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # where the trainer's log-probs move by more, the engine's move too
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number
NO_SCALES: Mapping[str, float] = MappingProxyType({})
NOTED = "checksum_before_packing"  # attribute of a layer of vLLM


@dataclass(frozen=True)
class Checksums:
    """The bits of weights in `dtype`, added up by name, modulo 2**bits.

    The total stays the same if weights are stacked in one tensor in any order, cut into parts or padded by zeros.
    """

    dtype: torch.dtype
    sums: dict[str, int]

    def total(self, without: Collection[str] = ()) -> int:
        """Adds up all but these names."""
        return sum(number for name, number in self.sums.items() if name not in without) % span(self.dtype)


class Certificate(WeightSync):
    """Certifies each sync, and remembers the checksums of the last one."""

    def __init__(self, engine: Rollout, policy: TrainEngine) -> None:
        super().__init__(engine, policy)
        self.gathers = not engine.own_weights and policy.parallel.lockstep
        self.is_first = True
        self.engine_sums: Checksums | None = None  # None: the engine has no copy, or cannot sum it
        self.trained: Checksums | None = None  # the policy's
        self.gathered: Checksums | None = None  # of the shards, as the engine gets them
        self.is_comparable = True  # whether both totals are equal if all is right
        self.dtype: torch.dtype | None = None  # for checksums of the weights handed over; None: none are taken
        self.sums: dict[str, int] = {}
        self.drawn: DataProto | None = None  # the last probe in which the engine's log-probs had moved
        self.scored = torch.zeros(0)  # the trainer's log-probs of it, [1, R]

    def update(self, version: int) -> dict[str, float]:
        metrics, first = super().update(version), self.is_first
        self.is_first = False
        if first and self.engine.own_weights and rank() == 0 and not (self.engine_sums and self.is_comparable):
            notice(
                f"{type(self.engine).__name__} cannot say exactly which weights it holds: that a sync has brought all "
                "of them is told by their names and by the log-probs of a probe."
            )
        return metrics

    def hand_over(self, version: int) -> list[str]:
        engine, policy, module, adds = self.engine, self.policy, self.policy.module, self.engine.takes_adapter
        before, known = self.engine_sums, self.trained
        if self.is_first and engine.own_weights:
            before = self._read_engine()
        dtype = before.dtype if before else module.dtype
        self.dtype, self.sums = dtype if policy.adapter.off and not adds else None, {}
        problems = super().hand_over(version)
        scales = policy.adapter.scales(module) if adds else {}
        self.trained = checksums(module, dtype, scales) if before or self.gathers else None
        self.engine_sums = self._read_engine() if before else None
        if not (before and self.engine_sums):
            return problems
        proven, differs = self._compare_sums(before, known)
        problems += proven
        if differs and self.is_first and not problems:  # it has other numbers beside these, or these in another form
            self.is_comparable = False
        elif differs and self.is_comparable:
            problems.append(differs)
        return problems

    def _read_engine(self) -> Checksums | None:
        answer = self.engine.held_weights()
        return answer and Checksums(*answer)

    def record_sent(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in super().record_sent(weights):
            if self.dtype:
                self.sums[name] = bit_sum(tensor, self.dtype)
            yield name, tensor

    def check_gathered(self) -> None:
        """Raises RuntimeError if the weights gathered for an engine that samples from the shards differ from them; once
        after each sync."""
        if self.gathers and self.gathered != self.trained:
            self.gathered = gathered_checksums(self.policy.module, self.trained.dtype)
            if self.gathered != self.trained:
                raise RuntimeError(
                    f"the weights {self.engine.weight_version} that {type(self.engine).__name__} samples by, gathered "
                    "from all workers, are not those that are trained. Report the model."
                )

    def _compare_sums(self, before: Checksums, known: Checksums | None) -> tuple[list[str], str | None]:
        """Returns proofs that the weights in the engine are not the policy's, and how the two differ, which is no proof
        if the engine keeps them in another form.

        Args:
            before: the engine's before the sync.
            known: the policy's at the previous sync; None: this is the first.
        """
        sums, engine, adapter = self.trained, self.engine_sums, self.policy.adapter
        stale = [name for name, number in engine.sums.items() if before.sums.get(name) == number]
        if known not in (None, sums) and len(stale) == len(engine.sums):
            return ["it holds exactly what it held before, and the actor's have changed"], None
        # In the policy, and in an engine that adds them itself.
        adapters, engine_adapters = ([*filter(adapter.is_adapter_weight, each.sums)] for each in (sums, engine))
        expected = sums.total(without=adapters)
        if self.engine.takes_adapter:
            expected, engine_adapters = sums.total(), []
            stale.sort(key=adapter.is_adapter_weight, reverse=True)  # the frozen never move
        elif adapters:
            frozen, expected = expected, Checksums(self.dtype, self.sums).total(tied_names(self.policy))
            if expected == frozen and any(sums.sums[name] for name in adapters if ".lora_B." in name):
                return ["LoRA's matrices were not added to what it was handed"], None
        if engine.total(without=engine_adapters) == expected:
            return [], None
        return [], f"the numbers that it holds are not these. Unchanged there: {first_names(stale) or 'none'}"

    def compare_log_probs(self, drawn: DataProto, scored: Tensor) -> list[str]:
        problems, names = super().compare_log_probs(drawn, scored), ("responses", "rollout_log_probs")
        if self.drawn is None or not all(torch.equal(self.drawn.batch[name], drawn.batch[name]) for name in names):
            self.drawn, self.scored = drawn, scored
        elif (moved := (scored - self.scored).abs().max().item()) > MOVED[self.policy.dtype]:
            problems.append(f"its log-probs of a probe are what they were, and the trainer's have moved by {moved:.2g}")
        return problems

    @staticmethod
    def prepare_vllm(linear_method: type) -> None:
        """Has vLLM note the checksum of each weight on its layer, before it packs the weight and drops it, as it does
        on a CPU."""
        lay_out = linear_method.process_weights_after_loading
        if "__wrapped__" in vars(lay_out):
            return

        @wraps(lay_out)
        def note_and_lay_out(self: Any, layer: nn.Module) -> None:
            if layer.weight.device.type == "cpu":
                setattr(layer, NOTED, bit_sum(layer.weight, layer.weight.dtype))
            lay_out(self, layer)

        linear_method.process_weights_after_loading = note_and_lay_out

    @staticmethod
    def held_by_vllm(worker: Any) -> tuple[torch.dtype, dict[str, int]] | None:
        """Returns the checksums of the weights that vLLM's `worker` has; None: it has them quantized."""
        if worker.vllm_config.model_config.quantization is not None:
            return None
        dtype, model, sums = worker.vllm_config.model_config.dtype, worker.model_runner.get_model(), {}
        for name, weight in model.named_parameters():
            layer = model.get_submodule(name.rpartition(".")[0])
            sums[name] = bit_sum(weight, dtype) if weight.numel() else vars(layer).get(NOTED, 0)
        for name, layer in model.named_modules():
            for stacked in ("lora_a_stacked", "lora_b_stacked"):  # those of an adapter, one for each part of the layer
                for index, weight in enumerate(vars(layer).get(stacked, ())):
                    sums[f"{name}.{stacked}.{index}"] = bit_sum(weight, weight.dtype)
        return dtype, sums


def tied_names(policy: TrainEngine) -> set[str]:
    """Lists the names that repeat a weight in a checkpoint (tied weights), and the names of buffers."""
    plain, module = policy.adapter.plain_name, policy.module
    return {*map(plain, module.state_dict(keep_vars=True))} - {plain(name) for name, _ in module.named_parameters()}


def checksums(model: nn.Module, dtype: torch.dtype, scales: Mapping[str, float] = NO_SCALES) -> Checksums:
    """Computes the checksum of each whole parameter in `dtype`, times its scale. All workers call this together; raises
    RuntimeError if a worker with the whole model has other weights than the first."""
    sums, parameters = {}, dict(model.named_parameters())
    shards = {name for name, parameter in parameters.items() if isinstance(parameter, DTensor)}
    for name, parameter in parameters.items():
        values = local(parameter)
        values = values.to(dtype) * scales[name] if name in scales else values
        sums[name] = bit_sum(values, dtype) if name not in shards or counts(parameter) else 0
    parts = gather(sums)
    if unequal := [name for name in sums if name not in shards and sums[name] != parts[0][name]]:
        raise RuntimeError(f"worker {rank()} holds other weights than the first: {', '.join(unequal[:5])}.")
    summed = {name: sum(part[name] for part in parts) % span(dtype) for name in shards}
    return Checksums(dtype, {name: summed.get(name, sums[name]) for name in sums})


def counts(parameter: DTensor) -> bool:
    """Returns whether this rank's part is counted: only the first replica's is, and once if peers hold the same."""
    places = zip(parameter.placements, parameter.device_mesh.get_coordinate(), strict=True)
    is_split = "part" in parameter.device_mesh.mesh_dim_names
    first = all(coordinate == 0 for kind, coordinate in places if kind.is_replicate())
    return first and (is_split or rank() % Peers.size == 0)


def gathered_checksums(model: nn.Module, dtype: torch.dtype) -> Checksums:
    """Computes what `checksums` does for a model that is gathered now; peers still hold parts of its layers."""
    parameters = dict(model.named_parameters())
    sums = {name: bit_sum(local(parameter), dtype) for name, parameter in parameters.items()}
    if Peers.size > 1:  # then all ranks call this together
        first = rank() - rank() % Peers.size
        parts = gather(sums)[first : first + Peers.size]
        split = [name for name, parameter in parameters.items() if isinstance(parameter, DTensor)]
        sums |= {name: sum(part[name] for part in parts) % span(dtype) for name in split}
    return Checksums(dtype, sums)


def local(parameter: Tensor) -> Tensor:
    return parameter.detach().to_local() if isinstance(parameter, DTensor) else parameter.detach()


def bit_sum(tensor: Tensor, dtype: torch.dtype) -> int:
    """Adds up the bits of each number of `tensor`, in `dtype`, as an integer of their size, which may overflow."""
    bits = BITS[dtype.itemsize]
    return tensor.detach().to(dtype).contiguous().view(bits).sum(dtype=bits).item() % span(dtype)


def span(dtype: torch.dtype) -> int:
    """Returns how many numbers the bits of `dtype` can represent."""
    return 1 << 8 * dtype.itemsize
