"""Trains by PPO, GRPO and their kin: `step` is the dataflow; the loop around it is in training/run.py.

The trainer drives roles (training/roles.py) and does the small arithmetic between them; it knows neither where they
run nor what runs there. A role that is added to the table takes part without a line here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from configs.import_utils import find
from configs.schema import Config
from data.files import dispensable
from data.protocol import DataProto, object_array
from data.sampler import PromptLoader, update_sampler
from data.seeding import derive_seed
from data.types import FAILED_END_REASONS, Metrics, SamplingParams
from training.advantage import Estimator, estimator_needs, measure_mismatch, token_level_rewards
from training.environment import EnvSetup, assign_agents, episode_prompts, episode_seeds
from training.episode_rows import EpisodeRows, check_failures, greedy_scores, valid_episodes
from training.losses import get_kl_controller
from training.messages import validation_summary
from training.metric_utils import (
    compute_step_metrics,
    flatten_validation_metrics,
    process_validation_metrics,
    reduce_metrics,
    timer,
)
from training.mini_batches import PolicyUpdates, Update, mini_batches
from training.reward import RewardManager, add_scores, concat_scored, reward_metrics
from training.roles import columns_read, stages
from training.run import Run

MOST_REFUSED = 3  # whole mini-batches that are kept for study


@dataclass(frozen=True)
class Rollouts:
    """Scored responses to the prompts of a step, with metrics of how they came about."""

    batch: DataProto
    metrics: Metrics
    left_out: DataProto | None = None  # rows that were drawn, and that the step does not learn from


class RayPPOTrainer(Run):
    """Trains a policy.

    Without `roles`, RayPPOTrainer(config, train_dataset, reward_fn, val_dataset=…) is a run whose `fit` starts the
    workers and makes a trainer with them (workers/launch.py).

    Args:
        config: the run's.
        tokenizer: for rewards and transcripts.
        roles: by name; each is called by `rows`, `all` or `compute` (workers/group.py).
        reward: scores responses, called with `reward_view`s.
        train_loader: prompts, with a position that is saved and restored.
        val_loader: prompts of validation; None: there are none.
        env_setup: the environment whose env.val_episodes are played in validation.
        total_steps: the last step's number.

    Attributes:
        left_out: rows that the last step drew and does not learn from.
    """

    config: Config
    reads: tuple[str, ...] = ()  # columns of roles that a stage of a subclass reads

    def __new__(cls, config: Any, *parts: Any, roles: Mapping[str, Any] | None = None, **named_parts: Any) -> Any:
        if roles is None:
            return find("pools", "launch")(cls, config, *parts, **named_parts)
        return super().__new__(cls)

    def __init__(
        self,
        config: Config,
        *,
        tokenizer: PreTrainedTokenizerBase,
        roles: Mapping[str, Any],
        reward: RewardManager,
        train_loader: PromptLoader,
        total_steps: int,
        val_loader: PromptLoader | None = None,
        env_setup: EnvSetup | None = None,
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
            can_validate=val_loader is not None or (env_setup is not None and config.env.val_episodes > 0),
        )
        self.settings = {name: role.spec.settings(config) for name, role in trained.items()}
        self.roles, self.rollout, self.actor = roles, roles["rollout"], roles["actor"]
        self.num_workers = sum({id(role.group): role.group.size for role in roles.values()}.values())
        self.stages = [stage(self) for stage in stages(config)]
        self.estimator, self.policy_updates = Estimator(config.algorithm), PolicyUpdates(config)
        self.columns_read = {learns: columns_read(config, learns).union(self.reads) for learns in (False, True)}
        self.reward, self.val_loader, self.env_setup = reward, val_loader, env_setup
        self.needs_greedy_scores = "reward_baselines" in estimator_needs(config.algorithm.adv_estimator)
        self.left_out: DataProto | None = None
        self.certificate: Metrics = {}  # of the last sync of the rollout's weights
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.most_skipped = config.trainer.max_skipped_updates
        self.skipped_hint = (
            f" (trainer.max_skipped_updates={self.most_skipped}; {self.folder}/refused_update_step_*.pkl)"
        )

    def fit(self) -> Metrics:
        """Runs as `Run.fit`; with trainer.val_only, only validates the newest checkpoint, and writes nothing."""
        if not self.config.trainer.val_only:
            return super().fit()
        self.resume()
        with self.observers.validating():
            print("\n".join(f"  {name}: {value:.6g}" for name, value in self.validate().items()))
        return self.validation

    def step(self) -> tuple[DataProto, Metrics]:
        """Does one step of the algorithm, stage by stage; returns the finished batch and its metrics."""
        timing: dict[str, float] = {}
        with timer("step", timing):
            rollouts = self.collect(self.global_step, timing)
            batch = self.compute_columns(rollouts.batch, timing)
            metrics = rollouts.metrics | self.compute_advantages(batch, timing)
            metrics |= self.update(batch, timing)
            metrics |= self.sync(timing)
        self.left_out = rollouts.left_out
        with timer("metrics", self.timing):
            metrics |= {"training/global_step": self.global_step}
            metrics |= compute_step_metrics(batch, timing, use_critic="critic" in self.roles, n_gpus=self.num_workers)
        return batch, metrics

    def collect(self, step: int, timing: dict[str, float]) -> Rollouts:
        """Collects scored responses to the prompts of a step."""
        batch, metrics = self.draw(step, 0, timing)
        return Rollouts(batch, metrics | reward_metrics(batch))

    def draw(self, step: int, number: int, timing: dict[str, float]) -> tuple[DataProto, Metrics]:
        """Samples and scores responses to the next prompts, as draw `number` of a step.

        For ReMax, column reward_baselines [B]: the score of the greedy response to the row's prompt.
        """
        rollout = self.config.actor_rollout_ref.rollout
        sampling = SamplingParams.from_config(rollout, rollout.response_length)
        seed = derive_seed(self.config.trainer.seed, "rollout", step, number)
        with timer("data", timing):
            prompts = self.as_prompts(self.next_rows(step), f"{step}-{number}")
            epoch = {"training/epoch": self.train_loader.epoch}
        batch, metrics = self.answer(prompts.repeat(rollout.n, interleave=True), sampling, seed, timing)
        if "episode" in batch:
            check_failures(batch, self.config.env.max_failed_fraction)
        if self.needs_greedy_scores:
            with timer("gen_max", timing):
                greedy, _ = self.answer(prompts, replace(sampling, do_sample=False), seed, {})
            batch.batch["reward_baselines"] = greedy_scores(greedy, batch)
        return batch, metrics | epoch

    def next_rows(self, step: int) -> dict[str, Any]:
        """Draws the rows whose prompts a step answers."""
        return self.train_loader.next_batch()

    def as_prompts(self, rows: dict[str, Any], name: str) -> DataProto:
        """Turns rows of the data into prompts, each under a uid of its own that begins with `name`."""
        prompts = DataProto.from_single_dict(rows)
        uids = [f"{name}-{index}" for index in range(len(prompts))]
        return assign_agents(prompts.union(DataProto.from_single_dict({"uid": uids})), self.config)

    def answer(
        self, prompts: DataProto, sampling: SamplingParams, seed: int, timing: dict[str, float]
    ) -> tuple[DataProto, Metrics]:
        """Has the policy answer prompts, or play their episodes; returns the scored rows, and metrics of stages."""
        with timer("gen", timing):
            batch = self.rollout.generate_sequences(prompts, sampling, seed)
        return self.score(batch, timing)

    def score(self, batch: DataProto, timing: dict[str, float]) -> tuple[DataProto, Metrics]:
        """Returns the batch with the scores of its responses, and metrics of stages."""
        with timer("reward", timing):
            batch = add_scores(batch, self.reward, self.tokenizer, self.config.reward)
            return batch, self.run_stages("scored", batch, timing)

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
            batch.batch["token_level_rewards"], rewards = token_level_rewards(batch, self.config, self.kl_ctrl)
            batch.batch.update(self.estimator(batch))
            metrics |= rewards | self.run_stages("advantaged", batch, timing)
        return metrics

    def update(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        """Has the roles that learn do so from the batch, the policy last, and the engine sample from the new policy."""
        config, metrics = self.config, {}
        for name, role in self.models.items():
            if role is not self.actor and not role.spec.in_stage:
                with timer(f"update_{name}", timing):
                    metrics |= self.learn(role, mini_batches(batch, config, self.settings[name], self.global_step))
        if self.policy_learns:
            with timer("update_actor", timing):
                metrics |= self.learn(self.actor, self.policy_updates(batch, self.global_step))
        return metrics

    def sync(self, timing: dict[str, float]) -> Metrics:
        """Has the engines sample by the weights of this step, if it changed them; returns the certificate of that."""
        if not self.policy_learns:
            return {}
        with timer("update_weights", timing):
            self.certificate = self.rollout.update_weights(self.global_step)
        return self.certificate

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

    def after_step(self, batch: DataProto) -> None:
        """Reports the finished batch to the sampler."""
        with timer("update_sampler", self.timing):
            update_sampler(self.train_loader, batch, self.left_out)

    def validate(self) -> Metrics:
        self.validation, batches = self.measure()
        self.observers.validated(self.global_step, batches, self.validation)
        print(validation_summary(self.global_step, self.validation))
        return self.validation

    def measure(self) -> tuple[Metrics, list[DataProto]]:
        """Computes metrics of the present policy, under verl's names, and returns its answers."""
        validations = [self.measure_rows()] if self.val_loader is not None else []
        if self.env_setup is not None and self.config.env.val_episodes:
            validations.append(self.measure_episodes())
        metrics = {name: value for values, _ in validations for name, value in values.items()}
        return metrics, [batch for _, batch in validations]

    def measure_rows(self) -> tuple[Metrics, DataProto]:
        """Measures val_kwargs.n answers to each validation row, or as many episodes; failed ones have no value."""
        n = self.config.actor_rollout_ref.rollout.val_kwargs.n
        prompts = (self.as_prompts(rows, f"val-{number}") for number, rows in enumerate(self.val_loader))
        answers = [self.val_answers(part.repeat(n, interleave=True), number) for number, part in enumerate(prompts)]
        batch = concat_scored(answers)
        if "episode" in batch:
            check_failures(batch, self.config.env.max_failed_fraction)
        ends = batch.select_idxs(EpisodeRows(batch).last_row)
        columns = {name: ends.non_tensor_batch[name] for name in batch.meta_info["reward_extra_keys"]}
        columns["reward"] = object_array(ends.batch["token_level_scores"].sum(1).tolist())
        for column in columns.values():
            column[[reason in FAILED_END_REASONS for reason in ends.end_reason]] = None
        return flatten_validation_metrics(process_validation_metrics(ends.data_source, ends.uid, columns)), batch

    def measure_episodes(self) -> tuple[Metrics, DataProto]:
        """Measures env.val_episodes whole episodes, with reset seeds that count up from env.val_seed.

        `return` is the sum of an episode's rewards, `acc` whether it was a success. Where nobody says what a success is
        there is no `acc`; where anyone does, an episode of which nothing was said is none. Those that failed count
        nowhere.
        """
        batch = self.val_answers(episode_prompts(self.env_setup, episode_seeds(self.config.env)), 0)
        check_failures(batch, self.config.env.max_failed_fraction)
        ends = valid_episodes(batch)
        columns = {"return": list(ends.episode_return)}
        if any(success is not None for success in ends.success):
            columns = {"acc": [float(success or False) for success in ends.success], **columns}
        metrics = process_validation_metrics(ends.data_source, ends.uid, columns)
        return flatten_validation_metrics(metrics, num_turns=ends.non_tensor_batch["__num_turns__"]), batch

    def val_answers(self, prompts: DataProto, number: int) -> DataProto:
        """Samples a validation's answers to its number-th prompts; the draws are the same at every step, so that steps
        are compared on equal terms."""
        rollout = self.config.actor_rollout_ref.rollout
        sampling = SamplingParams.from_config(rollout.val_kwargs, rollout.response_length)
        prompts.meta_info = {**prompts.meta_info, "validate": True}  # rewards may read it
        return self.answer(prompts, sampling, derive_seed(self.config.trainer.seed, "validation", number), {})[0]

    def state(self) -> dict[str, Any]:
        state = {"validation": self.validation, "kl_coef": self.kl_ctrl.value, "certificate": self.certificate}
        return state | {"stages": {type(stage).__name__: stage.state for stage in self.stages}}

    def resume(self) -> None:
        """Resumes as `Run.resume`; the engine then samples from the weights that were loaded."""
        super().resume()
        if self.global_step:
            self.certificate = self.rollout.update_weights(self.global_step)

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.validation = state["validation"]
        if self.config.algorithm.kl_ctrl.type == "adaptive":  # a fixed one follows the present config
            self.kl_ctrl.value = state["kl_coef"]
        for stage in self.stages:
            stage.state |= state.get("stages", {}).get(type(stage).__name__, {})
