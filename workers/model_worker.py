"""Plays the roles of one worker process, on one device.

Actor and rollout share a process: the rollout samples from the actor's own weights, or copies them in memory.
"""

from collections.abc import Collection, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.errors import ConfigError, warns_of_close
from configs.import_utils import load_modules
from configs.schema import Config, ModelConfig, OptimConfig, PretrainedModelConfig
from data.pretrained import load_model_config, load_tokenizer
from data.protocol import DataProto
from data.seeding import derive_seed, forked_rng
from data.types import SamplingParams
from training.environment import worker_env_setup
from training.mini_batches import first_policy_step
from training.roles import ROLES, models_of, needed_roles
from workers.agent_loop import AgentLoop
from workers.collectives import common_notice, group_size, rank
from workers.engine import TrainEngine, compute_dtype, precision_notice
from workers.forward import forward_of
from workers.models import MODEL_KEY, load_causal_lm, load_value_model, training_device
from workers.parallel import Replicas, layout_of
from workers.rollout import Rollout, generate_batch, load_rollout_class
from workers.rollout import build_rollout as build_engine
from workers.weight_sync import sync_class

GIB = 1 << 30


class ModelWorker:
    """Holds one process's share of the run: its models; of several workers, shards of them and rows of every batch.

    Args:
        config: the whole run's.
        total_steps: length of the run, for the learning-rate schedules.
        roles: names in the table of training/roles.py that this worker plays.

    Attributes:
        roles: by name, the objects whose methods `Group.submit` calls.
        module: the policy as it was loaded; `policy` trains it.
    """

    def __init__(self, config: Config, total_steps: int, roles: Collection[str]) -> None:
        policy = config.actor_rollout_ref
        load_modules(policy.model.external_lib)
        files = config.env.path if config.env.id else None, config.data.custom_cls.path
        load_modules([file for file in files if file])  # rows from Ray unpickle only where their classes are loaded
        self.config = config
        self.total_steps = total_steps
        self.device = training_device(config.trainer.n_gpus_per_node)
        self.dtype = compute_dtype(policy.actor.fsdp_config.dtype, self.device)
        self.longest = config.data.max_prompt_length + policy.rollout.response_length
        self.tokenizer = load_tokenizer(policy.model)
        layout = layout_of(config, group_size())
        self.layouts = {role: layout(config, self.device, self.dtype, role) for role in ("policy", "ref", "rm")}
        if self.device.type != "cpu" and "rollout" in roles and rank() == 0:
            print(memory_report(config, self.layouts, *torch.cuda.mem_get_info(self.device)))
        module = self.module = self.load_policy(policy.model, "policy")
        if "vision" in vars(module) and policy.actor.freeze_vision_tower:
            module.vision.freeze()
        if text := precision_notice(policy.actor.fsdp_config.dtype, self.device, module.num_parameters()):
            common_notice(text)
        if module.adapter.name and rank() == 0:
            trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
            print(f"{module.adapter.name}: {trained:,} of {module.num_parameters():,} parameters are trained.")
        specs = sorted((ROLES[name] for name in roles), key=lambda spec: spec.build_order)
        self.roles: dict[str, Any] = {spec.name: spec.builder()(self) for spec in specs}
        forward_of(policy.model).release_memory()

    @cached_property
    def policy(self) -> TrainEngine:
        """The policy in training, which actor and rollout share."""
        steps = self.total_steps - first_policy_step(self.config) + 1
        return self.train(self.module, self.config.actor_rollout_ref.actor.optim, steps)

    def close(self) -> None:
        """Gives back what would outlive this object in its process: the engine's things."""
        if "rollout" in self.roles:
            self.roles["rollout"].close()

    def load_policy(
        self, model: ModelConfig, role: str, sibling: PreTrainedModel | None = None, key: str = MODEL_KEY
    ) -> PreTrainedModel:
        """Loads a policy at the path that is set as `key`.path, spread as that of `role`; `sibling`: a model that was
        loaded from there."""
        with forked_rng(derive_seed(self.config.trainer.seed, "worker")):  # for weights that the folder does not hold
            return load_causal_lm(model, self.device, self.dtype, self.longest, self.layouts[role], sibling, key=key)

    def load_values(self, path: str) -> PreTrainedModel:
        """Loads a model with a value head of its own, in the settings of the policy's model."""
        model = replace(self.config.actor_rollout_ref.model, path=path)
        run = self.device, self.dtype, self.longest, self.layouts["policy"]
        return load_value_model(model, self.config.trainer.seed, *run)

    def train(self, module: PreTrainedModel, optim: OptimConfig, steps: int | None = None) -> TrainEngine:
        """Gives `module` an optimiser for so many steps of the run; None: for all."""
        return TrainEngine(module, optim, self.total_steps if steps is None else steps, self.device, self.dtype)


