"""Estimates what a run needs of a GPU's memory before it starts: exact for weights, about for the rest.

Every worker holds whole models, those in training in float32, and computes in the run's precision. Counted are weights,
AdamW's two moments and gradients, but what is kept in main memory; while generating, keys and values, the weights that
autocast casts, and the distributions that are drawn from, or the share that vLLM is told to take; while updating, the
cast weights, what a micro-batch's forward keeps for its backward (the input of every matrix product and what is made of
its output, and of every norm its float32 input and result), and what the backward of the head or a layer takes beside;
while only scoring, one layer or the logits. Left out: what the allocator cannot use, and the block mask, which takes
0.3 GiB while it is made. `tests/fake_memory.py` counts what an update really takes: within 5 % for the shapes of
Qwen2.5, Qwen3, Llama, Phi-3 (fused projections), Mixtral and Qwen3-MoE (experts in one tensor).
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
from configs.schema import ActorConfig, Config, CriticConfig, PretrainedModelConfig, RefConfig, RolloutConfig
from data.chat import RM_KEY
from data.pretrained import load_model_config
from training.preparation import needed_roles
from workers.engine import compute_dtype
from workers.models import training_device

FLOAT32 = 4  # bytes
ADAMW = 2 * FLOAT32  # a weight's two moments
SHARES = {"vllm": "vLLM", "sglang": "SGLang"}  # engines that take gpu_memory_utilization of the card
TILES = 7 << 27  # bytes, of the token head's tiles (workers/kernels/token_head.py), whatever the batch
SCORED_TILES = 5 << 27  # without a backward
DRAWN = 4 * FLOAT32  # a number of a distribution that is drawn from
SORTED = 12 * FLOAT32  # and with top_p, which sorts it
LOGITS = 3 * FLOAT32  # without that head: the logits of a token, their softmax, and its gradient
GATES = ("gate_proj.weight", "gate_up_proj.weight")  # of which another tensor is made before the next product
FUSED = ("qkv_proj.weight", "gate_up_proj.weight")  # projections in one matrix
GIB = 1 << 30


@dataclass(frozen=True)
class Experts:
    """The experts of all layers, those of one in a tensor each, which autocast does not cast: they compute in float32.

    Args:
        kept: numbers that a backward needs of them, a token.
        outer, inner: numbers that go into the experts of a token in a layer, and that are between their products.
        stack: numbers in their largest tensor.
    """

    kept: int = 0
    outer: int = 0
    inner: int = 0
    stack: int = 0

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], hidden: int, chosen: int) -> "Experts":
        """Reads the sizes off the `weights` of a decoder whose router has `chosen` experts for a token."""
        stacks = {name: one.shape for name, one in weights.items() if one.ndim == 3 and "experts" in name}
        if not stacks:
            return cls()
        # Of what the gates open another tensor is made before the next product.
        opened = [shape[1:].numel() // hidden // 2 for name, shape in stacks.items() if name.endswith("gate_up_proj")]
        kept = sum(sum(shape[1:]) for shape in stacks.values()) + sum(opened)
        stack = max(shape.numel() for shape in stacks.values())
        return cls(chosen * kept, chosen * hidden, chosen * max(opened, default=0), stack)

    def backward_bytes(self, tokens: int) -> int:
        """Counts what the backward of a layer's experts takes beside what it gives back: at its first product, at the
        gradient of its last weight, or of its first."""
        inner, stack = tokens * self.inner, self.stack
        return FLOAT32 * max(3 * tokens * self.outer, stack // 2 + inner, stack - 2 * inner)


@dataclass(frozen=True)
class ModelSize:
    """The sizes in a model that take memory. Bytes are for products in `width` bytes a number: 2 is bfloat16.

    Args:
        parameters: their number; shared ones count once.
        layers: of the decoder.
        hidden: numbers in a token's hidden state.
        multiplied: numbers in the matrices of all layers, without experts.
        products: numbers that a backward needs of the matrix products of all layers, a token.
        widest: numbers that the largest of those products has of a token.
        norms: numbers that go through the norms of all layers, a token.
        cached: numbers in the keys and values of a token, all layers.
        vocabulary: numbers in a token's logits.
        head: numbers in the head over the vocabulary; 0: there is none.
        tied: whether the head is the embedding.
        experts: those of all layers, if they are not matrices of their own.
    """

    parameters: int
    layers: int
    hidden: int
    multiplied: int
    products: int
    widest: int
    norms: int
    cached: int
    vocabulary: int
    head: int
    tied: bool
    experts: "Experts" = Experts()

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
        table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
        named = [(name, weight) for name, weight in model.base_model.named_parameters() if weight is not table]
        inner = {name: weight for name, weight in named if weight.ndim > 1}
        plain = [(name, weight.shape) for name, weight in inner.items() if weight.ndim == 2]
        # The sum of two outputs a layer and its hidden states is all that is kept of them, and counted as a norm's.
        products = sum(map(sum, dict(plain).values())) - 2 * text.num_hidden_layers * text.hidden_size
        gates = sum(shape[0] // (1 + ("up" in name)) for name, shape in plain if name.endswith(GATES))
        # Queries and keys are made anew of a fused product, which the values, a view of it, keep whole; and what
        # attention makes of them is there twice.
        views = sum(shape[0] - key_heads * head_size + shape[1] for name, shape in plain if name.endswith(FUSED[0]))
        heads = {"q_norm.weight": text.num_attention_heads, "k_norm.weight": key_heads}  # that share a norm

        def times(name: str, norm: torch.Tensor) -> int:
            shared = next((number for end, number in heads.items() if name.endswith(end)), 1)
            return shared if norm.numel() == head_size else 1

        return cls(
            parameters=sum(weight.numel() for weight in model.parameters()),
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            multiplied=sum(shape.numel() for _, shape in plain),
            products=products + gates + views,
            widest=max(max(shape[0] // (1 + name.endswith(FUSED)), shape[1]) for name, shape in plain),
            norms=sum(
                weight.numel() * times(name, weight)
                for name, weight in named
                if weight.ndim == 1 and name.endswith("weight")
            ),
            cached=2 * text.num_hidden_layers * key_heads * head_size,
            vocabulary=text.vocab_size,
            head=0 if head is None else head.weight.numel(),
            tied=head is not None and head.weight is table,
            experts=Experts.of(inner, text.hidden_size, values.get("num_experts_per_tok") or 1),
        )

    def activations(self, width: int) -> int:
        """Counts bytes a token that a forward keeps for its backward."""
        return self.products * width + (2 * self.norms + self.experts.kept) * FLOAT32

    def copies(self, width: int) -> int:
        """Counts bytes of the layers' weights as autocast casts them."""
        return width * self.multiplied if width < FLOAT32 else 0

    def frozen(self, width: int) -> int:
        """Counts bytes of weights that only score: matrices are in the compute precision (workers/models.py)."""
        cast = self.multiplied + (0 if self.tied else self.head)
        return FLOAT32 * (self.parameters - cast) + width * cast

    def update_bytes(self, tokens: int, width: int, checkpointed: bool, by_tiles: bool) -> dict[str, int]:
        """Counts the bytes that a forward and backward of a micro-batch takes, with the gradients that it adds to.

        Args:
            checkpointed: the forward keeps hidden states, and the backward computes each layer once more.
            by_tiles: the logits of all tokens are never in memory at once.
        """
        logits = TILES if by_tiles else LOGITS * self.vocabulary * tokens
        head = (FLOAT32 * self.head + logits) if self.head else 0  # its gradient of this micro-batch
        # That of the embedding comes last; where it is the head, the head's has waited for it, and their sum is made.
        embedding = FLOAT32 * self.vocabulary * self.hidden * (3 if self.tied else 1)
        layer, cast = self.activations(width) // self.layers, self.copies(width)
        experts = self.experts.backward_bytes(tokens)
        if checkpointed:
            kept, cast_now = tokens * (self.layers + 2) * self.hidden * FLOAT32, cast // self.layers
            products = max(tokens * self.widest * width, experts)
            again = tokens * layer + products + cast_now + FLOAT32 * self.head * self.tied
            cast, backward = 0, max(head, again, embedding - kept)
        else:
            kept = tokens * layer * self.layers
            backward = max(head, experts, embedding - kept - cast)
        return {
            "gradients": FLOAT32 * self.parameters,
            "cast weights": cast,
            "activations": kept,
            "backward of a part": backward,
        }

    def scoring_bytes(self, tokens: int, width: int, by_tiles: bool) -> int:
        """Counts the bytes that a forward of a micro-batch without a backward takes, beside cast weights."""
        hidden = FLOAT32 * tokens * self.hidden
        logits = SCORED_TILES if by_tiles else LOGITS * self.vocabulary * tokens
        layer = tokens * max(3 * width * self.widest, 4 * FLOAT32 * self.experts.outer)
        return max(hidden + (logits if self.head else 0), 4 * hidden + layer)


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
        return sum(self.held.values()) + self.update.get("weights", 0) + self.update["gradients"]

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


