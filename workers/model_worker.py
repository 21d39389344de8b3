"""Plays the roles of one worker process, on one device.

Actor and rollout share a process: the rollout samples from the actor's own weights, or copies them in memory.
"""

from collections.abc import Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.checks import cuts_by_tokens
from configs.errors import warns_of_close
from configs.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    OptimConfig,
    RefConfig,
    RolloutConfig,
)
from data.import_utils import load_modules
from data.pretrained import load_tokenizer
from data.protocol import DataProto
from data.seeding import derive_seed, forked_rng
from data.types import SamplingParams
from training.environment import worker_env_setup
from training.mini_batches import first_policy_step
from training.reward_function import Loadable
from workers.agent_loop import AgentLoop
from workers.certificate import WeightSync, probes
from workers.collectives import common_notice, compute_together, rank
from workers.dp_actor import DataParallelPPOActor, ReferencePolicy
from workers.dp_critic import DataParallelPPOCritic
from workers.early_scores import EarlyScores
from workers.engine import TrainEngine, compute_dtype, gather_dtype, precision_notice
from workers.kernels import give_back_memory
from workers.load_rollout import build_rollout, generate_batch, load_rollout_class
from workers.lora import has_lora
from workers.memory_needs import memory_report
from workers.micro_batches import MicroBatchSize
from workers.models import frozen_copy, load_causal_lm, load_value_model, training_device
from workers.offload import Offload, Residence
from workers.reward_model import LearnedReward
from workers.rollout import Rollout
from workers.sharding import Sharding, gather_weights, make_mesh, shard_summary


