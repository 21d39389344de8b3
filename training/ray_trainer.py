"""PPO, GRPO and their kin: `step` is the dataflow; the loop around it is training/run.py.

The trainer drives roles (training/roles.py) and does the small arithmetic between them; it knows neither where they
run nor what runs there. A role that is added to the table takes part without a line here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from data.files import dispensable
from data.protocol import DataProto
from data.sampler import PromptLoader
from training.advantage import Estimator, add_columns, measure_mismatch, token_level_rewards
from training.collection import Collector, update_sampler
from training.losses import get_kl_controller
from training.messages import validation_summary
from training.metric_utils import compute_step_metrics, reduce_metrics, timer
from training.mini_batches import PolicyUpdates, Update, mini_batches
from training.reward import RewardManager
from training.roles import columns_read, stages
from training.run import Metrics, Run
from training.validation import Validator

MOST_REFUSED = 3  # mini-batches that are kept for study, each of which is whole


class RayPPOTrainer(Run):
    """Trains a policy.

    Args:
        config: the run's.
        tokenizer: for rewards and transcripts.
        roles: by name; each is called by `rows`, `all` or `compute` (workers/group.py).
        reward: scores responses, called with `reward_view`s.
        train_loader: prompts, with a position that is saved and restored.
        validator: measures the policy; None: never.
        total_steps: the last step's number.
    """

    config: Config
    reads: tuple[str, ...] = ()  # columns of roles that a stage of a subclass reads

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: PreTrainedTokenizerBase,
        roles: Mapping[str, Any],
        reward: RewardManager,
        train_loader: PromptLoader,
        validator: Validator | None,
        total_steps: int,
    ) -> None:
        trained = {name: role for name, role in roles.items() if role.spec.update}
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
        self.roles, self.rollout, self.actor = roles, roles["rollout"], roles["actor"]
        self.num_workers = sum({id(role.group): role.group.size for role in roles.values()}.values())
        self.stages = [stage(self) for stage in stages(config)]
        self.estimator, self.policy_updates = Estimator(config.algorithm), PolicyUpdates(config)
        self.columns_read = {learns: columns_read(config, learns).union(self.reads) for learns in (False, True)}
        self.collector = Collector(config, tokenizer, roles, reward, train_loader, self.run_stages)
        self.validator = validator
        if validator is not None:
            validator.run_stages = self.run_stages
        self.certificate: Metrics = {}  # of the last sync of the rollout's weights
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.most_skipped = config.trainer.max_skipped_updates
        self.skipped_hint = (
            f" (trainer.max_skipped_updates={self.most_skipped}; {self.folder}/refused_update_step_*.pkl)"
        )

    def fit(self) -> Metrics:
        """`Run.fit`; with trainer.val_only, validates the newest checkpoint alone and writes nothing to its folder."""
        if not self.config.trainer.val_only:
            return super().fit()
        self.resume()
        print("\n".join(f"  {name}: {value:.6g}" for name, value in self.validate().items()))
        return self.validation

    def validate(self) -> Metrics:
        self.validation, batches = self.validator.run(self.global_step)
        self.observers.validated(self.global_step, batches, self.validation)
        print(validation_summary(self.global_step, self.validation))
        return self.validation

    def step(self) -> tuple[DataProto, Metrics]:
        """Does one step of the algorithm, stage by stage; returns the finished batch and its metrics."""
        timing: dict[str, float] = {}
        with timer("step", timing):
            batch, metrics = self.collector.collect(self.global_step, timing)
            batch = self.compute_columns(batch, timing)
            metrics |= self.compute_advantages(batch, timing)
            metrics |= self.update(batch, timing)
        with timer("metrics", self.timing):
            metrics |= self.describe(batch, timing)
        return batch, metrics

    @property
    def policy_learns(self) -> bool:
        """Says whether the policy is updated in this step, or the critic alone."""
        return self.global_step >= self.policy_updates.first_step

    def run_stages(self, at: str, batch: DataProto, timing: dict[str, float]) -> Metrics:
        """Runs the stages of this place; returns their metrics together."""
        metrics: Metrics = {}
        for stage in self.stages:
            if stage.at == at:
                metrics |= stage(batch, timing)
        return metrics

    def compute_columns(self, batch: DataProto, timing: dict[str, float]) -> DataProto:
        """Returns the batch with the columns that are read of log-probs, values and whatever else a role makes."""
        config = self.config
        read = self.columns_read[self.policy_learns]
        for name, role in self.roles.items():
            if columns := sorted(read.intersection(role.spec.columns).difference(batch.tensors)):
                with timer(role.spec.stage or name, timing):
                    batch = batch.union(role.compute(batch, columns, config.actor_rollout_ref.rollout.temperature))
        return batch

    def compute_advantages(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        """Adds loss_mask, token_level_rewards, advantages and returns to the batch, and what stages add."""
        batch.batch["loss_mask"] = batch.batch["response_mask"]
        with timer("adv", timing):
            metrics = measure_mismatch(batch)
            metrics |= self.run_stages("prepared", batch, timing)
            metrics |= add_columns(batch, token_level_rewards(batch, self.config, self.kl_ctrl))
            metrics |= add_columns(batch, self.estimator(batch))
            metrics |= self.run_stages("advantaged", batch, timing)
        return metrics

    def update(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        """Has the roles that learn do so from the batch, the policy last, and the engine sample from the new policy."""
        config, metrics = self.config, {}
        for name, role in self.models.items():
            if role is not self.actor:
                with timer(f"update_{name}", timing):
                    parts = mini_batches(batch, config, role.spec.settings(config), self.global_step)
                    metrics |= self.learn(role, parts)
        if self.policy_learns:
            with timer("update_actor", timing):
                metrics |= self.learn(self.actor, self.policy_updates(batch, self.global_step))
            with timer("update_weights", timing):
                self.certificate = self.rollout.update_weights(self.global_step)
                metrics |= self.certificate
        return metrics

    def learn(self, role: Any, mini_batches: Iterable[tuple[DataProto, Update]]) -> Metrics:
        """Updates a role on each mini-batch; averages the metrics. A refused mini-batch is kept for study."""
        collected: dict[str, list[float]] = {}
        for mini_batch, update in mini_batches:
            metrics = role.rows(role.spec.update, mini_batch, update)
            if any(value for name, value in metrics.items() if name.endswith("/skipped_updates")):
                self.keep_refused(mini_batch)
            for name, value in metrics.items():
                collected.setdefault(name, []).append(value)
        return reduce_metrics(collected)

    def keep_refused(self, mini_batch: DataProto) -> None:
        """Writes a mini-batch whose update was refused, unless the folder has enough of them."""
        if len([*self.folder.glob("refused_update_step_*.pkl")]) < MOST_REFUSED:
            path = self.folder / f"refused_update_step_{self.global_step}.pkl"
            with dispensable(str(path)):
                mini_batch.save_to_disk(path)

    def describe(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        """Metrics of the data, of time and of throughput."""
        return {
            "training/global_step": self.global_step,
            "training/epoch": self.train_loader.epoch,
            **compute_step_metrics(batch, timing, use_critic="critic" in self.roles, n_gpus=self.num_workers),
        }

    def after_step(self, batch: DataProto) -> None:
        """Reports the finished batch to the sampler."""
        with timer("update_sampler", self.timing):
            update_sampler(self.train_loader, batch, self.collector.left_out)

    def state(self) -> dict[str, Any]:
        return {"validation": self.validation, "kl_coef": self.kl_ctrl.value, "certificate": self.certificate}

    def resume(self) -> None:
        """`Run.resume`; the engine then samples from the weights that were loaded."""
        super().resume()
        if self.global_step:
            self.certificate = self.rollout.update_weights(self.global_step)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.validation = state["validation"]
        if self.config.algorithm.kl_ctrl.type == "adaptive":  # a fixed one is what the config says now
            self.kl_ctrl.value = state["kl_coef"]
