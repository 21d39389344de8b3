"""The loop of PPO, GRPO and their kin: `step` is the dataflow, `fit` is everything around it.

The trainer drives roles (training/roles.py) and does the small arithmetic between them; it knows neither where they
run nor what runs there.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from data.files import dispensable, dump_jsonl, rewrite
from data.protocol import DataProto
from data.sampler import PromptLoader
from data.seeding import derive_seed, rng_state, set_rng_state
from training.advantage import add_columns, compute_advantage, correct_rollout, token_level_rewards
from training.checkpoint import CONFIG_FILE, Saver, checkpoint_to_resume, clear_leftovers, config_yaml, read_part
from training.collection import Collector, draw_rows, update_sampler
from training.core_algos import get_kl_controller
from training.health import MismatchAlarm, NoSignal, SkippedUpdates
from training.metric_utils import compute_step_metrics, reduce_metrics, timer
from training.mini_batches import Update, first_policy_step, log_prob_columns, mini_batches, policy_mini_batches
from training.reports import files_left, nothing_left, report_validation, validation_summary
from training.reward import RewardManager
from training.roles import Roles
from training.tracking import Tracking
from training.transcripts import sample_rows
from training.validation import Validator

Metrics = dict[str, float]


class RayPPOTrainer:
    """Trains a policy.

    Args:
        config: the run's.
        tokenizer: for rewards and transcripts.
        roles: the workers.
        reward: scores responses, called with `reward_view`s.
        train_loader: prompts, with a position that is saved and restored.
        validator: measures the policy; None: never.
        total_steps: the last step's number.
    """

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: PreTrainedTokenizerBase,
        roles: Roles,
        reward: RewardManager,
        train_loader: PromptLoader,
        validator: Validator | None,
        total_steps: int,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.rollout, self.actor, self.ref, self.critic = roles.rollout, roles.actor, roles.ref, roles.critic
        self.num_workers = roles.num_workers
        self.collector = Collector(config, tokenizer, roles, reward, train_loader)
        self.train_loader = train_loader
        self.validator = validator
        self.total_steps = total_steps
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.global_step = 0
        self.metrics: Metrics = {}  # the last step's
        self.validation: Metrics = {}  # the last validation's
        self.folder = Path(config.trainer.default_local_dir)
        contents = config.actor_rollout_ref.actor.checkpoint.save_contents
        self.saver = Saver(self.folder, self.write_state, contents, config.trainer.max_ckpt_to_keep)
        self.skipped_updates = SkippedUpdates(
            config.trainer.max_skipped_updates,
            "trainer.max_skipped_updates",
            "Often: a learning rate too high (actor_rollout_ref.actor.optim.lr), or a reward of enormous size.",
            self.folder,
        )
        self.watches = [
            self.skipped_updates,
            NoSignal(config.trainer.no_signal_steps, tokenizer),
            MismatchAlarm(config.trainer.max_rollout_mismatch),
        ]

    def fit(self) -> Metrics:
        """Runs to the last step, from the newest checkpoint if there is one; the last validation's metrics."""
        settings = self.config.trainer
        if settings.val_only:
            self.resume()
            return report_validation(self.global_step, self.validate(), settings.validation_data_dir)
        clear_leftovers(self.folder)
        self.resume()
        if self.global_step >= self.total_steps:
            print(nothing_left(self.global_step, self.total_steps, self.validation))
        else:
            rewrite(self.folder / CONFIG_FILE, config_yaml(self.config).encode())
            if settings.save_freq > 0:
                self.saver.try_out(", or train without checkpoints: trainer.save_freq=-1")
        with Tracking.of_run(self.config, self.global_step, self.total_steps) as tracking:
            if self.validator and settings.val_before_train and self.global_step == 0:
                self.metrics = self.validate()
            if self.metrics and self.global_step > tracking.record.last_step:
                tracking.log(self.global_step, self.metrics)  # step 0, or one that was saved just before a kill
            while self.global_step < self.total_steps:
                self.global_step += 1
                batch, self.metrics = self.step()
                if self.validator and self.is_due(settings.test_freq):
                    self.metrics |= self.validate()
                update_sampler(self.train_loader, batch, self.collector.left_out)
                self.dump_rollouts(batch)
                if self.is_due(settings.save_freq):
                    self.metrics |= self.save()
                tracking.log(self.global_step, self.metrics)
                for watch in self.watches:
                    watch.check(self.metrics, batch)
            self.saver.check(self.global_step)
        print(files_left(self.folder))
        return self.validation

    def validate(self) -> Metrics:
        self.validation = self.validator.run(self.global_step)
        print(validation_summary(self.global_step, self.validation))
        return self.validation

    def step(self) -> tuple[DataProto, Metrics]:
        """One step of the algorithm: the finished batch, and what is worth logging about it."""
        config, algorithm, timing = self.config, self.config.algorithm, {}
        temperature = config.actor_rollout_ref.rollout.temperature
        with timer("step", timing):
            batch, metrics = self.collector.collect(self.global_step, timing)
            if algorithm.rollout_correction.bypass_mode:
                batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
            elif columns := log_prob_columns(config, self.global_step):
                with timer("old_log_prob", timing):
                    batch = batch.union(self.actor.compute_log_prob(batch, temperature, columns))
            if self.ref:
                with timer("ref", timing):
                    batch = batch.union(self.ref.compute_log_prob(batch, temperature, ["ref_log_prob"]))
            if self.critic:
                with timer("values", timing):
                    batch = batch.union(self.critic.compute_values(batch))
            with timer("adv", timing):
                metrics |= add_columns(batch, token_level_rewards(batch, config, self.kl_ctrl))
                metrics |= add_columns(batch, correct_rollout(batch, algorithm.rollout_correction))
                metrics |= add_columns(batch, compute_advantage(batch, algorithm))
                draw_seed = derive_seed(config.trainer.seed, "pf_ppo", self.global_step)
                metrics |= add_columns(batch, draw_rows(batch, algorithm, draw_seed))
            if self.critic:
                with timer("update_critic", timing):
                    parts = mini_batches(batch, config, config.critic, self.global_step)
                    metrics |= self.learn(self.critic.update_critic, parts)
            if self.global_step >= first_policy_step(config):
                with timer("update_actor", timing):
                    parts = policy_mini_batches(batch, config, self.global_step)
                    metrics |= self.learn(self.actor.update_policy, parts)
                with timer("update_weights", timing):
                    self.rollout.update_weights(self.global_step)
        return batch, metrics | self.describe(batch, timing)

    def learn(
        self, verb: Callable[[DataProto, Update], Metrics], mini_batches: Iterable[tuple[DataProto, Update]]
    ) -> Metrics:
        """All mini-batches through `verb`; their metrics averaged. A batch that was refused is kept for study."""
        collected: dict[str, list[float]] = {}
        for mini_batch, update in mini_batches:
            metrics = verb(mini_batch, update)
            if any(value for name, value in metrics.items() if name.endswith("/skipped_updates")):
                self.skipped_updates.keep(mini_batch, self.global_step)
            for name, value in metrics.items():
                collected.setdefault(name, []).append(value)
        return reduce_metrics(collected)

    def describe(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        """Metrics of the data, of time and of throughput."""
        return {
            "training/global_step": self.global_step,
            "training/epoch": (self.global_step - 1) // len(self.train_loader),
            **compute_step_metrics(batch, timing, use_critic=self.critic is not None, n_gpus=self.num_workers),
        }

    def is_due(self, frequency: int) -> bool:
        return frequency > 0 and (self.global_step % frequency == 0 or self.global_step == self.total_steps)

    def dump_rollouts(self, batch: DataProto) -> None:
        settings = self.config.trainer
        if settings.rollout_data_dir and self.is_due(settings.rollout_data_freq):
            path = Path(settings.rollout_data_dir) / f"{self.global_step}.jsonl"
            with dispensable(str(path)):
                dump_jsonl(path, sample_rows(batch, self.tokenizer, self.global_step))

    def save(self) -> Metrics:
        return self.saver.save(self.global_step)

    def write_state(self, folder: Path, contents: Sequence[str]) -> None:
        trained = {"actor": self.actor} | ({"critic": self.critic} if self.critic else {})
        for name, role in trained.items():
            role.save(folder.resolve() / name, contents)
            self.tokenizer.save_pretrained(folder / name / "huggingface")
        torch.save(self.train_loader.state_dict(), folder / "data.pt")
        state = {
            "global_step": self.global_step,
            "metrics": self.metrics,
            "validation": self.validation,
            "kl_coef": self.kl_ctrl.value,
            "rng": rng_state(),
        }
        torch.save(state, folder / "trainer_state.pt")
        (folder / CONFIG_FILE).write_text(config_yaml(self.config))

    def resume(self) -> None:
        """Takes up the newest (or the named) checkpoint, if there is one."""
        folder = checkpoint_to_resume(self.config)
        if folder is None:
            return
        self.actor.load(folder.resolve() / "actor")
        if self.critic:
            self.critic.load(folder.resolve() / "critic")
        read_part(folder / "data.pt", self.train_loader.load_state_dict, trusted=True)
        read_part(folder / "trainer_state.pt", self.restore, trusted=True)
        self.rollout.update_weights(self.global_step)

    def restore(self, state: dict[str, Any]) -> None:
        self.global_step = state["global_step"]
        self.metrics, self.validation = state["metrics"], state["validation"]
        if self.config.algorithm.kl_ctrl.type == "adaptive":  # a fixed one is what the config says now
            self.kl_ctrl.value = state["kl_coef"]
        set_rng_state(state["rng"])
