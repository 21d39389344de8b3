"""The loop of supervised training: `step` is what is learnt, `fit` is everything around it.

As the loop of reinforcement learning (training/ray_trainer.py), it drives a role and knows neither where it runs nor
what runs there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from configs.schema import SFTConfig, SFTTrainerConfig
from data.data_report import report_overlap
from data.padding import collate
from data.pretrained import check_positions, load_model_config, load_tokenizer, template_terminator
from data.protocol import DataProto
from data.sampler import PromptLoader, RandomSampler, SequentialSampler
from data.seeding import derive_seed, seed_everything
from data.sft_dataset import SFTDataset
from data.types import Sample
from training.checkpoint import CONFIG_FILE
from training.health import SkippedUpdates
from training.metric_utils import timer
from training.mini_batches import Update
from training.reports import METRICS_FILE
from training.run import Metrics, Run

MAX_SKIPPED_UPDATES = 3  # in a row; then there is no use in going on


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
    """The tokenizer and rows of a run, built and checked before workers start."""

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


class SFTTrainer(Run):
    """Trains a model on demonstrations.

    Args:
        config: the run's.
        parts: tokenizer and rows.
        model: the workers' role.
    """

    acts_after_last_step = True

    def __init__(self, config: SFTConfig, parts: SFTParts, model: SupervisedRole) -> None:
        super().__init__(
            config,
            tokenizer=parts.tokenizer,
            train_loader=parts.train_loader,
            total_steps=parts.total_steps,
            models={".": model},
            contents=config.checkpoint.save_contents,
            can_validate=parts.val_loader is not None,
        )
        self.val_loader = parts.val_loader
        self.model = model
        remedy = "Often: a learning rate too high (optim.lr), or weights that are already broken."
        self.watches = [SkippedUpdates(MAX_SKIPPED_UPDATES, None, remedy)]

    def step(self) -> tuple[DataProto, Metrics]:
        """One optimiser step on the next batch."""
        timing: dict[str, float] = {}
        with timer("step", timing):
            batch = self.pad(self.train_loader.next_batch())
            counts = {"batch_num_tokens": int(batch.batch["response_mask"].sum())}
            seed = derive_seed(self.config.trainer.seed, "update", self.global_step)
            learnt = self.model.update(batch, Update(self.global_step - 1, seed, 1.0, counts))
        return batch, learnt | {
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
        self.validation = {"val/loss": total / tokens, "timing_s/testing": timing["testing"]}
        return self.validation

    def pad(self, rows: dict) -> DataProto:
        """Rows of ids as the padded columns that the forward pass takes."""
        samples: list[Sample] = list(rows["sample"])
        longest_prompt = max(len(sample.prompt_ids) for sample in samples)
        longest_response = max(len(sample.token_ids) for sample in samples)
        return collate(samples, longest_prompt, longest_response, self.tokenizer.pad_token_id)


def files_to_come(trainer: SFTTrainerConfig, total_steps: int) -> str:
    """The line that a run prints at its start: where its files will be."""
    often = f"every {trainer.save_freq} steps and " if trainer.save_freq > 0 else ""
    last = f"after the last step global_step_{total_steps}/huggingface"
    return f"files go to {trainer.default_local_dir}: {METRICS_FILE}, {CONFIG_FILE}, and {often}{last}."
