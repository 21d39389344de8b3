"""Estimates what a run needs of a GPU's memory before it starts: exact for weights, about for the rest.

Models in training are in float32, and computed with in the run's precision. Counted are weights, AdamW's two moments
and gradients, but what is kept in main memory; while generating, keys and values, the weights that autocast casts, and
the distributions that are drawn from, or the share that vLLM is told to take; what an update takes beside
(`ModelSize` in data/pretrained.py); while only scoring, one layer or the logits. Of several workers each holds its
shards of all models, and what is whole for a time is counted, too. Left out: what the allocator cannot use, and the
block mask, which takes 0.3 GiB while it is made.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from configs.checks import cuts_by_tokens
from configs.errors import ConfigError, notice
from configs.loader import workers_asked_for
from configs.paths import find_path
from configs.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    ModelConfig,
    PretrainedModelConfig,
    RefConfig,
    RolloutConfig,
)
from data.chat import RM_KEY
from data.pretrained import FLOAT32, ModelSize, load_model_config
from training.roles import needed_roles
from workers.engine import compute_dtype
from workers.models import training_device

SHARES = {"vllm": "vLLM", "sglang": "SGLang"}  # engines that take gpu_memory_utilization of the card
DRAWN = 4 * FLOAT32  # a number of a distribution that is drawn from
SORTED = 12 * FLOAT32  # and with top_p, which sorts it
GIB = 1 << 30


@dataclass(frozen=True)
class Needs:
    """Bytes of a GPU, by what they are for: those held throughout, and those of each phase; and what the engine finds
    in use when it starts."""

    held: Mapping[str, int]
    generation: Mapping[str, int]
    scoring: Mapping[str, int]
    update: Mapping[str, int]
    at_start: int

    @property
    def least(self) -> int:
        """Bytes that no setting of sizes changes: the weights in training with their gradients, and what is held."""
        return sum(self.held.values()) + self.update.get("whole weights", 0) + self.update["gradients"]

    @property
    def peak(self) -> int:
        phases = self.generation, self.scoring, self.update
        return sum(self.held.values()) + max(sum(phase.values()) for phase in phases)

    def __str__(self) -> str:
        named = ("held", "generating", "scoring", "updating")
        phases = zip(named, (self.held, self.generation, self.scoring, self.update), strict=True)
        parts = "; ".join(f"{phase} {join_sizes(parts)}" for phase, parts in phases)
        return f"a GPU's memory in GiB, about: {parts}; at most {self.peak / GIB:.1f} at once"


def join_sizes(parts: Mapping[str, int]) -> str:
    return " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size) or "nothing"


@dataclass(frozen=True)
class Share:
    """The part of each model that a worker holds throughout, and what of it is in main memory.

    Args:
        workers: of the run; a worker on its own has plain models, and several have sharded ones.
        shards: workers that hold a model together.
        reshards: whether they drop each other's parts of a layer after its forward.
        weights_away, moments_away: whether models in training keep them in main memory.
        gathered: bytes of a number in weights that several workers gather.
    """

    workers: int
    shards: int
    reshards: bool
    weights_away: bool
    moments_away: bool
    gathered: int = FLOAT32

    @classmethod
    def of(cls, config: Config, width: int) -> "Share":
        fsdp = config.actor_rollout_ref.actor.fsdp_config
        workers, away = workers_asked_for(config.trainer), (fsdp.param_offload, fsdp.optimizer_offload)
        shards = min_or_all(fsdp.fsdp_size, shares_of_rows(config))
        if workers > 1:
            away = any(away), any(away)  # shards go with their moments
        asked = fsdp.mixed_precision.param_dtype
        gathered = width if asked == "auto" else getattr(torch, asked).itemsize
        return cls(workers, shards, fsdp.reshard_after_forward, *away, gathered)

    def weights(self, size: ModelSize) -> int:
        return 0 if self.weights_away else FLOAT32 * size.parameters // self.shards

    def moments(self, size: ModelSize, role: ActorConfig | CriticConfig) -> int:
        width = getattr(torch, role.optim.moments_dtype).itemsize
        return 0 if self.moments_away else 2 * width * size.trained // self.shards

    def frozen(self, size: ModelSize, width: int) -> int:
        """Counts bytes of a model that only scores."""
        return size.frozen(width) if self.workers == 1 else FLOAT32 * size.parameters // self.shards

    def whole(self, size: ModelSize, frozen: int | None = None) -> int:
        """Counts bytes of weights that are on the GPU only while a model computes: of one in main memory all, or what
        is gathered. `frozen`: those of a model that only scores, if it is in main memory; 0 if not."""
        if self.workers > 1:
            return size.gathered_bytes(self.reshards, self.gathered)
        away = FLOAT32 * size.parameters if self.weights_away else 0
        return away if frozen is None else frozen

    def copies(self, size: ModelSize, width: int) -> int:
        """Counts bytes of cast weights in a pass that only scores: a sharded model's are not kept, or gathered so."""
        if self.workers == 1:
            return size.copies(width)
        return size.copies(width) // size.layers if self.gathered == FLOAT32 else 0