@dataclass
class ColocatedRollout:
    """Generates by an engine beside the policy in training, in its precision, by its weights or a copy of them."""

    config: Config
    tokenizer: PreTrainedTokenizerBase
    engine: Rollout
    policy: TrainEngine

    def __post_init__(self) -> None:
        self.sync = sync_class()(self.engine, self.policy)

    @cached_property
    def agent_loop(self) -> AgentLoop:
        env_setup = worker_env_setup(self.config, self.tokenizer) if self.config.env.id else None
        return AgentLoop(self.config, self.tokenizer, self.engine, env_setup)

    def generate_sequences(
        self, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int, episodes: bool
    ) -> DataProto:
        """Generates responses to this worker's `prompts`, or, if there are `episodes` in the whole batch, those that
        they begin; the first is row `first_row` of it."""
        with ExitStack() as contexts:
            contexts.enter_context(forked_rng(derive_seed(seed, "rows", first_row)))  # other rows have other draws
            if not self.engine.own_weights:
                contexts.enter_context(self.policy.on_device())
                contexts.enter_context(self.policy.parallel.full_weights(self.policy.module))
            self.sync.check_gathered()
            if self.engine.lost_weights:
                self.update_weights(self.engine.weight_version)
            contexts.enter_context(self.policy.autocast())
            self.engine.wake_up()
            try:
                with self.engine.together():
                    return self._generate(prompts, sampling, seed, first_row, episodes)
            finally:
                self.engine.sleep()

    def _generate(
        self, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int, episodes: bool
    ) -> DataProto:
        if episodes and len(prompts):
            return self.agent_loop.generate_sequences(prompts, sampling, seed, first_row)
        return generate_batch(self.engine, prompts, sampling, seed, first_row)

    def close(self) -> None:
        """Closes engine and environments; warns of one that raises, and closes the others."""
        for name in ("engine", "agent_loop"):
            if name in vars(self):
                with warns_of_close(name.replace("_", " ")):
                    vars(self)[name].close()

    def update_weights(self, version: int) -> dict[str, float]:
        """Has the engine sample from the policy's present weights, and certifies that it does."""
        with forked_rng(derive_seed(self.config.trainer.seed, "sync", version)):  # a resumed run syncs once more
            return self.sync.update(version)


def build_rollout(worker: ModelWorker) -> ColocatedRollout:
    config, policy = worker.config.actor_rollout_ref.rollout, worker.policy
    kind = load_rollout_class(config.name)
    # An engine may try itself out, which takes all weights and the precision of the run.
    full_weights = nullcontext() if kind.own_weights else policy.parallel.full_weights(policy.module)
    with policy.on_device(), full_weights, policy.autocast():
        engine = build_engine(kind, config, worker.tokenizer, policy.module)
    rollout = ColocatedRollout(worker.config, worker.tokenizer, engine, policy)
    if engine.own_weights:
        rollout.update_weights(0)
    return rollout


def memory_report(config: Config, layouts: Mapping[str, Replicas], free: int, card: int) -> str:
    """Says in a line what the models of a run take of each GPU: weights, gradients, moments. The GPU has `card` bytes,
    of which `free` are free.

    Raises:
        ConfigError: they do not fit, or not beside the engine's share, all of which vLLM wants to find free when it
            starts; names the keys to turn.
    """
    role_bytes, rollout = model_bytes(config, layouts), config.actor_rollout_ref.rollout
    kwargs = rollout.engine_kwargs.get("vllm") or {}
    utilization = kwargs.get("gpu_memory_utilization") or rollout.gpu_memory_utilization
    share = utilization if rollout.name == "vllm" else 0.0
    parts = " + ".join(f"{role} {size / GIB:.1f}" for role, size in role_bytes.items())
    room = free - sum(role_bytes.values())
    if room < share * card:
        engine = f" beside the {share * card / GIB:.1f} of rollout.gpu_memory_utilization={share:g}" if share else ""
        lower = f"rollout.gpu_memory_utilization={room * 100 // card / 100:g}, " if share and room > card // 10 else ""
        raise ConfigError(
            f"actor_rollout_ref.model.path: models take {parts} GiB{engine}, and {free / GIB:.1f} of the GPU's "
            f"{card / GIB:.1f} are free. Take {lower}more GPUs, fsdp_config.optimizer_offload=true or a smaller model."
        )
    return f"models take {parts} of the GPU's {card / GIB:.1f} GiB, activations come on top."


def model_bytes(config: Config, layouts: Mapping[str, Replicas]) -> dict[str, int]:
    """Counts the bytes of a GPU that the models of each role take."""
    policy, role_bytes = config.actor_rollout_ref.model, {}
    for spec, key, model in models_of(config, needed_roles(config)):
        has_adapter = policy.adapter != "none" and model.path == policy.path
        if has_adapter and spec.like_policy and not spec.update:
            continue  # it is the policy without its adapter
        learns = spec.update and key == next(iter(spec.models(config)))
        optim = spec.settings(config).optim if learns and not (has_adapter and spec.name == "actor") else None
        layout, size = layouts.get(spec.name, layouts["policy"]), parameter_count(model, key, spec.head)
        role_bytes[spec.name] = role_bytes.get(spec.name, 0) + layout.bytes_held(size, optim)
    return role_bytes


def parameter_count(settings: PretrainedModelConfig, key: str, head: type) -> int:
    """Counts a model's numbers, without its weights in memory; shared ones count once."""
    config = load_model_config(settings, settings.path, key)
    with torch.device("meta"):
        model = head.from_config(config, trust_remote_code=settings.trust_remote_code)
    return sum(weight.numel() for weight in model.parameters())
