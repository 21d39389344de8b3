"""Everything that lives in one worker process: actor, rollout engine, reference and critic, on one device.

They are colocated because the rollout samples from the actor's own weights. Its methods are the roles' verbs.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from configs.schema import ActorConfig, Config, CriticConfig, RefConfig, RolloutConfig
from data.import_utils import load_module, load_modules
from data.protocol import DataProto
from data.seeding import derive_seed
from data.tokenizer import load_tokenizer
from training.checkpoint import rng_state, set_rng_state
from training.preparation import seed_everything
from training.roles import SamplingParams
from workers.dp_actor import DataParallelPPOActor, ReferencePolicy
from workers.dp_critic import DataParallelPPOCritic
from workers.engine import TrainEngine
from workers.hf.rollout import HFRollout
from workers.micro_batches import MicroBatchSize
from workers.models import load_causal_lm, load_value_model, training_device
from workers.rollout import Rollout


class ModelWorker:
    """One process's share of the run; of several workers each holds all models and gets some rows of every batch.

    Args:
        config: the whole run's.
        total_steps: length of the run, for the learning-rate schedules.
        with_ref, with_critic: whether those roles are needed.
    """

    def __init__(self, config: Config, total_steps: int, with_ref: bool, with_critic: bool) -> None:
        policy = config.actor_rollout_ref
        load_modules(policy.model.external_lib)
        load_modules(files_of_rows(config))
        device = training_device(config.trainer.n_gpus_per_node)
        self.config = config
        self.tokenizer = load_tokenizer(policy.model)
        with forked_rng(derive_seed(config.trainer.seed, "worker")):  # for weights that the folder does not hold
            module = load_causal_lm(policy.model)
        self.ref = ReferencePolicy(copy.deepcopy(module).to(device), log_prob_size(policy.ref)) if with_ref else None
        engine = TrainEngine(module, policy.actor.optim, total_steps, device, policy.actor.fsdp_config.dtype)
        self.actor = DataParallelPPOActor(
            policy.actor,
            engine,
            update_size(policy.actor),
            log_prob_size(policy.rollout),
            config.algorithm.rollout_correction,
        )
        self.critic = self._build_critic(total_steps, device) if with_critic else None
        self.rollout = self._build_rollout()

    def _build_critic(self, total_steps: int, device: torch.device) -> DataParallelPPOCritic:
        config, policy = self.config.critic, self.config.actor_rollout_ref
        module = load_value_model(policy.model, config.model.path, self.config.trainer.seed)
        engine = TrainEngine(module, config.optim, total_steps, device, policy.actor.fsdp_config.dtype)
        return DataParallelPPOCritic(config, engine, update_size(config))

    def _build_rollout(self) -> Rollout:
        config, module = self.config.actor_rollout_ref.rollout, self.actor.engine.module
        if config.name == "hf":
            return HFRollout(config, self.tokenizer, module)
        return load_rollout_class(config.name)(config, self.tokenizer, module)

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int) -> DataProto:
        with forked_rng(seed), self.actor.engine.autocast():
            return self.rollout.generate_sequences(prompts, sampling, seed, first_row)

    def update_weights(self, step: int) -> None:
        self.rollout.load_weights(self.actor.engine.module.named_parameters(remove_duplicate=False), step)

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        return self.actor.compute_log_prob(batch)

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        with self.actor.engine.autocast():  # the actor's precision, so that equal weights have no KL
            return self.ref.compute_log_prob(batch)

    def compute_values(self, batch: DataProto) -> DataProto:
        return self.critic.compute_values(batch)

    def update_policy(self, batch: DataProto) -> dict[str, float]:
        with forked_rng(batch.meta_info["seed"]):
            return self.actor.update_policy(batch)

    def update_critic(self, batch: DataProto) -> dict[str, float]:
        with forked_rng(batch.meta_info["seed"]):
            return self.critic.update_critic(batch)

    def save_actor(self, folder: Path) -> None:
        contents = self.config.actor_rollout_ref.actor.checkpoint.save_contents
        self.actor.engine.save(folder, contents, self.tokenizer)

    def load_actor(self, folder: Path) -> None:
        self.actor.engine.load(folder)

    def save_critic(self, folder: Path) -> None:
        contents = self.config.actor_rollout_ref.actor.checkpoint.save_contents
        self.critic.engine.save(folder, contents, self.tokenizer)

    def load_critic(self, folder: Path) -> None:
        self.critic.engine.load(folder)


@contextmanager
def forked_rng(seed: int) -> Iterator[None]:
    """The global generators (python, numpy, torch) seeded for one call, and as they were afterwards: an engine or loss
    that draws random numbers draws the same ones in this process and behind Ray, and disturbs nobody's."""
    before = rng_state()
    seed_everything(seed)
    try:
        yield
    finally:
        set_rng_state(before)


def files_of_rows(config: Config) -> list[str]:
    """The user's files whose objects rows may carry: rows that come by Ray unpickle only where these are loaded."""
    files = [config.env.path if config.env.id else None, config.data.custom_cls.path]
    return [file for file in files if file]


def update_size(config: ActorConfig | CriticConfig) -> MicroBatchSize:
    """use_dynamic_bsz decides where it is set; else a given number of sequences wins over the token budget."""
    sequences = None if config.use_dynamic_bsz else config.ppo_micro_batch_size_per_gpu
    return MicroBatchSize(sequences, config.ppo_max_token_len_per_gpu)


def log_prob_size(config: RolloutConfig | RefConfig) -> MicroBatchSize:
    return MicroBatchSize(config.log_prob_micro_batch_size_per_gpu, config.log_prob_max_token_len_per_gpu)


def load_rollout_class(path: str) -> type[Rollout]:
    """The one Rollout subclass defined in a file or module of the user's.

    Raises:
        ValueError: it holds none, or several.
    """
    module = load_module(path)
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Rollout) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise ValueError(
            f"actor_rollout_ref.rollout.name={path}: the file must define exactly one subclass of "
            f"workers.rollout.Rollout, it defines {[cls.__name__ for cls in found]}. Shipped engines: hf."
        )
    return found[0]