def memory_needs(
    config: Config, policy: ModelSize, critic: ModelSize | None, rm: ModelSize | None, width: int, card: int
) -> Needs:
    """Counts what a worker needs of a GPU of `card` bytes; `width` is the bytes of a number that it computes with."""
    rollout, actor, share = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor, Share.of(config, width)
    policy, critic, rm = (size and size.split(actor.tensor_parallel_size) for size in (policy, critic, rm))
    trained = [(policy, actor), *([(critic, config.critic)] if critic else [])]
    held = {
        "weights": share.weights(policy),
        "AdamW": share.moments(policy, actor),
        "critic": share.weights(critic) + share.moments(critic, config.critic) if critic else 0,
    }
    offloads = config.actor_rollout_ref.ref.fsdp_config, config.reward.reward_model.fsdp_config
    refers = "ref" in needed_roles(config) and policy.learns_head  # else it is the policy without LoRA
    scored = {"reference": policy if refers else None, "reward model": rm}
    for (name, size), offload in zip(scored.items(), offloads, strict=True):
        held[name] = share.frozen(size, width) if size and not offload.param_offload else 0
    generation = engine_needs(config, policy, width, card)
    asleep = rollout.name not in SHARES or rollout.free_cache_engine
    updates = [update_needs(size, role, config, width) for size, role in trained]
    largest = max(updates, key=lambda parts: sum(parts.values()))
    without_moments = sum(held.values()) - sum(share.moments(size, role) for size, role in trained)
    at_start = without_moments + (FLOAT32 * policy.parameters if share.weights_away and share.workers == 1 else 0)
    awake = {} if asleep else generation
    scoring = max(scoring_needs(config, policy, rm, width), key=lambda parts: sum(parts.values()))
    return Needs(held, generation, scoring | awake, largest | awake, at_start)


