"""The loop of supervised training: `step` is what is learnt, `fit` is everything around it.

As the loop of reinforcement learning (training/ray_trainer.py), it drives a role and knows neither where it runs nor
what runs there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from configs.schema import SFTConfig
from data.files import rewrite
from data.overlap import report_overlap
from data.padding import collate
from data.pretrained import check_positions, load_model_config, load_tokenizer, template_terminator
from data.protocol import DataProto
from data.sampler import PromptLoader, RandomSampler, SequentialSampler
from data.seeding import derive_seed, rng_state, seed_everything, set_rng_state
from data.sft_dataset import SFTDataset
from data.types import Sample
from training.checkpoint import CONFIG_FILE, Saver, checkpoint_to_resume, clear_leftovers, config_yaml, read_part
from training.health import SkippedUpdates
from training.metric_utils import timer
from training.mini_batches import Update
from training.reports import files_left, nothing_left
from training.tracking import Tracking

MAX_SKIPPED_UPDATES = 3  # in a row; then there is no use in going on

Metrics = dict[str, float]


class SupervisedRole(Protocol):
    """What the loop asks of workers (workers/supervised.py)."""

    def update(self, batch: DataProto, update: Update) -> Metrics:
        """One optimiser step on the tokens of response_mask."""

    def loss_sum(self, batch: DataProto) -> float:
        """Σ −log p over the tokens of response_mask."""

    def save(self, folder: Path, contents: Sequence[str]) -> None: ...

    def load(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class SFTParts:
    """What is built and checked before workers start."""

    tokenizer: PreTrainedTokenizerBase
    train_loader: PromptLoader
    val_loader: PromptLoader | None
    total_steps: int


def prepare(config: SFTConfig) -> SFTParts:
    """Raises ValueError for a model, a tokenizer or rows that cannot be used."""
    data = config.data
    seed_everything(config.trainer.seed)
    tokenizer = load_tokenizer(config.model, "model")
    model_config = load_model_config(config.model, config.model.path, "model.path")
    check_positions(model_config, data.max_length, "model.path", "data.max_length")
    end_id = template_terminator(tokenizer)
    end_id = tokenizer.eos_token_id if end_id is None else end_id
    rows = SFTDataset(data.train_files, tokenizer, data, end_id)
    sampler = RandomSampler(rows, data, derive_seed(config.trainer.seed, "data"))
    train_loader, val_loader = PromptLoader(rows, data.train_batch_size, sampler), None
    if data.val_files:
        held_out = SFTDataset(data.val_files, tokenizer, data, end_id)
        report_overlap(rows.prompt_ids(), held_out.prompt_ids(), tokenizer)
        order = SequentialSampler(held_out, data)
        val_loader = PromptLoader(held_out, data.train_batch_size, order, drop_last=False)
    total_steps = config.trainer.total_training_steps or len(train_loader) * config.trainer.total_epochs
    return SFTParts(tokenizer, train_loader, val_loader, total_steps)


class SFTTrainer:
    """Trains a model on what rows show.

    Args:
        config: the run's.
        parts: tokenizer and rows.
        model: the workers' role.
    """

    def __init__(self, config: SFTConfig, parts: SFTParts, model: SupervisedRole) -> None:
        self.config = config
        self.tokenizer = parts.tokenizer
        self.train_loader, self.val_loader = parts.train_loader, parts.val_loader
        self.total_steps = parts.total_steps
        self.model = model
        self.global_step = 0
        self.metrics: Metrics = {}  # the last step's
        settings = config.trainer
        self.folder = Path(settings.default_local_dir)
        self.saver = Saver(self.folder, self.write_state, config.checkpoint.save_contents, settings.max_ckpt_to_keep)
        self.skipped_updates = SkippedUpdates(
            MAX_SKIPPED_UPDATES,
            None,
            "Often: a learning rate too high (optim.lr), or weights that are already broken.",
        )

    def fit(self) -> Path:
        """Trains to the last step, from the newest checkpoint if there is one; the Hugging Face directory of the
        result."""
        settings = self.config.trainer
        clear_leftovers(self.folder)
        self.resume()
        if self.global_step >= self.total_steps:
            print(nothing_left(self.global_step, self.total_steps, self.metrics))
        else:
            print(files_to_come(self.folder, settings.save_freq, self.total_steps))
            rewrite(self.folder / CONFIG_FILE, config_yaml(self.config).encode())
            self.saver.try_out()
        with Tracking.of_run(self.config, self.global_step, self.total_steps) as tracking:
            if self.val_loader and settings.val_before_train and self.global_step == 0:
                self.metrics = self.validate()
            if self.metrics and self.global_step > tracking.record.last_step:
                tracking.log(self.global_step, self.metrics)  # step 0, or one that was saved just before a kill
            while self.global_step < self.total_steps:
                self.global_step += 1
                self.metrics = self.step()
                if self.val_loader and self.is_due(settings.test_freq):
                    self.metrics |= self.validate()
                if self.is_due(settings.save_freq):
                    self.metrics |= self.saver.save(self.global_step)
                tracking.log(self.global_step, self.metrics)
                self.skipped_updates.check(self.metrics, None)
            self.saver.check(self.global_step)
        print(files_left(self.folder))
        return self.folder / f"global_step_{self.global_step}" / "huggingface"

    def step(self) -> Metrics:
        """One optimiser step on the next batch."""
        timing: dict[str, float] = {}
        with timer("step", timing):
            batch = self.pad(self.train_loader.next_batch())
            counts = {"batch_num_tokens": int(batch.batch["response_mask"].sum())}
            seed = derive_seed(self.config.trainer.seed, "update", self.global_step)
            learnt = self.model.update(batch, Update(self.global_step - 1, seed, 1.0, counts))
        return learnt | {
            "train/tokens": counts["batch_num_tokens"],
            "train/epoch": self.train_loader.epoch,
            "timing_s/step": timing["step"],
        }

    def validate(self) -> Metrics:
        """Mean negative log-likelihood per learnt token of the validation rows."""
        timing: dict[str, float] = {}
        total, tokens = 0.0, 0
        with timer("testing", timing):
            for rows in self.val_loader:
                batch = self.pad(rows)
                tokens += int(batch.batch["response_mask"].sum())
                total += self.model.loss_sum(batch)
        return {"val/loss": total / tokens, "timing_s/testing": timing["testing"]}

    def pad(self, rows: dict) -> DataProto:
        """Rows of ids as the padded columns that the forward pass takes."""
        samples: list[Sample] = list(rows["sample"])
        longest_prompt = max(len(sample.prompt_ids) for sample in samples)
        longest_response = max(len(sample.token_ids) for sample in samples)
        return collate(samples, longest_prompt, longest_response, self.tokenizer.pad_token_id)

    def is_due(self, frequency: int) -> bool:
        """Whether something is done after this step that is done every `frequency` steps, and after the last."""
        return self.global_step == self.total_steps or (frequency > 0 and self.global_step % frequency == 0)

    def write_state(self, folder: Path, contents: Sequence[str]) -> None:
        self.model.save(folder.resolve(), contents)
        self.tokenizer.save_pretrained(folder / "huggingface")
        torch.save(self.train_loader.state_dict(), folder / "data.pt")
        state = {"global_step": self.global_step, "metrics": self.metrics, "rng": rng_state()}
        torch.save(state, folder / "trainer_state.pt")
        (folder / CONFIG_FILE).write_text(config_yaml(self.config))

    def resume(self) -> None:
        """Takes up the newest (or the named) checkpoint, if there is one."""
        folder = checkpoint_to_resume(self.config)
        if folder is None:
            return
        self.model.load(folder.resolve())
        read_part(folder / "data.pt", self.train_loader.load_state_dict, trusted=True)
        read_part(folder / "trainer_state.pt", self.restore, trusted=True)

    def restore(self, state: dict[str, Any]) -> None:
        self.global_step, self.metrics = state["global_step"], state["metrics"]
        set_rng_state(state["rng"])


def files_to_come(folder: Path, save_freq: int, total_steps: int) -> str:
    """What a run says at its start: where its files will be."""
    often = f"every {save_freq} steps and " if save_freq > 0 else ""
    last = f"after the last step global_step_{total_steps}/huggingface"
    return f"files go to {folder}: metrics.jsonl, {CONFIG_FILE}, and {often}{last}."
