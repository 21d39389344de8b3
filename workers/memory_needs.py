"""Estimates what a run needs of a GPU's memory before it starts: exact for weights, about for the rest.

Every worker holds whole models in float32 and computes in the run's precision. Counted are weights, AdamW's two moments
and gradients; while generating, keys and values, or the share that vLLM is told to take; while updating, the copies of
the weights that autocast makes, and what a micro-batch's forward keeps for its backward: the input and the output of
every matrix product, and of every norm its float32 input and result. Left out: what the allocator cannot use.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
)

from configs.checks import cuts_by_tokens
from configs.errors import ConfigError, notice
from configs.loader import workers_asked_for
from configs.schema import ActorConfig, Config, CriticConfig, PretrainedModelConfig
from data.chat import RM_KEY
from data.pretrained import load_model_config
from training.preparation import needed_roles
from workers.engine import compute_dtype
from workers.models import training_device

FLOAT32 = 4  # bytes
ADAMW = 2 * FLOAT32  # a weight's two moments
SHARES = {"vllm": "vLLM", "sglang": "SGLang"}  # engines that take gpu_memory_utilization of the card
HEAD = 1 << 30  # bytes, of the token head's tiles and sums: a bound, whatever the batch
LOGITS = 3 * FLOAT32  # without that head: the logits of a token, their softmax, and its gradient
GIB = 1 << 30


@dataclass(frozen=True)
class ModelSize:
    """The sizes in a model that take memory. Bytes are for products in `width` bytes a number: 2 is bfloat16.

    Args:
        parameters: their number; shared ones count once.
        layers: of the decoder.
        hidden: numbers in a token's hidden state.
        matrices: numbers that go into and come out of the matrix products of all layers, a token.
        norms: numbers that go through the norms of all layers, a token.
        cached: numbers in the keys and values of a token, all layers.
        vocabulary: numbers in a token's logits.
    """

    parameters: int
    layers: int
    hidden: int
    matrices: int
    norms: int
    cached: int
    vocabulary: int

    @classmethod
    def of(
        cls, config: PretrainedConfig, auto_class: type = AutoModelForCausalLM, trust_remote_code: bool = False
    ) -> "ModelSize":
        """Reads the sizes off a model of this `config` whose weights are not in memory."""
        with torch.device("meta"):
            model = auto_class.from_config(config, trust_remote_code=trust_remote_code)
        text = config.get_text_config()
        values = text.to_dict()
        head_size = values.get("head_dim") or text.hidden_size // text.num_attention_heads
        key_heads = values.get("num_key_value_heads") or text.num_attention_heads
        tables = {id(model.get_input_embeddings().weight)}
        inner = [weight for weight in model.base_model.parameters() if id(weight) not in tables]
        named = [(name, weight) for name, weight in model.base_model.named_parameters() if name.endswith("weight")]
        return cls(
            parameters=sum(weight.numel() for weight in model.parameters()),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            matrices=sum(sum(weight.shape) for weight in inner if weight.ndim == 2),
            norms=sum(weight.numel() for _, weight in named if weight.ndim == 1),
            cached=2 * text.num_hidden_layers * key_heads * head_size,
            vocabulary=text.vocab_size,
        )

    def activations(self, width: int, checkpointed: bool) -> int:
        """Counts bytes a token that a forward keeps for its backward; `checkpointed`: hidden states and one layer's."""
        whole = self.matrices * width + 2 * self.norms * FLOAT32
        return self.layers * self.hidden * FLOAT32 + whole // self.layers if checkpointed else whole


@dataclass(frozen=True)
class Needs:
    """Bytes of a GPU, by what they are for: those held throughout, and those of either phase."""

    held: Mapping[str, int]
    generation: Mapping[str, int]
    update: Mapping[str, int]

    @property
    def least(self) -> int:
        """Bytes that no setting of sizes changes: the weights in training with their gradients, and what is held."""
        return sum(self.held.values()) + self.update["gradients"]

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + max(sum(self.generation.values()), sum(self.update.values()))

    def __str__(self) -> str:
        phases = (("held", self.held), ("generating", self.generation), ("updating", self.update))
        parts = "; ".join(f"{phase} {join_sizes(parts)}" for phase, parts in phases)
        return f"a GPU's memory in GiB, about: {parts}; at most {self.peak / GIB:.1f} at once"


def join_sizes(parts: Mapping[str, int]) -> str:
    return " + ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size) or "nothing"