class ModelWorker:
    """Holds one process's share of the run: its models; of several workers, shards of them and rows of every batch.

    Args:
        config: the whole run's.
        total_steps: length of the run, for the learning-rate schedules.
        roles: what this worker plays: actor, rollout, ref, critic, rm.

    Attributes:
        roles: by name, the objects whose methods `WorkerGroup.submit` calls.
    """

    def __init__(self, config: Config, total_steps: int, roles: Collection[str]) -> None:
        policy = config.actor_rollout_ref
        load_modules(policy.model.external_lib)
        load_modules(files_of_rows(config))
        self.config = config
        self.total_steps = total_steps
        self.device = training_device(config.trainer.n_gpus_per_node)
        self.dtype = compute_dtype(policy.actor.fsdp_config.dtype, self.device)
        if "rollout" in roles and rank() == 0 and (memory := memory_report(config)):
            print(memory)
        self.longest = config.data.max_prompt_length + policy.rollout.response_length
        self.tokenizer = load_tokenizer(policy.model)
        compute_together(policy.actor.tensor_parallel_size)
        self.mesh = make_mesh(policy.actor.fsdp_config.fsdp_size, self.device, policy.actor.tensor_parallel_size)
        fsdp = policy.actor.fsdp_config
        self.offload = Offload(self._offloads(fsdp.optimizer_offload), self._offloads(fsdp.param_offload))
        module = self._load_policy(self.offload.any)
        if self.mesh is not None and rank() == 0:
            print(shard_summary(module, self._sharding(self.offload.any)))
        said = precision_notice(policy.actor.fsdp_config.dtype, self.device, module.num_parameters())
        if said:
            common_notice(said)
        if has_lora(module) and rank() == 0:
            trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
            print(f"LoRA: {trained:,} of {module.num_parameters():,} parameters are trained.")
        reference = self._load_reference(module) if "ref" in roles and not has_lora(module) else None
        policy_steps = total_steps - first_policy_step(config) + 1
        self.policy = self._train(module, policy.actor.optim, policy_steps)
        builders = {
            "actor": self._build_actor,
            "rollout": self._build_rollout,
            "ref": lambda: self._build_reference(reference),
            "critic": self._build_critic,
            "rm": self._build_rm,
        }
        last = sorted(roles, key="rollout".__eq__)  # an engine takes its share of what the others leave
        self.roles: dict[str, Any] = {role: builders[role]() for role in last}
        give_back_memory()

    def close(self) -> None:
        """Gives back what would outlive this object in its process: the engine's things."""
        if "rollout" in self.roles:
            self.roles["rollout"].close()

    def _load_policy(self, offload: bool, like: PreTrainedModel | None = None) -> PreTrainedModel:
        """Loads the policy that the run starts from; `like`: one that is loaded already."""
        model, sharding = self.config.actor_rollout_ref.model, self._sharding(offload)
        with forked_rng(derive_seed(self.config.trainer.seed, "worker")):  # for weights that the folder does not hold
            return load_causal_lm(model, self.device, self.dtype, self.longest, sharding, like)

    def _load_reference(self, policy: PreTrainedModel) -> PreTrainedModel:
        """Makes the frozen model of the weights that `policy` has now: a copy, or shards of its own."""
        if self.mesh is None:
            return frozen_copy(policy, self.dtype)
        return self._load_policy(self._offloads(self.config.actor_rollout_ref.ref.fsdp_config.param_offload), policy)

    def _train(self, module: PreTrainedModel, optim: OptimConfig, steps: int) -> TrainEngine:
        offload = self.offload if self.mesh is None else Offload()  # shards see to it by themselves
        return TrainEngine(module, optim, steps, self.device, self.dtype, offload)

    def _offloads(self, asked: bool) -> bool:
        """Says whether something is kept in main memory; on a CPU all is there."""
        return asked and self.device.type != "cpu"

    def _sharding(self, offload: bool) -> Sharding | None:
        """Reads off how a model is spread over the workers; None: there is one."""
        if self.mesh is None:
            return None
        fsdp = self.config.actor_rollout_ref.actor.fsdp_config
        gathered = gather_dtype(fsdp.mixed_precision.param_dtype, self.dtype)
        reduced = getattr(torch, fsdp.mixed_precision.reduce_dtype)
        return Sharding(self.mesh, fsdp.reshard_after_forward, offload, gathered, reduced)

    def _build_actor(self) -> DataParallelPPOActor:
        policy = self.config.actor_rollout_ref
        sizes = update_size(policy.actor), log_prob_size(policy.rollout)
        return DataParallelPPOActor(policy.actor, self.policy, *sizes, self.config.algorithm.rollout_correction)

    def _build_critic(self) -> DataParallelPPOCritic:
        config = self.config.critic
        model = replace(self.config.actor_rollout_ref.model, path=config.model.path)
        run = self.device, self.dtype, self.longest, self._sharding(self.offload.any)
        module = load_value_model(model, self.config.trainer.seed, *run)
        engine = self._train(module, config.optim, self.total_steps)
        return DataParallelPPOCritic(config, engine, update_size(config))

    def _build_reference(self, module: PreTrainedModel | None) -> ReferencePolicy:
        """`module`: its model; None: with LoRA, the actor's without LoRA's matrices."""
        config = self.config.actor_rollout_ref.ref
        if module is None:
            module, at_work = self.policy.module, self.policy.at_work_without_lora
        else:
            offload = self.mesh is None and self._offloads(config.fsdp_config.param_offload)
            at_work = Residence(module.eval().requires_grad_(False), offload).at_work
        return ReferencePolicy(module, log_prob_size(config), self.policy.autocast, at_work)

    def _build_rm(self) -> LearnedReward:
        config = self.config.reward.reward_model
        offload = self._offloads(config.fsdp_config.param_offload)
        mesh = make_mesh(-1, self.device)  # its layers are whole
        sharding = None if mesh is None else Sharding(mesh, offload=offload)
        return LearnedReward(config, self.tokenizer, self.device, offload, sharding)

    def _build_rollout(self) -> "ColocatedRollout":
        config = self.config.actor_rollout_ref.rollout
        kind = load_rollout_class(config.name)
        # An engine may try what it can do, by all weights, in the precision that it will do it in.
        whole = nullcontext() if kind.own_weights else gather_weights(self.policy.module)
        with self.policy.at_work(), whole, self.policy.autocast():
            engine = build_rollout(kind, config, self.tokenizer, self.policy.module)
        rollout = ColocatedRollout(self.config, self.tokenizer, engine, self.policy)
        if engine.own_weights:
            rollout.update_weights(0)
        return rollout


