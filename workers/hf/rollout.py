"""Rollouts by the Hugging Face model itself: no second copy of the weights, nothing to synchronise.

A sampling loop of our own in place of `generate`. Finished rows leave at once and waiting ones take their places; the
log-prob comes out of the softmax that is sampled from. On a GPU, a step costs the launch of its kernels, which are one
CUDA graph with enforce_eager=false, and one wait for what they have drawn. From the first request until none is left,
the module is set up for decoding and must not be trained; requests of episodes keep it so until their episodes are
forgotten, with what a next turn can go on from.
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import RolloutConfig
from data.padding import collate
from data.pretrained import position_count
from data.protocol import DataProto
from data.types import Completion, Request, Sample, SamplingParams
from workers.collectives import common_notice
from workers.forward_check import FAILURES, check_width, ragged_batch, scaled_up_weights, tolerance, trained_log_probs
from workers.hf.batch import NoCacheBatch, RunningBatch, SeparateRows
from workers.rollout import Rollout, check_request, sample_of

REFILL = 1 / 8  # of max_num_seqs: so many places have to be free before waiting rows are prefilled
BATCH_CLASSES = (SeparateRows, NoCacheBatch)  # to generate, behind those of the model's kernels
TRIAL_TOKENS = 5  # of a trial's responses: enough steps for the kernels of long ones


class HFRollout(Rollout):
    """Samples from the actor's own `model`, by the fastest of `BATCH_CLASSES` whose log-probs are the trainer's: they
    are tried, in the precision of the block in which the engine is made.

    The fastest keeps the keys and values of episodes between their turns, of as many tokens as max_num_seqs of the
    longest sequences have: what is kept of an episode takes no more than the episode would while it runs.

    Raises:
        ValueError: no class has the trainer's log-probs.
    """

    is_probed = True
    reads = ("enforce_eager",)

    def __init__(self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        super().__init__(config, tokenizer, model)
        self.positions = position_count(model.config.get_text_config())
        self.batch: RunningBatch | None = None  # while there are requests
        self.set_up = ExitStack()  # what the module is set up with meanwhile
        self._prefilled = 0  # tokens of prompts, in batches that have ended
        self.batch_class: type[RunningBatch] = self._choose_batch_class()
        self._prefilled = 0

    @property
    def prefilled_tokens(self) -> int:
        """Tokens of prompts that went through the model so far, equal prompts and kept turns once, without padding."""
        return self._prefilled + (self.batch.prefilled_tokens if self.batch is not None else 0)

    def _choose_batch_class(self) -> type[RunningBatch]:
        name, problems = type(self.module).__name__, []
        candidates = self.module.kernels.batches(self.module, self.config) or BATCH_CLASSES
        with scaled_up_weights(self.module):
            for batch_class in candidates:
                self.batch_class = batch_class
                problem = self._problem()
                if problem is None:
                    if problems:
                        common_notice(f"{name} generates slower, as {batch_class.COST} ({problems[-1]}).")
                    return batch_class
                problems.append(problem)
        raise ValueError(
            f"actor_rollout_ref.rollout.name=hf: {name} samples with other log-probs than it is trained with "
            f"({problems[-1]}). Choose another model (docs/models.md), or let rollout.name be a file with an engine of "
            "yours (CONTRIBUTING.md)."
        )

    def _problem(self) -> str | None:
        """Returns why `batch_class` cannot be used, or None: tries rows past any length that the run reaches."""
        mode, stops, self.stop_ids = self.module.training, self.stop_ids, set()
        try:
            batch = self._sample_trial()
            found, wanted = batch.batch["rollout_log_probs"], trained_log_probs(self.module, batch)
            with torch.autocast(self.module.device.type, enabled=False):
                exact = trained_log_probs(self.module, batch)
        except FAILURES as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self.stop_ids = stops
            self.module.train(mode)
        distance = (found - wanted).abs().max().item()
        return None if distance < tolerance(wanted, exact) else f"log_probs differ by {distance:.1g}"

    def _sample_trial(self) -> DataProto:
        """Responses to a prompt twice, to a shorter one, and to one that ends before the length that they go past; and
        to what the latter two begin, as their next turns."""
        width = check_width(self.module, self.config.prompt_length + self.config.response_length)
        rows, most = ragged_batch(self.module, width).batch["input_ids"] % self.vocab_size, width - TRIAL_TOKENS
        lengths = {0: most, 1: max(1, most // 2), 2: max(1, most - TRIAL_TOKENS)}
        sampling = SamplingParams(True, 1.0, -1, 1.0, TRIAL_TOKENS)
        samples: list[Sample] = []
        try:
            for turn in ([(0, lengths[0]), *lengths.items()], [(1, most - 1), (2, most)]):
                requests = [
                    Request(i, rows[row, :length].tolist(), sampling, seed=i, episode=row)
                    for i, (row, length) in enumerate(turn)
                ]
                samples += map(sample_of, requests, self.generate(requests))
        finally:
            self.forget(range(len(rows)))
        return collate(samples, most, TRIAL_TOKENS, self.pad_token_id)

    def add(self, request: Request) -> None:
        check_request(request, self.vocab_size, self.positions)
        assert self.batch is None or request.id not in self.batch, f"request {request.id} is running already"
        super().add(request)

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Lets waiting requests join, if it is time, and draws one token of every row."""
        if not self.has_unfinished_requests():
            return []
        goes_on = False
        try:
            if self.batch is None:
                self._start()
            finished = self._join()
            if len(self.batch):
                finished += self.batch.step()
            goes_on = self._goes_on()
        finally:
            if not goes_on:  # nothing is left to do, or it failed
                self._stop()
        return finished

    @torch.no_grad()
    def abort(self, ids: Iterable[int]) -> None:
        dropped = set(ids)
        super().abort(dropped)
        if self.batch is not None:
            self.batch.drop(dropped)
            if not self._goes_on():
                self._stop()

    def forget(self, episodes: Iterable[int]) -> None:
        if self.batch is not None:
            self.batch.forget(episodes)
            if not self._goes_on():
                self._stop()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        super().load_weights(weights, version)
        self._stop_if_idle()

    def sleep(self) -> None:
        """Keeps nothing any more; the module is as it was, once no request is left."""
        self._stop_if_idle()

    close = sleep

    def _stop_if_idle(self) -> None:
        if self.batch is not None and not self.has_unfinished_requests():
            self._stop()

    def _goes_on(self) -> bool:
        """Returns True if there is something to do, or may soon be, as an episode may have another turn."""
        return self.has_unfinished_requests() or (self.batch is not None and self.batch.goes_on())

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting) or (self.batch is not None and len(self.batch) > 0)

    def tokens_so_far(self, seen: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        return {} if self.batch is None else self.batch.tokens_so_far(seen)

    def _join(self) -> list[Completion]:
        """Waiting requests take the free places, once there are enough of them; those that end by their first token."""
        free = self.config.max_num_seqs - len(self.batch)
        if not self.waiting or free < self.config.max_num_seqs * REFILL:
            return []
        joining = [self.waiting.pop(request_id) for request_id in [*islice(self.waiting, free)]]
        return self.batch.join(joining)

    def _start(self) -> None:
        self.module.eval()
        self.set_up.callback(self.module.train)
        most, kept = self.config.max_num_batched_tokens, self.config.prompt_length + self.config.response_length
        kept *= self.config.max_num_seqs
        self.batch = self.batch_class(self.module, self.stop_ids, self.pad_token_id, self.weight_version, most, kept)
        self.set_up.callback(self.batch.close)

    def _stop(self) -> None:
        """Forgets all requests and episodes, and leaves the module as it was before them, to be trained."""
        self.waiting.clear()
        self._prefilled, self.batch = self.prefilled_tokens, None
        self.set_up.close()
