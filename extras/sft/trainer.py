"""Supervised training on prompts with responses and on conversations.

The result is a warm start for reinforcement learning, or used as it is. The loss is the mean negative log-likelihood
of a response, or of the answers in a conversation; all other tokens are only read. A step is a policy update by the
plain policy gradient (`gpg` of extras/algorithms) in which every learnt token has an advantage of 1.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from configs.errors import refusals, users_line_noted
from configs.extras import check_present
from configs.import_utils import find
from configs.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    Config,
    DataConfig,
    PolicyLossConfig,
    RolloutConfig,
    TrainerConfig,
)
from configs.settings import EACH_EPOCH, LAST, with_settings
from data.files import sole_run
from data.padding import collate
from data.pretrained import check_model, load_tokenizer
from data.protocol import DataProto
from data.rows import report_overlap
from data.sampler import PromptLoader, RandomSampler, SequentialSampler, fitting_batch_size
from data.seeding import derive_seed, seed_everything
from data.types import Sample
from extras.sft.dataset import SFTDataset, answer_end, create_sft_dataset
from extras.sft.settings import SFTConfig, SFTTrainerConfig
from training.checkpoint import CONFIG_FILE, checkpoint_to_resume
from training.metric_utils import timer
from training.mini_batches import Update
from training.run import Metrics, Run
from training.tracking import METRICS_FILE, check_observers
from workers.group import Role, roles_of
from workers.ray_group import check_machine, start_command, start_pools, worker_summary

LOSS = "gpg"  # of extras/algorithms: the plain policy gradient


@dataclass(frozen=True)
class SFTParts:
    """The tokenizer and rows of a run, built and checked before workers start."""

    tokenizer: PreTrainedTokenizerBase
    train_loader: PromptLoader
    val_loader: PromptLoader | None
    total_steps: int
    began: float = field(default_factory=time.monotonic)


def start(config: SFTConfig) -> None:
    """Trains from a command line: checks all that does not need workers first, and refuses in one line."""
    with refusals():
        check_machine(worker_config(config))
    with sole_run(config.trainer.default_local_dir):
        with refusals():
            parts = prepare(config)
        start_command(worker_config(config))
        train(config, parts)


def run(config: SFTConfig) -> Path:
    """Trains by `config`, and returns the Hugging Face directory of the result."""
    with sole_run(config.trainer.default_local_dir):
        return train(config, prepare(config))


def worker_config(config: SFTConfig) -> Config:
    """The settings by which an ordinary worker plays the actor: the loss is the plain policy gradient."""
    data = config.data
    rows, tokens = None if data.use_dynamic_bsz else data.micro_batch_size_per_gpu, data.max_token_len_per_gpu
    actor = ActorConfig(
        ppo_micro_batch_size_per_gpu=rows,
        ppo_max_token_len_per_gpu=tokens,
        policy_loss=PolicyLossConfig(loss_mode=LOSS),
        optim=config.optim,
        fsdp_config=config.fsdp_config,
        checkpoint=config.checkpoint,
    )
    rollout = RolloutConfig(
        response_length=0, log_prob_micro_batch_size_per_gpu=rows, log_prob_max_token_len_per_gpu=tokens
    )
    return Config(
        data=DataConfig(max_prompt_length=config.data.max_length),  # of the whole row: nothing is generated
        actor_rollout_ref=ActorRolloutRefConfig(model=config.model, actor=actor, rollout=rollout),
        trainer=TrainerConfig(**vars(config.trainer)),
    )


@users_line_noted()
def train(config: SFTConfig, parts: SFTParts) -> Path:
    """Starts the workers and runs the training loop, in a folder that this run has locked."""
    epoch, settings = len(parts.train_loader), config.trainer
    steps = {EACH_EPOCH: epoch, LAST: -1}
    words = {name: settings[name] for name in ("test_freq", "save_freq") if settings[name] in steps}
    config = with_settings(config, {f"trainer.{name}": steps[word] for name, word in words.items()})
    print(worker_summary(worker_config(config)), files_to_come(config.trainer, parts.total_steps), sep="\n")
    pools = start_pools(worker_config(config), parts.total_steps, ["actor"])
    try:
        trainer = SFTTrainer(config, parts, roles_of(pools, worker_config(config))["actor"])
        trainer.began = parts.began
        trainer.fit()
        return trainer.folder / f"global_step_{trainer.global_step}" / "huggingface"
    finally:
        pools["actor"].close()


def files_to_come(trainer: SFTTrainerConfig, total_steps: int) -> str:
    """The line that a run prints at its start: where its files will be."""
    often = "".join(f"{time} and " for time in trainer.also_saved)
    often += f"every {trainer.save_freq} steps and " if trainer.save_freq > 0 else ""
    last = f"after the last step global_step_{total_steps}/huggingface"
    return f"files go to {trainer.default_local_dir}: {METRICS_FILE}, {CONFIG_FILE}, and {often}{last}."


def prepare(config: SFTConfig) -> SFTParts:
    """Raises ValueError for a model, a tokenizer or rows that cannot be used."""
    data = config.data
    seed_everything(config.trainer.seed)
    check_observers(config)
    check_present("policy_loss", LOSS)
    tokenizer = load_tokenizer(config.model, "model")
    check_model(config.model, "model.path", data.max_length, "data.max_length")
    find("adapter", config.model.adapter).check_settings(config.model, "model")
    checkpoint_to_resume(config)  # or raises
    end_id = answer_end(tokenizer)
    rows = create_sft_dataset(data.train_files, tokenizer, data, end_id, data.train_max_samples)
    sampler = RandomSampler(rows, data, derive_seed(config.trainer.seed, "data"))
    batch_size, val_loader = fitting_batch_size(data, len(rows)), None
    train_loader = PromptLoader(rows, batch_size, sampler, length_key="data.max_length")
    if data.val_files:
        held_out = create_sft_dataset(data.val_files, tokenizer, data, end_id, data.val_max_samples)
        trained = rows.prompt_ids(like=held_out) if type(rows) is SFTDataset else rows.prompt_ids()
        report_overlap(trained, held_out.prompt_ids(), tokenizer)
        order = SequentialSampler(held_out, data)
        val_loader = PromptLoader(held_out, data.train_batch_size, order, drop_last=False)
    total_steps = config.trainer.total_training_steps or len(train_loader) * config.trainer.total_epochs
    return SFTParts(tokenizer, train_loader, val_loader, total_steps)


class SFTTrainer(Run):
    """Trains a model on demonstrations.

    Args:
        config: the run's.
        parts: tokenizer and rows.
        actor: the workers' role, with the loss and the sizes of `worker_config`.
    """

    acts_after_last_step = True

    def __init__(self, config: SFTConfig, parts: SFTParts, actor: Role) -> None:
        super().__init__(
            config,
            tokenizer=parts.tokenizer,
            train_loader=parts.train_loader,
            total_steps=parts.total_steps,
            models={".": actor},
            contents=config.checkpoint.save_contents,
            in_background=config.checkpoint.async_save,
            can_validate=parts.val_loader is not None,
        )
        self.val_loader = parts.val_loader
        self.actor = actor

    def step(self) -> tuple[DataProto, Metrics]:
        """One optimiser step on the next batch."""
        timing: dict[str, float] = {}
        with timer("step", timing):
            with timer("data", timing):
                batch = self.pad(self.train_loader.next_batch())
                tokens = int(batch.batch["response_mask"].sum())
            with timer("update_actor", timing):
                learnt = self.actor.rows("update_policy", batch, self.update_by(tokens))
        renamed = {name.replace("actor/", "train/"): value for name, value in learnt.items() if name != "actor/pg_loss"}
        return batch, renamed | {
            "train/tokens": tokens,
            "train/epoch": self.train_loader.epoch,
            **{f"timing_s/{stage}": seconds for stage, seconds in timing.items()},
        }

    def validate(self) -> Metrics:
        """Mean negative log-likelihood per learnt token of the validation rows."""
        total, tokens = 0.0, 0
        for rows in self.val_loader:
            batch = self.pad(rows)
            tokens += int(batch.batch["response_mask"].sum())
            total += self.actor.rows("compute_loss", batch, self.update_by(1))["actor/loss"]
        self.validation = {"val/loss": total / tokens}
        self.observers.validated(self.global_step, [], self.validation)
        return self.validation

    def update_by(self, tokens: int) -> Update:
        """The facts of this step's update, whose loss is a sum over tokens divided by `tokens`."""
        seed = derive_seed(self.config.trainer.seed, "update", self.global_step)
        return Update(self.global_step - 1, seed, 1.0, {"batch_num_tokens": tokens})

    def pad(self, rows: dict) -> DataProto:
        """Rows of ids as the padded columns that the actor takes: every learnt token has an advantage of 1."""
        samples: list[Sample] = list(rows["sample"])
        longest_prompt = max(len(sample.prompt_ids) for sample in samples)
        longest_response = max(len(sample.token_ids) for sample in samples)
        batch = collate(samples, longest_prompt, longest_response, self.tokenizer.pad_token_id)
        batch.batch["advantages"] = torch.ones_like(batch.batch.pop("rollout_log_probs"))
        return batch