def memory_needs(
    config: Config, policy: ModelSize, critic: ModelSize | None, rm: ModelSize | None, width: int, card: int
) -> Needs:
    """Counts what a worker needs of a GPU of `card` bytes; `width` is the bytes of a number that it computes with."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    comes, moments = actor.fsdp_config.param_offload, 0 if actor.fsdp_config.optimizer_offload else ADAMW
    held = {
        "weights": 0 if comes else FLOAT32 * policy.parameters,
        "AdamW": moments * policy.parameters,
        "critic": (moments + (0 if comes else FLOAT32)) * critic.parameters if critic else 0,
    }
    offloads = config.actor_rollout_ref.ref.fsdp_config, config.reward.reward_model.fsdp_config
    scored = {"reference": policy if "ref" in needed_roles(config) else None, "reward model": rm}
    for (name, size), offload in zip(scored.items(), offloads, strict=True):
        held[name] = size.frozen(width) if size and not offload.param_offload else 0
    generation = engine_needs(config, policy, width, card)
    asleep = rollout.name not in SHARES or rollout.free_cache_engine
    trained = [(policy, actor), *([(critic, config.critic)] if critic else [])]
    updates = [
        ({"weights": FLOAT32 * size.parameters} if comes else {}) | update_needs(size, role, config, width)
        for size, role in trained
    ]
    largest = max(updates, key=lambda parts: sum(parts.values()))
    without_moments = sum(held.values()) - moments * sum(size.parameters for size, _ in trained)
    at_start = without_moments + (FLOAT32 * policy.parameters if comes else 0)
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
    rows = min(-(-data.train_batch_size * rollout.n // workers_asked_for(config.trainer)), rollout.max_num_seqs)
    tokens = rows * rollout.response_length + -(-rows // rollout.n) * data.max_prompt_length  # a prompt once
    prefilled = min(rollout.max_num_batched_tokens, -(-rows // rollout.n) * data.max_prompt_length)
    drawn = rows * policy.vocabulary * (DRAWN if rollout.top_p == 1 else SORTED)
    comes = config.actor_rollout_ref.actor.fsdp_config.param_offload
    return {
        "weights": FLOAT32 * policy.parameters if comes else 0,
        "keys and values": tokens * policy.cached * width,
        "cast weights": policy.copies(width) + (width * policy.head if width < FLOAT32 else 0),
        "prompts or draws": max(prefilled * (policy.activations(width) // policy.layers), drawn),
    }


def update_needs(size: ModelSize, role: ActorConfig | CriticConfig, config: Config, width: int) -> dict[str, int]:
    """Counts `ModelSize.update_bytes` of the largest micro-batch that `role` cuts."""
    prompts = role.ppo_mini_batch_size or config.data.train_batch_size
    sequences = None if cuts_by_tokens(role) else role.ppo_micro_batch_size_per_gpu
    tokens = pass_tokens(config, prompts, sequences, role.ppo_max_token_len_per_gpu)
    by_tiles = isinstance(role, CriticConfig) or is_by_tiles(config)
    return size.update_bytes(tokens, width, config.actor_rollout_ref.model.enable_gradient_checkpointing, by_tiles)


def scoring_needs(config: Config, policy: ModelSize, rm: ModelSize | None, width: int) -> list[dict[str, int]]:
    """Counts bytes of the passes without a backward: the policy's, the reference's, the reward model's."""
    judge, prompts = config.reward.reward_model, config.data.train_batch_size
    models = config.actor_rollout_ref

    def needs(size: ModelSize, weights: int, cast: int, sequences: int | None, most: int) -> dict[str, int]:
        tokens = pass_tokens(config, prompts, sequences, most)
        scored = size.scoring_bytes(tokens, width, is_by_tiles(config))
        return {"weights": weights, "cast weights": cast, "a pass": scored}

    weights = FLOAT32 * policy.parameters if models.actor.fsdp_config.param_offload else 0
    found = [needs(policy, weights, policy.copies(width), *log_prob_sizes(models.rollout))]
    if "ref" in needed_roles(config):
        weights = policy.frozen(width) if models.ref.fsdp_config.param_offload else 0
        found.append(needs(policy, weights, 0, *log_prob_sizes(models.ref)))
    if rm:
        weights = rm.frozen(width) if judge.fsdp_config.param_offload else 0
        found.append(needs(rm, weights, 0, judge.micro_batch_size_per_gpu, judge.forward_max_token_len_per_gpu))
    return found


def log_prob_sizes(role: RolloutConfig | RefConfig) -> tuple[int | None, int]:
    return role.log_prob_micro_batch_size_per_gpu, role.log_prob_max_token_len_per_gpu


def pass_tokens(config: Config, prompts: int, sequences: int | None, most: int) -> int:
    """Counts the tokens of the largest micro-batch, of so many `sequences` or of `most` tokens, where a worker has its
    share of the responses to so many prompts."""
    longest = config.data.max_prompt_length + config.actor_rollout_ref.rollout.response_length
    rows = -(-prompts * config.actor_rollout_ref.rollout.n // workers_asked_for(config.trainer))
    return min(rows * longest, sequences * longest if sequences else most)


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
            "(actor_rollout_ref.actor.fsdp_config.optimizer_offload=true), it is less. Every worker holds whole "
            "models, so more GPUs do not help."
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
            "a smaller actor_rollout_ref.actor.ppo_max_token_len_per_gpu (or ppo_micro_batch_size_per_gpu), and with "
            "actor_rollout_ref.model.enable_gradient_checkpointing=true; generation with a smaller "
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
