"""Brings the policy's weights to its engine, and certifies after every sync that the engine samples by them.

A weight that never arrives breaks nothing: the run goes on, and learns from another policy than the one it trains. So
there are three kinds of evidence. Names: an engine with a copy of the weights was handed every one of them. Checksums:
the bits of all numbers that the engine holds, added up, are the trainer's; this is exact, so a tensor that stayed
behind by a step of any size is seen. Log-probs: of tokens that the engine draws. docs/engines.md says what they miss.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from configs.errors import notice
from data.padding import collate
from data.protocol import DataProto
from data.types import Request, SamplingParams
from workers.collectives import Peers, gather, rank
from workers.engine import TrainEngine, empty_weights
from workers.forward_check import trained_log_probs
from workers.rollout import Checksums, Rollout, bit_sum, sample_of

PROMPT_TOKENS, TOKENS = 16, 8  # of a probe: at most
PROBE_EVERY = 32  # versions, of an engine without a copy: nothing is sent, and a probe takes a tenth of a small step
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.5}  # largest |Δ log-prob|; what rounding does is far below
MOVED = {torch.float32: 1e-5, torch.bfloat16: 0.05}  # where the trainer's log-probs move by more, the engine's move too
LISTED = 5  # names in an error


class WeightSync:
    """Brings the weights of `policy` to `engine`, and remembers what the last certificate found."""

    def __init__(self, engine: Rollout, policy: TrainEngine) -> None:
        self.engine, self.policy = engine, policy
        self.is_first = True
        self.held: Checksums | None = None  # the engine's; None: it cannot say, or has no copy
        self.trained: Checksums | None = None  # the policy's
        self.gathers = not engine.own_weights and policy.parallel.lockstep
        self.gathered_sums: Checksums | None = None  # of the shards, as the engine has them
        self.is_comparable = True  # whether the totals of the two are the same if all is right
        self.drawn: DataProto | None = None  # the last probe in which the engine's log-probs had moved
        self.scored = torch.zeros(0)  # the trainer's log-probs of it, [1, R]

    def check_gathered(self) -> None:
        """Checks, once after each sync of an engine that samples from the shards, that what was gathered of them for it
        is what they are.

        Raises:
            RuntimeError: it is not.
        """
        if self.gathered_sums != self.trained:
            self.gathered_sums = self.policy.parallel.whole_sums(self.policy.module, self.trained.dtype)
            if self.gathered_sums != self.trained:
                raise RuntimeError(
                    f"the weights {self.engine.weight_version} that {type(self.engine).__name__} samples by, gathered "
                    "from all workers, are not those that are trained. Report the model."
                )

    def update(self, version: int) -> dict[str, float]:
        """Has the engine sample by the policy's present weights, called `version`. All ranks call this together.

        Returns:
            rollout/weight_version, and, if a probe was drawn, rollout/sync_max_logprob_diff: the largest distance of
            the engine's log-probs from the trainer's, in nats.

        Raises:
            RuntimeError: the engine does not sample by these weights; says what it was handed.
        """
        engine, policy, module, first = self.engine, self.policy, self.policy.module, self.is_first
        before, known = self.held, self.trained
        if first and engine.own_weights:
            before = engine.held_weights()
        dtype = before.dtype if before else module.dtype
        with policy.at_work():
            sent = self._hand_over(version, dtype)
            scales = policy.adapter.scales(module) if engine.takes_adapter else {}
            self.trained = policy.parallel.sums(module, dtype, scales) if before or self.gathers else None
            self.held = engine.held_weights() if before else None
        metrics, problems = {"rollout/weight_version": float(version)}, sent.missing()
        if probes(engine, version):
            with ExitStack() as held:
                if not engine.own_weights:
                    held.enter_context(policy.at_work())
                    held.enter_context(policy.parallel.whole(module))
                held.enter_context(policy.autocast())
                drawn = draw_probe(engine, module.config.get_text_config().vocab_size)
            drawn, scored = score_probe(policy, drawn)
            metrics["rollout/sync_max_logprob_diff"] = largest_distance(drawn, scored)
            problems += self._compare_log_probs(drawn, scored)
        proven, differs = self._compare_sums(before, known, sent) if before and self.held else ([], None)
        problems += proven
        if differs and first and not problems:  # its model has other numbers beside these, or these in another form
            self.is_comparable = False
        elif differs and self.is_comparable:
            problems.append(differs)
        self.is_first = False
        if problems:
            remedy = "Set actor_rollout_ref.rollout.name=hf, which samples from the actor itself, and report the model."
            raise RuntimeError(
                f"after the sync of weights {version}, {type(engine).__name__} does not sample by the actor's: "
                f"{'; '.join(problems)}. {len(sent.sums)} tensors of {sent.bytes / 1e6:.1f} MB were handed over. "
                f"{remedy if engine.own_weights else 'Report the model.'}"
            )
        if first and engine.own_weights and rank() == 0 and not (self.held and self.is_comparable):
            notice(
                f"{type(engine).__name__} cannot say exactly which weights it holds: that a sync has brought all of "
                "them is told by their names and by the log-probs of a probe."
            )
        return metrics

    def _hand_over(self, version: int, dtype: torch.dtype) -> "HandedOver":
        engine, module, adds = self.engine, self.policy.module, self.engine.takes_adapter
        adapter = self.policy.adapter
        sent = HandedOver(dtype if adapter.off and not adds else None)
        if not adds or engine.lost_weights:
            engine.load_weights(sent.count(self.policy.weights(merged=not adds)), version)
            if engine.own_weights:
                sent.expected |= revert_weight_conversion(module, empty_weights(module)).keys()
        if adds:
            engine.load_adapter(sent.count(adapter.own_weights(module)), version)
            sent.expected |= {adapter.saved_name(name) for name, _ in module.named_parameters() if adapter.is_own(name)}
        return sent

    def _compare_sums(
        self, before: Checksums, known: Checksums | None, sent: "HandedOver"
    ) -> tuple[list[str], str | None]:
        """Says what proves that the weights which the engine holds are not the policy's; and how they differ, which is
        no proof where it keeps them in a form of its own.

        Args:
            before: those that the engine held before the sync.
            known: the policy's at the sync before; None: there was none.
        """
        sums, held = self.trained, self.held
        stale = [name for name, found in held.sums.items() if before.sums.get(name) == found]
        if known not in (None, sums) and len(stale) == len(held.sums):
            return ["it holds exactly what it held before, and the actor's have changed"], None
        # In the policy, and in an engine that adds them itself.
        is_own = self.policy.adapter.is_own
        adapters, own = ([name for name in found.sums if is_own(name)] for found in (sums, held))
        wanted = sums.total(without=adapters)
        if self.engine.takes_adapter:
            wanted, own, stale = (
                sums.total(),
                [],
                sorted(stale, key=is_own, reverse=True),
            )  # the frozen never move
        elif adapters:
            frozen, wanted = wanted, sent.total(tied_names(self.policy.module))
            if wanted == frozen and any(sums.sums[name] for name in adapters if ".lora_B." in name):
                return ["LoRA's matrices were not added to what it was handed"], None
        if held.total(without=own) == wanted:
            return [], None
        return [], f"the numbers that it holds are not these. Unchanged there: {in_short(stale) or 'none'}"

    def _compare_log_probs(self, drawn: DataProto, scored: Tensor) -> list[str]:
        """Says how the engine's log-probs of a probe betray other weights than the policy's, which `scored` them."""
        distance, limit, problems = largest_distance(drawn, scored), TOLERANCES[self.policy.dtype], []
        if not distance < limit:
            problems.append(
                f"the log-probs of a probe differ from the trainer's by up to {distance:.2g}, and rounding does less "
                f"than {limit:g}"
            )
        names = ("responses", "rollout_log_probs")
        if self.drawn is None or not all(torch.equal(self.drawn.batch[name], drawn.batch[name]) for name in names):
            self.drawn, self.scored = drawn, scored
        elif (moved := (scored - self.scored).abs().max().item()) > MOVED[self.policy.dtype]:
            problems.append(f"its log-probs of a probe are what they were, and the trainer's have moved by {moved:.2g}")
        return problems


class HandedOver:
    """Counts the weights that are passed on to an engine.

    Args:
        dtype: of the checksums to be taken; None: none are.

    Attributes:
        expected: the names of all that there should be.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.bytes = 0
        self.sums: dict[str, int] = {}
        self.expected: set[str] = set()

    def count(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self.bytes += tensor.nbytes
            self.sums[name] = bit_sum(tensor, self.dtype) if self.dtype else 0
            yield name, tensor

    def total(self, without: Collection[str]) -> int:
        """Returns the checksum of all but these names."""
        return Checksums(self.dtype, self.sums).total(without)

    def missing(self) -> list[str]:
        names = sorted(self.expected.difference(self.sums))
        return [f"it was never handed {in_short(names)}"] if names else []


def probes(engine: Rollout, version: int) -> bool:
    """Says whether `engine` draws a probe after this sync: always if it has a copy of the weights, else now and then
    if it can stand it."""
    return engine.own_weights or (engine.is_probed and version % PROBE_EVERY == 1)


def score_probe(policy: TrainEngine, drawn: DataProto | None) -> tuple[DataProto, Tensor]:
    """Scores what this rank's engine has drawn by the policy; None: another rank leads that engine.

    All ranks score, as a forward of shards takes all of them.

    Returns:
        the rollout of one row, and the trainer's log-probs of its response, [1, R].
    """
    first = rank() - rank() % Peers.size  # of those who compute together, and score the same
    own = [found for found in gather(drawn)[: first + 1] if found is not None][-1]
    with policy.autocast():  # where the weights are: beside an engine that is awake, a GPU may have no room for them
        scored = trained_log_probs(policy.module, own)
    return own, scored


def draw_probe(engine: Rollout, vocab_size: int) -> DataProto | None:
    """Has the engine answer a prompt that is no text, always by the same seed: a rollout of one row, in the rank that
    leads it."""
    config = engine.config
    prompt = [7 * place % vocab_size for place in range(min(PROMPT_TOKENS, config.prompt_length))]
    most = min(TOKENS, config.response_length)
    request = Request(0, prompt, SamplingParams(True, 1.0, -1, 1.0, most), seed=0)
    with engine.together() as asks:
        if not asks:
            return None
        [done] = engine.generate([request])
    return collate([sample_of(request, done)], len(prompt), most, engine.pad_token_id)


def largest_distance(drawn: DataProto, scored: Tensor) -> float:
    """Returns the largest |Δ log-prob| of the tokens that were drawn, in nats."""
    return ((drawn.batch["rollout_log_probs"] - scored) * drawn.batch["response_mask"]).abs().max().item()


def tied_names(module: PreTrainedModel) -> set[str]:
    """Lists the names under which a weight stands in a checkpoint again, and those of buffers."""
    plain = module.adapter.plain_name
    return {*map(plain, module.state_dict(keep_vars=True))} - {plain(name) for name, _ in module.named_parameters()}


def in_short(names: Sequence[str]) -> str:
    more = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {more} more" if more > 0 else "")