def engine_needs(config: Config, policy: ModelSize, width: int, card: int) -> dict[str, int]:
    """Counts bytes of generation: of vLLM its share of the `card`, of the model itself its rows' keys and values."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if rollout.name in SHARES:
        return {SHARES[rollout.name]: int(rollout.gpu_memory_utilization * card)}
    if rollout.name == "openai":  # a server has memory of its own
        return {}
    rows = min(-(-data.train_batch_size * rollout.n // shares_of_rows(config)), rollout.max_num_seqs)
    tokens = rows * rollout.response_length + -(-rows // rollout.n) * data.max_prompt_length  # a prompt once
    prefilled = min(rollout.max_num_batched_tokens, -(-rows // rollout.n) * data.max_prompt_length)
    drawn = rows * policy.vocabulary * (DRAWN if rollout.top_p == 1 else SORTED)
    share = Share.of(config, width)
    comes = share.workers > 1 or share.weights_away
    return {
        "whole weights": FLOAT32 * policy.parameters if comes else 0,
        # For a compiled step rows and prompts are rounded up to powers of two.
        "keys and values": tokens * policy.cached * width * (1 + (rollout.enforce_eager is False)),
        "cast weights": policy.copies(width) + (width * policy.head if width < FLOAT32 else 0),
        "prompts or draws": max(prefilled * (policy.activations(width) // policy.layers), drawn),
    }


def update_needs(size: ModelSize, role: ActorConfig | CriticConfig, config: Config, width: int) -> dict[str, int]:
    """Counts `ModelSize.update_bytes` of the largest micro-batch that `role` cuts."""
    prompts = role.ppo_mini_batch_size or config.data.train_batch_size
    sequences = None if cuts_by_tokens(role) else role.ppo_micro_batch_size_per_gpu
    tokens = pass_tokens(config, prompts, sequences, role.ppo_max_token_len_per_gpu)
    by_tiles = isinstance(role, CriticConfig) or is_by_tiles(config)
    share = Share.of(config, width)
    checkpointed = config.actor_rollout_ref.model.enable_gradient_checkpointing is not False  # null: on a GPU, as here
    parts = size.update_bytes(tokens, width, checkpointed, by_tiles, share.gathered if share.workers > 1 else 0)
    parts["gradients"] = 0 if share.weights_away and share.workers > 1 else parts["gradients"] // share.shards
    return {"whole weights": share.whole(size)} | parts


def scoring_needs(config: Config, policy: ModelSize, rm: ModelSize | None, width: int) -> list[dict[str, int]]:
    """Counts bytes of the passes without a backward: the policy's, the reference's, the reward model's."""
    judge, prompts = config.reward.reward_model, config.data.train_batch_size
    models = config.actor_rollout_ref

    def needs(size: ModelSize, weights: int, cast: int, sequences: int | None, most: int) -> dict[str, int]:
        tokens = pass_tokens(config, prompts, sequences, most)
        scored = size.scoring_bytes(tokens, width, is_by_tiles(config))
        return {"whole weights": weights, "cast weights": cast, "a pass": scored}

    share = Share.of(config, width)
    found = [needs(policy, share.whole(policy), share.copies(policy, width), *log_prob_sizes(models.rollout))]
    if "ref" in needed_roles(config):
        weights = share.whole(policy, policy.frozen(width) * models.ref.fsdp_config.param_offload)
        found.append(needs(policy, weights, 0, *log_prob_sizes(models.ref)))
    if rm:
        weights = replace(share, gathered=FLOAT32).whole(rm, rm.frozen(width) * judge.fsdp_config.param_offload)
        found.append(needs(rm, weights, 0, judge.micro_batch_size_per_gpu, judge.forward_max_token_len_per_gpu))
    return found


def log_prob_sizes(role: RolloutConfig | RefConfig) -> tuple[int | None, int]:
    return role.log_prob_micro_batch_size_per_gpu, role.log_prob_max_token_len_per_gpu


