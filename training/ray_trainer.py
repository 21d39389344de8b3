"""PPO, GRPO and their kin: `step` is the dataflow; the loop around it is training/run.py.

The trainer drives roles (training/roles.py) and does the small arithmetic between them; it knows neither where they
run nor what runs there.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from data.files import dispensable, dump_jsonl
from data.protocol import DataProto
from data.sampler import PromptLoader
from data.seeding import derive_seed
from training.advantage import add_columns, compute_advantage, correct_rollout, token_level_rewards
from training.collection import Collector, draw_rows, update_sampler
from training.core_algos import get_kl_controller
from training.health import MismatchAlarm, NoSignal, SkippedUpdates
from training.metric_utils import compute_step_metrics, reduce_metrics, timer
from training.mini_batches import Update, first_policy_step, log_prob_columns, mini_batches, policy_mini_batches
from training.reports import report_validation, validation_summary
from training.reward import RewardManager
from training.roles import Roles
from training.run import Metrics, Run
from training.sample_files import SampleFiles
from training.transcripts import sample_rows
from training.validation import Validator


class RayPPOTrainer(Run):
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

    config: Config

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
        trained = {"actor": roles.actor} | ({"critic": roles.critic} if roles.critic else {})
        super().__init__(
            config,
            tokenizer=tokenizer,
            train_loader=train_loader,
            total_steps=total_steps,
            models=trained,
            contents=config.actor_rollout_ref.actor.checkpoint.save_contents,
            in_background=config.actor_rollout_ref.actor.checkpoint.async_save,
            can_validate=validator is not None,
        )
        self.rollout, self.actor, self.ref, self.critic = roles.rollout, roles.actor, roles.ref, roles.critic
        self.num_workers = roles.num_workers
        self.collector = Collector(config, tokenizer, roles, reward, train_loader)
        self.validator = validator
        self.sample_files = SampleFiles(config, total_steps, tokenizer)
        if validator is not None:
            validator.sample_files = self.sample_files
        self.certificate: Metrics = {}  # of the last sync of the rollout's weights
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
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
        """`Run.fit`; with trainer.val_only, validates the newest checkpoint alone and writes nothing to its folder."""
        if not self.config.trainer.val_only:
            return super().fit()
        self.resume()
        return report_validation(self.global_step, self.validate(), self.config.trainer.validation_data_dir)

    def validate(self) -> Metrics:
        self.validation = self.validator.run(self.global_step)
        print(validation_summary(self.global_step, self.validation))
        return self.validation

    def step(self) -> tuple[DataProto, Metrics]:
        """Does one step of the algorithm, stage by stage; returns the finished batch and its metrics."""
        timing: dict[str, float] = {}
        with timer("step", timing):
            batch, metrics = self.collector.collect(self.global_step, timing)
            batch = self.compute_log_probs(batch, timing)
            metrics |= self.compute_advantages(batch, timing)
            metrics |= self.update(batch, timing)
        with timer("metrics", self.timing):
            metrics |= self.describe(batch, timing)
        return batch, metrics

    def compute_log_probs(self, batch: DataProto, timing: dict[str, float]) -> DataProto:
        """Returns the batch with what the algorithm reads of old log-probs, the reference's and the critic's values."""
        temperature = self.config.actor_rollout_ref.rollout.temperature
        if self.config.algorithm.rollout_correction.bypass_mode:
            batch.batch["old_log_probs"] = batch.batch["rollout_log_probs"]
        elif columns := log_prob_columns(self.config, self.global_step):
            with timer("old_log_prob", timing):
                batch = batch.union(self.actor.compute_log_prob(batch, temperature, columns))
        if self.ref:
            with timer("ref", timing):
                batch = batch.union(self.ref.compute_log_prob(batch, temperature, ["ref_log_prob"]))
        if self.critic:
            with timer("values", timing):
                batch = batch.union(self.critic.compute_values(batch))
        return batch

    def compute_advantages(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        """Adds token_level_rewards, advantages and returns, and what rollout correction says, to the batch."""
        config, algorithm, metrics = self.config, self.config.algorithm, {}
        with timer("adv", timing):
            metrics |= add_columns(batch, token_level_rewards(batch, config, self.kl_ctrl))
            metrics |= add_columns(batch, correct_rollout(batch, algorithm.rollout_correction))
            metrics |= add_columns(batch, compute_advantage(batch, algorithm))
            if algorithm.use_pf_ppo:
                draw_seed = derive_seed(config.trainer.seed, "pf_ppo", self.global_step)
                batch.batch["drawn_row"] = draw_rows(batch, algorithm.pf_ppo, draw_seed)
        return metrics

    def update(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        """Has critic and policy learn from the batch, and the engine sample from the new policy."""
        config, metrics = self.config, {}
        if self.critic:
            with timer("update_critic", timing):
                parts = mini_batches(batch, config, config.critic, self.global_step)
                metrics |= self.learn(self.critic.update_critic, parts)
        if self.global_step >= first_policy_step(config):
            with timer("update_actor", timing):
                parts = policy_mini_batches(batch, config, self.global_step)
                metrics |= self.learn(self.actor.update_policy, parts)
            with timer("update_weights", timing):
                self.certificate = self.rollout.update_weights(self.global_step)
                metrics |= self.certificate
        return metrics

    def learn(
        self, verb: Callable[[DataProto, Update], Metrics], mini_batches: Iterable[tuple[DataProto, Update]]
    ) -> Metrics:
        """Updates by `verb` on each mini-batch; averages the metrics. A refused mini-batch is kept for study."""
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
            "training/epoch": self.train_loader.epoch,
            **compute_step_metrics(batch, timing, use_critic=self.critic is not None, n_gpus=self.num_workers),
        }

    def after_step(self, batch: DataProto) -> None:
        """Reports the finished batch to the sampler, and writes its rollouts: some, or all if asked."""
        with timer("update_sampler", self.timing):
            update_sampler(self.train_loader, batch, self.collector.left_out)
        with timer("dump_rollout_generations", self.timing):
            self.sample_files.keep_batch(batch, self.global_step)
            self.dump_rollouts(batch)

    def dump_rollouts(self, batch: DataProto) -> None:
        settings = self.config.trainer
        if settings.rollout_data_dir and self.is_due(settings.rollout_data_freq):
            path = Path(settings.rollout_data_dir) / f"{self.global_step}.jsonl"
            with dispensable(str(path)):
                dump_jsonl(path, sample_rows(batch, self.tokenizer, self.global_step))

    def state(self) -> dict[str, Any]:
        return {"validation": self.validation, "kl_coef": self.kl_ctrl.value, "certificate": self.certificate}

    def resume(self) -> None:
        """`Run.resume`; the engine then samples from the weights that were loaded."""
        super().resume()
        if not self.config.trainer.val_only:
            self.sample_files.start(self.global_step)
        if self.global_step:
            self.certificate = self.rollout.update_weights(self.global_step)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.validation = state["validation"]
        if self.config.algorithm.kl_ctrl.type == "adaptive":  # a fixed one is what the config says now
            self.kl_ctrl.value = state["kl_coef"]