@dataclass
class ColocatedRollout:
    """Generates by an engine beside the policy in training, in its precision, by its weights or a copy of them."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    engine: Rollout
    policy: TrainEngine

    def __post_init__(self) -> None:
        self.sync = WeightSync(self.engine, self.policy)
        self.score_early([])

    @cached_property
    def agent_loop(self) -> AgentLoop:
        game = worker_env_setup(self.config, self.tokenizer) if self.config.env.id else None
        return AgentLoop(self.config, self.tokenizer, self.engine, game)

    def score_early(self, functions: Sequence[Loadable]) -> None:
        """Scores responses from now on by these functions of the run's reward, while further ones are generated."""
        self.early_scores = EarlyScores(self.config, self.tokenizer, functions)

    def generate_sequences(
        self, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int, episodes: bool
    ) -> DataProto:
        """Generates responses to this worker's `prompts`, or, if there are `episodes` in the whole batch, those that
        they begin; the first is row `first_row` of it."""
        with ExitStack() as held:
            held.enter_context(forked_rng(derive_seed(seed, "rows", first_row)))  # other rows, other draws
            if not self.engine.own_weights:
                held.enter_context(self.policy.at_work())
                held.enter_context(gather_weights(self.policy.module))
            if self.sync.gathers:
                self.sync.check_gathered()
            if self.engine.lost_weights:
                self.update_weights(self.engine.weight_version)
            held.enter_context(self.policy.autocast())
            self.engine.wake_up()
            try:
                with self.engine.together():
                    batch = self._generate(prompts, sampling, seed, first_row, episodes)
            finally:
                self.engine.sleep()
        return self.early_scores.attach(batch)

    def _generate(
        self, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int, episodes: bool
    ) -> DataProto:
        if episodes and len(prompts):
            with self.early_scores.of_episodes(self.agent_loop, prompts):
                return self.agent_loop.generate_sequences(prompts, sampling, seed, first_row)
        with self.early_scores.of_answers(self.engine, prompts):
            return generate_batch(self.engine, prompts, sampling, seed, first_row)

    def close(self) -> None:
        """Closes engine, scorers and environments; of one that raises is warned, and the others are closed."""
        for name in ("engine", "early_scores", "agent_loop"):
            if name in vars(self):
                with warns_of_close(name.replace("_", " ")):
                    vars(self)[name].close()

    def update_weights(self, version: int) -> dict[str, float]:
        """Has the engine sample from the policy's present weights, and certifies that it does."""
        with forked_rng(derive_seed(self.config.trainer.seed, "sync", version)):  # a resumed run syncs once more
            if self.sync.gathers or probes(self.engine, version):
                return self.sync.update(version)
            self.engine.load_weights(self.policy.weights(), version)
            return {"rollout/weight_version": float(version)}


def files_of_rows(config: Config) -> list[str]:
    """Lists the user's files whose objects rows may carry: rows from Ray unpickle only where these are loaded."""
    files = [config.env.path if config.env.id else None, config.data.custom_cls.path]
    return [file for file in files if file]


def update_size(config: ActorConfig | CriticConfig) -> MicroBatchSize:
    """Reads off the size of a forward pass with a backward."""
    sequences = None if cuts_by_tokens(config) else config.ppo_micro_batch_size_per_gpu
    return MicroBatchSize(sequences, config.ppo_max_token_len_per_gpu)


def log_prob_size(config: RolloutConfig | RefConfig) -> MicroBatchSize:
    """Reads off the size of a forward pass that only scores."""
    return MicroBatchSize(config.log_prob_micro_batch_size_per_gpu, config.log_prob_max_token_len_per_gpu)
