"""Brings the policy's weights to its engine after every step, and checks that the engine samples by them: an engine
with a copy must have been handed every weight, and a few tokens that it draws must have the trainer's log-probs.

`TABLE["sync"]` names further checks: extras/certificate compares the bits.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from configs.extras import present
from configs.import_utils import find
from data.padding import collate
from data.protocol import DataProto
from data.types import Request, SamplingParams
from workers.collectives import Peers, gather, rank
from workers.engine import TrainEngine, empty_weights
from workers.forward_check import trained_log_probs
from workers.rollout import Rollout, sample_of

PROMPT_TOKENS, TOKENS = 16, 8  # of a probe: at most
PROBE_EVERY = 32  # versions, for engines without a copy: nothing is sent, and a probe takes a tenth of a small step
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.5}  # largest |Δ log-prob|; rounding stays far below
LISTED = 5  # names in an error


class WeightSync:
    """Brings the weights of `policy` to `engine`; the base of syncs that check more.

    Attributes:
        gathers: whether `check_gathered` checks the weights that an engine without a copy samples by.
    """

    gathers = False

    def __init__(self, engine: Rollout, policy: TrainEngine) -> None:
        self.engine, self.policy = engine, policy
        self.sent: dict[str, int] = {}  # bytes of each weight that was handed over in this sync

    def update(self, version: int) -> dict[str, float]:
        """Has the engine sample by the policy's present weights, called `version`. All ranks call this together.

        Returns:
            rollout/weight_version, and, if a probe was drawn, rollout/sync_max_logprob_diff, in nats.

        Raises:
            RuntimeError: the engine does not sample by these weights; says what it was handed.
        """
        engine, policy, metrics = self.engine, self.policy, {"rollout/weight_version": float(version)}
        # Engines with a copy of the weights are probed in every sync, others (if they can be) now and then.
        draws_probe = engine.own_weights or (engine.is_probed and version % PROBE_EVERY == 1)
        if not (self.gathers or draws_probe):
            engine.load_weights(policy.weights(), version)
            return metrics
        self.sent = {}
        with policy.on_device():
            problems = self.hand_over(version)
        if draws_probe:
            with ExitStack() as contexts:
                if not engine.own_weights:
                    contexts.enter_context(policy.on_device())
                    contexts.enter_context(policy.parallel.full_weights(policy.module))
                contexts.enter_context(policy.autocast())
                probe = draw_probe(engine, policy.module.config.get_text_config().vocab_size)
            probe, scored = score_probe(policy, probe)
            metrics["rollout/sync_max_logprob_diff"] = largest_distance(probe, scored)
            problems += self.compare_log_probs(probe, scored)
        if problems:
            raise RuntimeError(
                f"after the sync of weights {version}, {type(engine).__name__} does not sample by the actor's: "
                f"{'; '.join(problems)}. {len(self.sent)} tensors of {sum(self.sent.values()) / 1e6:.1f} MB were "
                "handed over. Report the model; actor_rollout_ref.rollout.name=hf samples from the actor itself."
            )
        return metrics

    def hand_over(self, version: int) -> list[str]:
        """Hands all weights over; says which of them the engine did not take."""
        engine, module, adapter, expected = self.engine, self.policy.module, self.policy.adapter, set()
        adds = engine.takes_adapter
        if not adds or engine.lost_weights:
            engine.load_weights(self.record_sent(self.policy.weights(merged=not adds)), version)
            if engine.own_weights:
                expected |= revert_weight_conversion(module, empty_weights(module)).keys()
        if adds:
            engine.load_adapter(self.record_sent(adapter.adapter_weights(module)), version)
            expected |= {*map(adapter.saved_name, filter(adapter.is_adapter_weight, dict(module.named_parameters())))}
        missing = sorted(expected.difference(self.sent))
        return [f"it was never handed {first_names(missing)}"] if missing else []

    def record_sent(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the `weights`, and notes each in `sent`."""
        for name, tensor in weights:
            self.sent[name] = tensor.nbytes
            yield name, tensor

    def compare_log_probs(self, probe: DataProto, scored: Tensor) -> list[str]:
        """Returns the problem if the engine's log-probs of a probe differ from the policy's, `scored`; else []."""
        distance, limit = largest_distance(probe, scored), TOLERANCES[self.policy.dtype]
        problem = f"the log-probs of a probe differ from the trainer's by up to {distance:.2g}, above {limit:g}"
        return [] if distance < limit else [problem]

    def check_gathered(self) -> None:
        """Checks what was gathered for an engine without a copy; called before it generates."""

    @staticmethod
    def prepare_vllm(linear_method: type) -> None:
        """Changes vLLM's UnquantizedLinearMethod before an engine is made."""

    @staticmethod
    def held_by_vllm(worker: Any) -> tuple[torch.dtype, dict[str, int]] | None:
        """Returns the dtype and a checksum of each weight that vLLM's `worker` holds; None: it takes none."""
        return None


def sync_class() -> type[WeightSync]:
    """Returns the last of `TABLE["sync"]` whose extra is present."""
    return find("sync", [*present("sync")][-1])


def draw_probe(engine: Rollout, vocab_size: int) -> DataProto | None:
    """Has the engine answer a fixed prompt of arbitrary tokens, by a fixed seed: a rollout of one row, on the rank that
    asks the engine; None on others."""
    config = engine.config
    prompt = [7 * index % vocab_size for index in range(min(PROMPT_TOKENS, config.prompt_length))]
    max_tokens = min(TOKENS, config.response_length)
    request = Request(0, prompt, SamplingParams(True, 1.0, -1, 1.0, max_tokens), seed=0)
    with engine.together() as leads:
        if not leads:
            return None
        [completion] = engine.generate([request])
    return collate([sample_of(request, completion)], len(prompt), max_tokens, engine.pad_token_id)


def score_probe(policy: TrainEngine, probe: DataProto | None) -> tuple[DataProto, Tensor]:
    """Scores by the policy the probe that this rank's engine has drawn (None: on another rank). All ranks score.

    Returns:
        the rollout of one row, and the trainer's log-probs of its response, [1, R].
    """
    first = rank() - rank() % Peers.size  # of the peers, which score the same
    gathered = [rollout for rollout in gather(probe)[: first + 1] if rollout is not None][-1]
    with policy.autocast():  # weights stay where they are: a GPU with an engine awake may have no room
        return gathered, trained_log_probs(policy.module, gathered)


def largest_distance(probe: DataProto, scored: Tensor) -> float:
    """Returns the largest |Δ log-prob| of the tokens that were drawn, in nats."""
    return ((probe.batch["rollout_log_probs"] - scored) * probe.batch["response_mask"]).abs().max().item()


def first_names(names: list[str]) -> str:
    hidden = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {hidden} more" if hidden > 0 else "")
