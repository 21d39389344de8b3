"""Keeps whole groups of a run to be looked at: samples/train/STEP.jsonl and samples/validation/STEP.jsonl beside it.

At about fifty steps of a run, evenly spread with the first and the last among them, some groups of the batch; of every
validation the answers to the same prompts. Together they stay below trainer.sample_max_mb: when they would not, every
second file of the larger kind is removed, and from then on half as many are written.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from configs.errors import notice
from configs.schema import Config
from data.files import dispensable, json_line, replacing
from data.protocol import DataProto
from data.seeding import derive_seed
from extras.report.transcripts import Record, sample_rows
from training.episode_rows import EpisodeRows

TRAIN, VALIDATION = "train", "validation"
STEPS = 50
OF_VALIDATION = 4  # as many prompts for each group of training: there are fewer answers to one


class SampleFiles:
    """The samples of a run of `total_steps` in its folder; nothing is written if trainer.sample_groups is 0."""

    def __init__(self, config: Config, total_steps: int, tokenizer: PreTrainedTokenizerBase) -> None:
        settings = config.trainer
        self.folder = Path(settings.default_local_dir) / "samples"
        self.groups = 0 if settings.val_only else settings.sample_groups
        self.limit = settings.sample_max_mb * 10**6
        self.seed, self.tokenizer = settings.seed, tokenizer
        self.total_steps, self.validates_every = total_steps, max(1, settings.test_freq)
        steps = np.linspace(1, total_steps, min(STEPS, total_steps)).round().astype(int).tolist()
        self.places = {step: place for place, step in enumerate(steps)}
        self.strides = {TRAIN: 1, VALIDATION: 1}  # every so many of those that would be written are
        self.has_said = False

    def start(self, step: int) -> None:
        """Removes what an earlier run left, or, of one that is resumed at `step`, what is done again."""
        for kind in self.strides:
            for path in self._files(kind):
                if step == 0 or int(path.stem) > step:
                    path.unlink()

    def keep_batch(self, batch: DataProto, step: int) -> None:
        """Writes groups of the finished batch of a step, if it is one of those that are kept."""
        if self._is_kept(TRAIN, step):
            numbers = pick_groups(batch, self.groups, derive_seed(self.seed, "samples", step))
            self._write(TRAIN, step, sample_rows(batch, self.tokenizer, step, numbers))

    def keep_validation(self, batches: Sequence[DataProto], step: int) -> None:
        """Writes the answers to the same prompts of each of the batches of a validation, if it is kept."""
        if self._is_kept(VALIDATION, step):
            picked = [(batch, pick_prompts(batch, OF_VALIDATION * self.groups)) for batch in batches]
            parts = [sample_rows(batch, self.tokenizer, step, numbers) for batch, numbers in picked]
            self._write(VALIDATION, step, [*chain.from_iterable(parts)])

    def _is_kept(self, kind: str, step: int) -> bool:
        place = self.places.get(step) if kind == TRAIN else step // self.validates_every
        return self.groups > 0 and place is not None and (place % self.strides[kind] == 0 or step == self.total_steps)

    def _write(self, kind: str, step: int, records: Sequence[Record]) -> None:
        path = self.folder / kind / f"{step}.jsonl"
        with dispensable(str(path)):
            content = b"".join(map(json_line, records))
            if self._make_room(path, len(content)) and self._is_kept(kind, step):
                with replacing(path) as file:
                    file.write(content)

    def _make_room(self, path: Path, size: int) -> bool:
        """Removes files until `size` bytes more, as `path`, are within the limit; whether they are."""
        while True:
            others = {kind: [file for file in self._files(kind) if file != path] for kind in self.strides}
            sizes = {kind: sum(file.stat().st_size for file in files) for kind, files in others.items()}
            if sum(sizes.values()) + size <= self.limit:
                return True
            if not self.has_said:
                notice(
                    f"{self.folder} has reached trainer.sample_max_mb={self.limit // 10**6}: every second step's "
                    "samples are removed there, and fewer are kept from now on. Raise it to keep more."
                )
            self.has_said = True
            thinned = [kind for kind in others if self.strides[kind] <= self.total_steps]
            if size > self.limit // 2 or not thinned:
                return False
            kind = max(thinned, key=sizes.__getitem__)
            self.strides[kind] *= 2
            for file in others[kind]:
                if not self._is_kept(kind, int(file.stem)):
                    file.unlink()

    def _files(self, kind: str) -> list[Path]:
        return [path for path in (self.folder / kind).glob("*.jsonl") if path.stem.isdecimal()]


def numbers_by_uid(episodes: EpisodeRows) -> dict[str, list[int]]:
    """Lists the samples of each prompt, by their numbers; prompts in the order of the batch."""
    groups: dict[str, list[int]] = {}
    for number, uid in enumerate(episodes.batch.uid[episodes.last_row]):
        groups.setdefault(uid, []).append(number)
    return groups


def pick_groups(batch: DataProto, count: int, seed: int) -> list[int]:
    """Picks the samples of `count` whole groups: the one whose scores differ most, and others by `seed`."""
    episodes = EpisodeRows(batch)
    groups, scores = [*numbers_by_uid(episodes).values()], episodes.scores()
    widest = max(range(len(groups)), key=lambda place: float(scores[groups[place]].max() - scores[groups[place]].min()))
    others = sorted({*range(len(groups))} - {widest}, key=lambda place: derive_seed(seed, place))
    return [number for place in [widest, *others][:count] for number in groups[place]]


def pick_prompts(batch: DataProto, count: int) -> list[int]:
    """Picks all samples of `count` prompts, evenly spread over those of the batch."""
    groups = [*numbers_by_uid(EpisodeRows(batch)).values()]
    places = np.linspace(0, len(groups) - 1, min(count, len(groups))).astype(int).tolist()
    return [number for place in places for number in groups[place]]
