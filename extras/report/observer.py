"""Keeps what a report shows beside the metrics of a run: run.json, events.jsonl, some rollouts, and all if asked."""

import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from configs.checks import check_output_folder
from data.files import dispensable, dump_jsonl, json_line
from data.protocol import DataProto
from data.types import Observer
from extras.report.run_info import EventFile, RunFile
from extras.report.sample_files import SampleFiles
from extras.report.settings import Settings
from extras.report.transcripts import sample_rows


class Report(Observer):
    """Writes run.json and events.jsonl of every run, and rollouts of one that learns by reinforcement."""

    def __init__(self, run: Any) -> None:
        super().__init__(run)
        self.settings = run.config.trainer if isinstance(run.config.trainer, Settings) else None
        self.samples = SampleFiles(run.config, run.total_steps, run.tokenizer) if self.settings else None
        self.run_file: RunFile | None = None  # and events and samples: nothing is written before the run has started

    @classmethod
    def check(cls, config: Any) -> None:
        if isinstance(trainer := config.trainer, Settings):
            for name in ("rollout_data_dir", "validation_data_dir"):
                if trainer[name] is not None and not (trainer.val_only and name == "rollout_data_dir"):
                    check_output_folder(trainer[name], f"trainer.{name}")

    def started(self, step: int) -> None:
        self.run_file = RunFile(self.run, step)
        self.events = EventFile(self.run, step)
        if self.samples:
            self.samples.start(step)

    def stepped(self, step: int, batch: DataProto | None, metrics: Mapping[str, float]) -> None:
        self.run_file.done = step
        if self.samples and batch is not None:
            self.samples.keep_batch(batch, step)
            folder, due = self.settings.rollout_data_dir, step % self.settings.rollout_data_freq == 0
            if folder and (due or step == self.run.total_steps):
                self.dump(folder, step, [batch])

    def validated(self, step: int, batches: Sequence[DataProto], metrics: Mapping[str, float]) -> None:
        if self.samples and self.run_file:
            self.samples.keep_validation(batches, step)
        if self.settings and (folder := self.settings.validation_data_dir):
            self.dump(folder, step, batches)
            if self.settings.val_only:
                with (Path(folder) / "validation_metrics.jsonl").open("ab") as record:
                    record.write(json_line({"step": step, "data": metrics}))

    def dump(self, folder: str, step: int, batches: Sequence[DataProto]) -> None:
        """Writes all rollouts of a step."""
        path = Path(folder) / f"{step}.jsonl"
        with dispensable(str(path)):
            dump_jsonl(path, chain.from_iterable(sample_rows(batch, self.run.tokenizer, step) for batch in batches))

    def ended(self, error: BaseException | None) -> None:
        if self.run_file is None:
            return
        self.events.close()
        self.run_file.end(error)
        if error is None:
            folder = shlex.quote(str(self.run.folder))
            print(f"python -m extras.report {folder} makes a page of this run, to open in a browser.")