def pass_tokens(config: Config, prompts: int, sequences: int | None, most: int) -> int:
    """Counts the tokens of the largest micro-batch, of so many `sequences` or of `most` tokens, where a worker has its
    share of the responses to so many prompts."""
    longest = config.data.max_prompt_length + config.actor_rollout_ref.rollout.response_length
    rows = -(-prompts * config.actor_rollout_ref.rollout.n // shares_of_rows(config))
    return min(rows * longest, sequences * longest if sequences else most)


def shares_of_rows(config: Config) -> int:
    """Counts the shares that a batch is dealt out in: neighbours that compute layers together have the same rows."""
    return workers_asked_for(config.trainer) // config.actor_rollout_ref.actor.tensor_parallel_size


def is_by_tiles(config: Config) -> bool:
    """Says whether the logits of all tokens are never in memory at once."""
    model = config.actor_rollout_ref.model
    return model.use_remove_padding and model.kernels != "off"


def check_memory(needs: Needs, card: int) -> None:
    """Raises ConfigError where weights, gradients and moments alone are more than the `card` has, or do not fit beside
    an engine's share of it; a notice says so where the rest may not."""
    has = f"and the GPU has {card / GIB:.1f}"
    if needs.least > card:
        raise ConfigError(
            f"the weights in training, with gradients and AdamW's moments, and what is held beside them need "
            f"{needs.least / GIB:.1f} GiB of a GPU, {has}. Take a smaller actor_rollout_ref.model.path; without a "
            "reference (actor_rollout_ref.actor.use_kl_loss=false, algorithm.use_kl_in_reward=false) or a critic "
            "(algorithm.adv_estimator=grpo), or with AdamW's moments in main memory "
            "(actor_rollout_ref.actor.fsdp_config.optimizer_offload=true), it is less; so it is with more GPUs "
            "(trainer.n_gpus_per_node), among which models are shared out unless fsdp_config.fsdp_size says otherwise."
        )
    share = next((needs.generation[name] for name in SHARES.values() if name in needs.generation), 0)
    if share and (held := max(sum(needs.held.values()), needs.at_start)) + share > card:
        most = max(0, int(100 * (card - held) / card)) / 100
        raise ConfigError(
            f"actor_rollout_ref.rollout.gpu_memory_utilization asks for {share / GIB:.1f} GiB, beside {held / GIB:.1f} "
            f"GiB of weights and moments, {has}. Set it to {most:.2f} or less, or keep in main memory what generation "
            "does not need (actor_rollout_ref.actor.fsdp_config.optimizer_offload=true, param_offload=true, and "
            "actor_rollout_ref.ref.fsdp_config.param_offload=true)."
        )
    if needs.peak > card:
        notice(
            f"this may not fit: about {needs.peak / GIB:.1f} GiB are needed at once, {has}. An update needs less with "
            "a smaller actor_rollout_ref.actor.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu), and "
            "without actor_rollout_ref.model.enable_gradient_checkpointing=false; generation with a smaller "
            "actor_rollout_ref.rollout.max_num_seqs (hf) or actor_rollout_ref.rollout.gpu_memory_utilization (vllm); "
            "and both with actor_rollout_ref.actor.fsdp_config.optimizer_offload=true."
        )


def memory_report(config: Config) -> str | None:
    """Says in a line what the run needs of each GPU, and what this process's has: for workers, as it initialises it.
    None where they run on CPUs.

    Raises:
        ConfigError: it clearly does not fit; names the keys to turn.
    """
    device = training_device(config.trainer.n_gpus_per_node)
    if device.type == "cpu":
        return None
    card = torch.cuda.get_device_properties(device).total_memory
    sizes = model_sizes(config)
    needs = memory_needs(config, *sizes, width_of(config, device), card)
    check_memory(needs, card)
    copied = staged_bytes(config, *sizes[:2]) / GIB
    staged = f" A checkpoint that is being written takes {copied:.1f} of the first worker's main memory."
    return f"{needs}, of {card / GIB:.1f}." + staged * (copied > 0)


def staged_bytes(config: Config, policy: ModelSize, critic: ModelSize | None) -> int:
    """Counts bytes of the copy in main memory from which a checkpoint is written in the background: the first worker's
    shards and, for huggingface/, whole models; 0 where nothing is."""
    checkpoint, shards = config.actor_rollout_ref.actor.checkpoint, Share.of(config, FLOAT32).shards
    parts = config.actor_rollout_ref.actor.tensor_parallel_size
    total = 0
    for size, role in [(policy, config.actor_rollout_ref.actor), *([(critic, config.critic)] if critic else [])]:
        trained = size.split(parts).trained // shards
        moments = 2 * getattr(torch, role.optim.moments_dtype).itemsize * trained
        sizes = {"model": FLOAT32 * trained, "optimizer": moments, "hf_model": FLOAT32 * size.parameters}
        total += sum(sizes.get(part, 0) for part in checkpoint.save_contents)
    return total if checkpoint.async_save else 0


def model_sizes(config: Config) -> tuple[ModelSize, ModelSize | None, ModelSize | None]:
    """Measures the policy, and the critic and the reward model where there is one."""
    model, judge, roles = config.actor_rollout_ref.model, config.reward.reward_model.model, needed_roles(config)

    def size(settings: PretrainedModelConfig, path: str | None, key: str, auto_class: type) -> ModelSize:
        return ModelSize.of(load_model_config(settings, path, key), auto_class, settings.trust_remote_code)

    policy = size(model, model.path, "actor_rollout_ref.model.path", AutoModelForCausalLM).with_lora(lora_rank(model))
    critic = rm = None
    if "critic" in roles:
        critic = size(model, config.critic.model.path, "critic.model.path", AutoModelForTokenClassification)
    if "rm" in roles:
        rm = size(judge, judge.path, f"{RM_KEY}.path", AutoModelForSequenceClassification)
    return policy, critic, rm


def lora_rank(model: ModelConfig) -> int:
    if model.lora_adapter_path is None:
        return model.lora_rank
    return json.loads((find_path(model.lora_adapter_path) / "adapter_config.json").read_text())["r"]


def width_of(config: Config, device: torch.device) -> int:
    return compute_dtype(config.actor_rollout_ref.actor.fsdp_config.dtype, device).itemsize


def min_or_all(size: int, workers: int) -> int:
    return workers if size < 0 else min(size, workers)
