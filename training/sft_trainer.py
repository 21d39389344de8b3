"""Supervised training on prompt/response rows, for a warm start: python -m training.sft_trainer --config-name sft

The loss is the mean negative log-likelihood of response tokens; prompts are read, not learned. An entry point of its
own, it wires the same engine and forward pass that the actor uses.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import end_on_interrupt, set_environment

    end_on_interrupt()
    set_environment()  # before torch is loaded

from dataclasses import asdict

import torch
from torch import Tensor

from configs.checks import check_output_folder
from configs.errors import ConfigError, late_refusals, refusals
from configs.loader import load_config, parse_arguments
from configs.schema import SFTConfig
from configs.threads import worker_threads
from data.files import rewrite
from data.locking import sole_run
from data.model_config import check_positions, load_model_config
from data.padding import Sample, collate
from data.protocol import DataProto
from data.sampler import PromptLoader, RandomSampler, SequentialSampler
from data.seeding import derive_seed
from data.sft_dataset import SFTDataset
from data.tokenizer import load_tokenizer, template_terminator
from training.checkpoint import CONFIG_FILE, Saver, config_yaml
from training.metric_utils import timer
from training.reports import files_left
from training.skipped_updates import SkippedUpdates
from training.tracking import Tracking
from workers.engine import TrainEngine, compute_dtype
from workers.kernels import start_process
from workers.micro_batches import MicroBatch, MicroBatchSize, cut
from workers.models import load_causal_lm, training_device

MAX_SKIPPED_UPDATES = 3  # in a row; then there is no use in going on


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv, "sft", __doc__)
    with refusals():
        config = load_config(arguments, SFTConfig)
        if not config.data.train_files:
            raise ConfigError(
                "data.train_files is not set: give .parquet, .json or .jsonl files of prompts and responses."
            )
        check_output_folder(config.trainer.default_local_dir)
    with late_refusals(), sole_run(config.trainer.default_local_dir):
        with refusals():
            threads = worker_threads(config.trainer.n_threads)
            start_process(threads.number, config.model.kernels)
            trainer = SFTTrainer(config)
        print(f"training is in this process, with {threads}.")
        trainer.fit()


def run(config: SFTConfig) -> Path:
    """Trains as `config` says; the Hugging Face directory of the result."""
    with sole_run(config.trainer.default_local_dir):
        return SFTTrainer(config).fit()


class SFTTrainer:
    """Supervised training of one model in this process."""

    def __init__(self, config: SFTConfig) -> None:
        self.config = config
        seed = config.trainer.seed
        torch.set_num_threads(worker_threads(config.trainer.n_threads).number)
        self.tokenizer = load_tokenizer(config.model, "model")
        self.train_loader = self.build_loader(config.data.train_files, train=True)
        self.val_loader = self.build_loader(config.data.val_files, train=False) if config.data.val_files else None
        self.total_steps = config.trainer.total_training_steps or len(self.train_loader) * config.trainer.total_epochs
        torch.manual_seed(derive_seed(seed, "worker"))
        device = training_device(n_gpus=None)
        dtype = compute_dtype(config.fsdp_config.dtype, device)
        model_config = load_model_config(config.model, config.model.path, "model.path")
        check_positions(model_config, config.data.max_length, "model.path", "data.max_length")
        module = load_causal_lm(config.model, device, dtype, config.data.max_length)
        self.engine = TrainEngine(module, config.optim, self.total_steps, device, dtype)
        self.size = MicroBatchSize(config.data.micro_batch_size_per_gpu, config.data.max_token_len_per_gpu)
        self.folder = Path(config.trainer.default_local_dir)
        self.saver = Saver(self.folder, self.write_state, ["hf_model"])
        self.skipped_updates = SkippedUpdates(
            MAX_SKIPPED_UPDATES,
            None,
            "Often: a learning rate too high (optim.lr), or weights that are already broken.",
        )

    def build_loader(self, files: str | list[str], train: bool) -> PromptLoader:
        data = self.config.data
        end_id = template_terminator(self.tokenizer)
        end_id = self.tokenizer.eos_token_id if end_id is None else end_id
        dataset = SFTDataset(files, self.tokenizer, data, end_id)
        if not train:
            return PromptLoader(dataset, data.train_batch_size, SequentialSampler(dataset, data), drop_last=False)
        sampler = RandomSampler(dataset, data, derive_seed(self.config.trainer.seed, "data"))
        return PromptLoader(dataset, data.train_batch_size, sampler)

    def fit(self) -> Path:
        """Trains to the last step; the Hugging Face directory of the result."""
        settings, result = self.config.trainer, f"global_step_{self.total_steps}"
        print(f"files go to {self.folder}: metrics.jsonl, {CONFIG_FILE}, and after the last step {result}/huggingface.")
        rewrite(self.folder / CONFIG_FILE, config_yaml(self.config).encode())
        self.saver.try_out()
        with Tracking(
            self.folder,
            settings.logger,
            project_name=settings.project_name,
            experiment_name=settings.experiment_name,
            config=asdict(self.config),
            total_steps=self.total_steps,
        ) as tracking:
            for step in range(1, self.total_steps + 1):
                metrics = self.step(step)
                last = step == self.total_steps
                if self.val_loader and (last or (settings.test_freq > 0 and step % settings.test_freq == 0)):
                    metrics["val/loss"] = self.validate()
                tracking.log(step, metrics)
                self.skipped_updates.check(metrics)
            self.saver.save(self.total_steps)
            self.saver.check(self.total_steps)
        print(files_left(self.folder))
        return self.folder / result / "huggingface"

    def step(self, step: int) -> dict[str, float]:
        """One optimiser step: L = −Σ log p(response token) / number of response tokens."""
        timing: dict[str, float] = {}
        with timer("step", timing):
            batch = self.pad(self.train_loader.next_batch())
            tokens, total = int(batch.batch["response_mask"].sum()), 0.0
            for micro in cut(batch, self.size, ["response_mask"], self.engine.module):
                loss = self.negative_log_likelihood(micro) / tokens
                loss.backward()
                total += loss.item()
            stepped = self.engine.optimizer_step(step - 1)
        return {
            "train/loss": total,
            "train/grad_norm": stepped["grad_norm"],
            "train/lr": stepped["lr"],
            "train/skipped_updates": stepped["skipped_updates"],
            "train/tokens": tokens,
            "timing_s/step": timing["step"],
        }

    @torch.no_grad()
    def validate(self) -> float:
        """Mean negative log-likelihood per response token of the validation rows."""
        total, tokens = 0.0, 0
        for rows in self.val_loader:
            batch = self.pad(rows)
            tokens += int(batch.batch["response_mask"].sum())
            for micro in cut(batch, self.size, ["response_mask"], self.engine.module):
                total += self.negative_log_likelihood(micro).item()
        return total / tokens

    def negative_log_likelihood(self, micro: MicroBatch) -> Tensor:
        """Σ −log p over the response tokens of a micro-batch."""
        with self.engine.autocast():
            log_probs = self.engine.module.token_scores(micro, temperature=1.0).log_probs
        return -(log_probs * micro.columns["response_mask"]).sum()

    def pad(self, rows: dict) -> DataProto:
        """Rows of ids as the padded columns that the forward pass takes."""
        samples: list[Sample] = list(rows["sample"])
        longest_prompt = max(len(sample.prompt_ids) for sample in samples)
        longest_response = max(len(sample.token_ids) for sample in samples)
        return collate(samples, longest_prompt, longest_response, self.tokenizer.pad_token_id)

    def write_state(self, folder: Path, contents: Sequence[str]) -> None:
        self.engine.save(folder, contents)
        self.tokenizer.save_pretrained(folder / "huggingface")


if __name__ == "__main__":
    main()