def memory_needs(
    config: Config, policy: ModelSize, critic: ModelSize | None, rm: ModelSize | None, width: int, card: int
) -> Needs:
    """Counts what a worker needs of a GPU of `card` bytes; `width` is the bytes of a number that it computes with."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    held = {
        "weights": FLOAT32 * policy.parameters,
        "AdamW": ADAMW * policy.parameters,
        "reference": FLOAT32 * policy.parameters if "ref" in needed_roles(config) else 0,
        "critic": (FLOAT32 + ADAMW) * critic.parameters if critic else 0,
        "reward model": FLOAT32 * rm.parameters if rm else 0,
    }
    generation = engine_needs(config, policy, width, card)
    asleep = rollout.name not in SHARES or rollout.free_cache_engine
    updates = [update_needs(policy, actor, config, width)]
    if critic:
        updates.append(update_needs(critic, config.critic, config, width))
    largest = max(updates, key=lambda parts: sum(parts.values()))
    return Needs(held, generation, largest | ({} if asleep else generation))


def engine_needs(config: Config, policy: ModelSize, width: int, card: int) -> dict[str, int]:
    """Counts bytes of generation: of vLLM its share of the `card`, of the model itself its rows' keys and values."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    if rollout.name in SHARES:
        return {SHARES[rollout.name]: int(rollout.gpu_memory_utilization * card)}
    if rollout.name == "openai":  # a server has memory of its own
        return {}
    rows = min(-(-data.train_batch_size * rollout.n // workers_asked_for(config.trainer)), rollout.max_num_seqs)
    tokens = rows * rollout.response_length + -(-rows // rollout.n) * data.max_prompt_length  # a prompt once
    return {"keys and values": tokens * policy.cached * width}


def update_needs(size: ModelSize, role: ActorConfig | CriticConfig, config: Config, width: int) -> dict[str, int]:
    """Counts the bytes that one forward and backward of a micro-batch takes, with the gradients that it adds to."""
    longest = config.data.max_prompt_length + config.actor_rollout_ref.rollout.response_length
    prompts = role.ppo_mini_batch_size or config.data.train_batch_size
    rows = -(-prompts * config.actor_rollout_ref.rollout.n // workers_asked_for(config.trainer))
    cut = role.ppo_max_token_len_per_gpu if cuts_by_tokens(role) else role.ppo_micro_batch_size_per_gpu * longest
    tokens = min(rows * longest, cut)
    model = config.actor_rollout_ref.model
    by_tiles = isinstance(role, CriticConfig) or (model.use_remove_padding and model.kernels != "off")
    return {
        "gradients": FLOAT32 * size.parameters,
        "copies of weights": width * size.parameters if width < FLOAT32 else 0,
        "activations": tokens * size.activations(width, model.enable_gradient_checkpointing),
        "logits": HEAD if by_tiles else LOGITS * size.vocabulary * tokens,
    }


def check_memory(needs: Needs, card: int) -> None:
    """Raises ConfigError where weights, gradients and moments alone are more than the `card` has; a notice says so
    where the rest may be."""
    has = f"and the GPU has {card / GIB:.1f}"
    if needs.least > card:
        raise ConfigError(
            f"the weights in training, with gradients and AdamW's moments, and what is held beside them need "
            f"{needs.least / GIB:.1f} GiB of a GPU, {has}. Take a smaller actor_rollout_ref.model.path; without a "
            "reference (actor_rollout_ref.actor.use_kl_loss=false, algorithm.use_kl_in_reward=false) or a critic "
            "(algorithm.adv_estimator=grpo) it is less. Every worker holds whole models, so more GPUs do not help."
        )
    if needs.peak > card:
        notice(
            f"this may not fit: about {needs.peak / GIB:.1f} GiB are needed at once, {has}. An update needs less with "
            "a smaller actor_rollout_ref.actor.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu), and with "
            "actor_rollout_ref.model.enable_gradient_checkpointing=true; generation with a smaller "
            "actor_rollout_ref.rollout.max_num_seqs (hf) or actor_rollout_ref.rollout.gpu_memory_utilization (vllm)."
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
    needs = memory_needs(config, *model_sizes(config), width_of(config, device), card)
    check_memory(needs, card)
    return f"{needs}, of {card / GIB:.1f}."


def model_sizes(config: Config) -> tuple[ModelSize, ModelSize | None, ModelSize | None]:
    """Measures the policy, and the critic and the reward model where there is one."""
    model, judge, roles = config.actor_rollout_ref.model, config.reward.reward_model.model, needed_roles(config)

    def size(settings: PretrainedModelConfig, path: str | None, key: str, auto_class: type) -> ModelSize:
        return ModelSize.of(load_model_config(settings, path, key), auto_class, settings.trust_remote_code)

    policy = size(model, model.path, "actor_rollout_ref.model.path", AutoModelForCausalLM)
    critic = rm = None
    if "critic" in roles:
        critic = size(model, config.critic.model.path, "critic.model.path", AutoModelForTokenClassification)
    if "rm" in roles:
        rm = size(judge, judge.path, f"{RM_KEY}.path", AutoModelForSequenceClassification)
    return policy, critic, rm


def width_of(config: Config, device: torch.device) -> int:
    return compute_dtype(config.actor_rollout_ref.actor.fsdp_config.dtype, device).itemsize
