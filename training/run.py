"""Runs the loop around a step, for every kind of training: checkpoints, resuming, metrics, lines in the terminal.

A trainer (training/ray_trainer.py) is a `Run` with a `step` of its own.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from signal import SIGINT
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from configs.checks import plural
from configs.errors import WorkerError
from configs.process import Requests, end_by, in_notebook, in_words
from configs.schema import Config
from configs.settings import LAST
from data.files import FolderLost, check_is_ours, indispensable, rewrite
from data.protocol import DataProto
from data.sampler import PromptLoader
from data.seeding import rng_state, set_rng_state
from data.types import Metrics
from training.checkpoint import (
    CONFIG_FILE,
    Saver,
    check_sums,
    checkpoint_to_resume,
    clear_leftovers,
    config_drift,
    config_yaml,
    read_part,
)
from training.messages import ended_early, files_left, nothing_left, steps_lost
from training.metric_utils import timer
from training.tracking import Observers

logger = logging.getLogger(__name__)


class Run:
    """Trains step by step in a folder, and continues there after an interruption.

    Args:
        config, tokenizer, train_loader, total_steps: of the run; the loader's position is saved and restored.
        models: the roles that learn, by their folders in a checkpoint ("." is the checkpoint itself).
        contents: the parts of a model that a checkpoint holds.
        in_background: whether training goes on while a checkpoint is written.
        can_validate: whether there is anything to validate on.

    Attributes:
        metrics, validation: metrics of the last step and of the last validation.
        observers: told of every step (training/tracking.py).
        timing: seconds of what is done outside `step`, by stage, since the last line of the record.
        began: when its clock started, by time.monotonic().
        save_requested: an observer asks that this step is saved.
        stop_reason: why an observer ends the run after this step, in a line; "": it goes on.
    """

    acts_after_last_step = False  # whether a run validates and saves at its end even if no frequency is set
    most_skipped, skipped_hint = 3, ""  # updates in a row without a finite loss or gradient that end the run

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: PreTrainedTokenizerBase,
        train_loader: PromptLoader,
        total_steps: int,
        models: Mapping[str, Any],
        contents: Sequence[str],
        in_background: bool,
        can_validate: bool,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.train_loader = train_loader
        self.total_steps = total_steps
        self.models = models
        self.can_validate = can_validate
        self.global_step = 0
        self.metrics: Metrics = {}
        self.validation: Metrics = {}
        self.folder = Path(config.trainer.default_local_dir)
        self.saver = Saver(self.folder, self.write_state, config.trainer.max_ckpt_to_keep, self.is_written)
        self.save_freq = total_steps if config.trainer.save_freq == LAST else config.trainer.save_freq
        self.contents, self.in_background = contents, in_background
        self.timing: dict[str, float] = {}
        self.began = time.monotonic()
        self.skipped_in_a_row = 0
        self.save_requested, self.stop_reason = False, ""
        self.observers = Observers(self)

    @cached_property
    def config_text(self) -> str:
        """The config.yaml of the run and its checkpoints: made once, as it takes OmegaConf a tenth of a second."""
        return config_yaml(self.config)

    def step(self) -> tuple[DataProto, Metrics]:
        """Does one step of training; returns the batch that it learnt from, and its metrics."""
        raise NotImplementedError

    def validate(self) -> Metrics:
        """Measures the model, and keeps the metrics as `validation`."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Returns the trainer's own part of a checkpoint, beside the step, its metrics and the random generators."""
        return {}

    def after_step(self, batch: DataProto) -> None:
        """Does what follows a step and its validation, before the step is saved."""

    def fit(self) -> Metrics:
        """Runs to the last step, from the newest checkpoint if there is one; returns the last validation's metrics."""
        settings = self.config.trainer
        clear_leftovers(self.folder)
        with self.observers:
            self.resume()
            self.saver.go_on_from(checkpoint_to_resume(self.config))
            with indispensable(self.folder):
                if self.global_step >= self.total_steps:
                    print(nothing_left(self.global_step, self.total_steps, self.validation))
                else:
                    rewrite(self.folder / CONFIG_FILE, self.config_text.encode())
                self.observers.started(self.global_step)
            self.timing["start"] = time.monotonic() - self.began
            if self.can_validate and settings.val_before_train and self.global_step == 0:
                with timer("testing", self.timing):
                    self.metrics = self.validate()
            if self.metrics and self.global_step > self.observers.record.last_step:
                self.log(None)  # step 0, or a step saved just before a kill
            try:
                ending = self.train()
            except (WorkerError, FolderLost):
                raise  # other workers may wait for the one that failed, and would not answer; or the folder is gone
            except (OSError, RuntimeError, ValueError):
                self.saver.finish()
                raise
            if ending is None:
                self.saver.check(self.global_step)
            print(files_left(self.folder, self.saver.newest, self.global_step))
            if ending is not None:
                print(ended_early(self, in_words(ending)))
                if not (in_notebook() and ending == SIGINT):  # there, the cell goes on with what is trained so far
                    end_by(ending)
            if self.stop_reason:
                print(self.stop_reason)
        return self.validation

    def train(self) -> int | None:
        """Runs the steps that are left; returns the signal that ended them, after the end of a step, if one did."""
        settings, ending = self.config.trainer, None
        with Requests(self.outlook) as requests:
            while self.global_step < self.total_steps and ending is None and not self.stop_reason:
                self.global_step, self.save_requested = self.global_step + 1, False
                batch, self.metrics = self.step()
                check_is_ours(self.folder)
                if self.can_validate and self.is_due(settings.test_freq):
                    with timer("testing", self.timing):
                        self.metrics |= self.validate()
                self.after_step(batch)
                by_signal, ending = requests.take()
                self.metrics |= self.saver.finish(wait=False)
                saves = by_signal or self.save_requested or self.is_due(self.save_freq)
                if saves or self.is_last or ending is not None:
                    with timer("save_checkpoint", self.timing):
                        self.metrics |= self.save() if saves else {}
                        self.metrics |= self.saver.finish(wait=self.is_last or ending is not None)
                self.log(batch)
                self.check_updates()
        return ending

    def log(self, batch: DataProto | None) -> None:
        """Tells the observers of this step: its batch, its metrics, and what the time since the last one went to."""
        timing = {f"timing_s/{stage}": seconds for stage, seconds in self.timing.items()}
        seconds = self.observers.record.seconds_before + time.monotonic() - self.began
        self.metrics = {**self.metrics, **timing, "training/seconds": seconds}
        self.timing = {}
        with timer("log", self.timing):
            self.observers.stepped(self.global_step, batch, self.metrics)

    def check_updates(self) -> None:
        """Warns of a loss or gradient that was not finite; raises RuntimeError in `most_skipped` steps in a row."""
        skipped = any(value > 0 for name, value in self.metrics.items() if name.endswith("/skipped_updates"))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            steps = plural(self.skipped_in_a_row, "step")
            text = (
                f"the loss or gradient was not finite in {steps} in a row{self.skipped_hint}. "
                "The weights are as before them. Often: optim.lr is too high, or a reward of enormous size."
            )
            if self.skipped_in_a_row >= self.most_skipped:
                raise RuntimeError(text)
            logger.warning("Step %d: %s", self.global_step, text)

    def outlook(self) -> tuple[str, str]:
        """Says when what a signal asks for will be done, and what a second one would lose."""
        return f"step {self.global_step} is saved when it is done", steps_lost(self.saver.newest, self.global_step)

    @property
    def is_last(self) -> bool:
        """Says whether the run ends after this step."""
        return self.global_step == self.total_steps or bool(self.stop_reason)

    def is_due(self, frequency: int) -> bool:
        """Says whether something that is done every `frequency` steps (-1: never), and after the last, is done now."""
        if self.is_last:
            return frequency > 0 or self.acts_after_last_step
        return frequency > 0 and self.global_step % frequency == 0

    def save(self) -> Metrics:
        """Writes the checkpoint of this step; returns its metrics."""
        return self.saver.save(self.global_step)

    def write_state(self, folder: Path) -> None:
        """Fills a checkpoint: the parts of each model that are named in `contents`, and the rest, which is small."""
        for name, model in self.models.items():
            model.all("save", folder.resolve() / name, self.contents, self.in_background)
            self.tokenizer.save_pretrained(folder / name / "huggingface")
        torch.save(self.train_loader.state_dict(), folder / "data.pt")
        state = {"global_step": self.global_step, "metrics": self.metrics, "rng": rng_state(), **self.state()}
        torch.save(state, folder / "trainer_state.pt")
        (folder / CONFIG_FILE).write_text(self.config_text)

    def is_written(self) -> bool:
        """Says whether the checkpoint that `write_state` began is whole."""
        return all([all(model.all("is_saved")) for model in self.models.values()])  # the list asks each of them

    def resume(self) -> None:
        """Continues from the newest (or the named) checkpoint, if there is one."""
        folder = checkpoint_to_resume(self.config)
        if folder is None:
            return
        print(f"resuming from {folder}: training goes on from its weights, not from those of {self.config.model_key}")
        for line in config_drift(folder / CONFIG_FILE, self.config):
            print(f"  config changed since: {line}")
        check_sums(folder, [folder / name for name in ("data.pt", "trainer_state.pt")])
        for name, model in self.models.items():
            model.all("load", folder.resolve() / name)
        trusted = self.config.trainer.trust_checkpoint
        read_part(folder / "data.pt", self.train_loader.load_state_dict, trusted)
        read_part(folder / "trainer_state.pt", self.restore, trusted)
        self.saver.newest = self.global_step

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over what `write_state` wrote to trainer_state.pt."""
        self.global_step, self.metrics = state["global_step"], state["metrics"]
        set_rng_state(state["rng"])


class Training:
    """Trains: the `action` of main.py on a trainer, unless a setting asks an extra for another one."""

    writes = True  # whether it writes into the run's folder

    @staticmethod
    def settle(config: Config) -> Config:
        """Returns the settings that this action uses."""
        return config

    @staticmethod
    def act(trainer: Run) -> Metrics:
        """Trains; returns metrics."""
        return trainer.fit()
