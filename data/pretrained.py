"""Reads a model's config.json and its tokenizer, and checks them before its weights are loaded.

`ModelSize` says what its parts take in memory: workers/memory_needs.py adds them up for a run. An update keeps what a
micro-batch's forward leaves for its backward (the input of every matrix product and what is made of its output, and of
every norm its float32 input and result), the weights that autocast casts, and what the backward of the head or a layer
takes beside. `tests/fake_memory.py` counts what it really takes: within 5 % for the shapes of Qwen2.5,
Qwen3, Llama, Phi-3 (fused projections), Mixtral and Qwen3-MoE (experts in one tensor).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from jinja2 import TemplateError, TemplateSyntaxError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from configs.errors import first_line
from configs.paths import find_path
from configs.schema import PretrainedModelConfig

POSITIONS = ("max_position_embeddings", "max_seq_len")  # what a config calls the number of its positions
FLOAT32 = 4  # bytes
TILES = 7 << 27  # bytes, of the token head's tiles (extras/kernels/token_head.py), whatever the batch
SCORED_TILES = 5 << 27  # without a backward
LOGITS = 3 * FLOAT32  # without that head: the logits of a token, their softmax, and its gradient
GATES = ("gate_proj.weight", "gate_up_proj.weight")  # of which another tensor is made before the next product
FUSED = ("qkv_proj.weight", "gate_up_proj.weight")  # projections in one matrix
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def load_model_config(model: PretrainedModelConfig, path: str | None, key: str) -> PretrainedConfig:
    """The config of the model at `path`, which the setting `key` names, with `model.override_config`.

    Raises:
        ValueError: there is no model there, or transformers does not know its kind; names the key.
    """
    folder = check_model_path(path, key)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(f"{key}={path}: its config.json cannot be read ({first_line(error)}).") from error
    config.update(model.override_config)
    return config


def position_count(config: PretrainedConfig) -> int | None:
    """Returns the number of positions a model of this `config` was made for; None: it does not say."""
    values = config.to_dict()
    found = [values.get(config.attribute_map.get(name, name)) for name in POSITIONS]
    return next((count for count in found if count), None)


def check_positions(config: PretrainedConfig, longest: int, model_key: str, length_keys: str) -> None:
    """Raises ValueError if sequences of `longest` tokens, which the settings `length_keys` allow, have more positions
    than the model that `model_key` names was made for."""
    positions = position_count(config.get_text_config())
    if positions is not None and longest > positions:
        raise ValueError(
            f"{length_keys} allow sequences of {longest} tokens, and the model of {model_key} was made for {positions} "
            "positions (its config.json says so): lower the lengths, or choose a model for longer texts."
        )


def check_is_decoder(config: PretrainedConfig, model_key: str) -> None:
    """Raises ValueError unless transformers has the model that `model_key` names as one that writes on from a text."""
    if not is_known(config, MODEL_FOR_CAUSAL_LM_MAPPING, "AutoModelForCausalLM"):
        raise ValueError(
            f"{model_key}: transformers has no {config.model_type} that continues a text (AutoModelForCausalLM): "
            "choose a decoder-only language model (docs/models.md)."
        )


def check_has_value_head(config: PretrainedConfig, model_key: str) -> None:
    """Raises ValueError unless transformers has the model that `model_key` names with a head of one number a token."""
    if not is_known(config, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, "AutoModelForTokenClassification"):
        raise ValueError(
            f"{model_key}: transformers has no {config.model_type} with a value a token "
            "(AutoModelForTokenClassification), so it cannot be a critic: choose an algorithm.adv_estimator "
            "without one (grpo, rloo, reinforce_plus_plus), or another model with the same tokenizer as critic."
        )


def check_is_reward_model(config: PretrainedConfig, model_key: str) -> None:
    """Raises ValueError unless transformers has the model that `model_key` names with one number a sequence."""
    if not is_known(config, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "AutoModelForSequenceClassification"):
        raise ValueError(
            f"{model_key}: transformers has no {config.model_type} with a score a sequence "
            "(AutoModelForSequenceClassification), so it cannot be a reward model: choose another kind of model."
        )
    if config.num_labels != 1:
        raise ValueError(
            f"{model_key}: the model has {config.num_labels} outputs a sequence (its config.json says so), and a "
            "reward model has one: give one that was trained with num_labels=1."
        )


def is_known(config: PretrainedConfig, models: dict[type, type], auto_class: str) -> bool:
    """Whether there is a model of this `config` among `models`, or in code of its own folder."""
    own = config.to_dict().get("auto_map") or {}
    return type(config) in models or auto_class in own


def check_model_path(path: str | None, key: str) -> str:
    """`path` if a model can be there: a folder with a config.json, or something that can be a hub name.

    Raises:
        ValueError: not set, no such folder, or a folder without config.json; names the key and the remedy.
    """
    remedy = (
        "Give a folder written by save_pretrained; `python -m custom.tiny_model DIR` makes a small one to try with, "
        "`make quickstart` makes outputs/quickstart/warm_start."
    )
    if not path:
        raise ValueError(f"{key} is not set. {remedy}")
    folder = find_path(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            places = ("", "actor/", "global_step_*/", "global_step_*/actor/")  # of a checkpoint, and of a run
            found = [file for place in places for file in folder.glob(f"{place}huggingface/config.json")]
            if found:
                remedy = f"It holds one: {max(found, key=lambda file: file.stat().st_mtime).parent}"
            raise ValueError(f"{key}={path}: the folder has no config.json, so it is not a model. {remedy}")
        return str(folder)
    if folder.is_absolute() or path.startswith((".", "~")) or not HUB_NAME.fullmatch(path) or folder.parent.is_dir():
        raise ValueError(f"{key}={path}: there is no such folder (looked in {Path.cwd()}). {remedy}")
    return path


def load_tokenizer(model: PretrainedModelConfig, section: str = "actor_rollout_ref.model") -> PreTrainedTokenizerBase:
    """The tokenizer of the model that the config's `section` describes, with a pad token and its chat template.

    Raises:
        ValueError: it cannot be loaded, or has no token to end a response with; names the key and the remedy.
    """
    key = f"{section}.path" if model.tokenizer_path is None else f"{section}.tokenizer_path"
    path = model.tokenizer_path or check_model_path(model.path, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(find_path(path)), trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"{key}={path}: no tokenizer can be loaded from there ({first_line(error)}). Give a folder with the files "
            f"of tokenizer.save_pretrained: the model's own, or {section}.tokenizer_path."
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{key}={path}: the tokenizer has no eos_token, so no response would end: save one with it.")
    tokenizer.chat_template = model.custom_chat_template or tokenizer.chat_template
    check_template(tokenizer, f"{section}.custom_chat_template" if model.custom_chat_template else f"{key}={path}")
    return as_users_read(tokenizer)


def check_template(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Raises ValueError for a chat template that jinja cannot read; `source` is where it is from."""
    if not tokenizer.chat_template:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ValueError(f"{source}: line {error.lineno} of the chat template is no jinja: {error.message}.") from error
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
        return  # this conversation is none for it, and others may be


def as_users_read(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Gives a tokenizer a pad token, and templates that return a list of ids, as transformers' did before 5."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token  # padding is known by masks, so any id will do
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, return_dict=False)
    return tokenizer


def template_terminator(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token right after an assistant's message in the chat template, if there is one."""
    if not tokenizer.chat_template:
        return None
    marker = "answer-0417"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": marker}]
    _, rendered, tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(marker)
    if not rendered:  # the template leaves an assistant's turns out
        return None
    ids = tokenizer.encode(tail, add_special_tokens=False)
    return ids[0] if ids and ids[0] in tokenizer.all_special_ids else None


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


def numbers_in_layers(model: PreTrainedModel) -> int:
    """Counts the numbers in the weights of the decoder's layers."""
    from transformers.modeling_layers import GradientCheckpointingLayer  # a second, and only needed here

    layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
    return sum(weight.numel() for layer in layers for weight in layer.parameters())


@dataclass(frozen=True)
class ModelSize:
    """The sizes in a model that take memory. Bytes are for products in `width` bytes a number: 2 is bfloat16.

    Args:
        parameters: their number; shared ones count once.
        trained: those that are learnt.
        layers: of the decoder.
        layered: numbers in the weights of all layers; the others are gathered with the root.
        hidden: numbers in a token's hidden state.
        multiplied: numbers in the matrices of all layers, without experts.
        products: numbers that a backward needs of the matrix products of all layers, a token.
        widest: numbers that the largest of those products has of a token.
        norms: numbers that go through the norms of all layers, a token.
        cached: numbers in the keys and values of a token, all layers.
        sides: numbers that go into the matrices of all layers and that come out of them, a token.
        vocabulary: numbers in a token's logits.
        head: numbers in the head over the vocabulary; 0: there is none.
        tied: whether the head is the embedding.
        experts: those of all layers, if they are not matrices of their own.
    """

    parameters: int
    trained: int
    layers: int
    layered: int
    hidden: int
    multiplied: int
    products: int
    widest: int
    norms: int
    cached: int
    sides: int
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
        sides = sum(map(sum, dict(plain).values()))
        products = sides - 2 * text.num_hidden_layers * text.hidden_size
        gates = sum(shape[0] // (1 + ("up" in name)) for name, shape in plain if name.endswith(GATES))
        # Queries and keys are made anew of a fused product, which the values, a view of it, keep whole; and what
        # attention makes of them is there twice.
        views = sum(shape[0] - key_heads * head_size + shape[1] for name, shape in plain if name.endswith(FUSED[0]))
        heads = {"q_norm.weight": text.num_attention_heads, "k_norm.weight": key_heads}  # that share a norm

        def times(name: str, norm: torch.Tensor) -> int:
            shared = next((number for end, number in heads.items() if name.endswith(end)), 1)
            return shared if norm.numel() == head_size else 1

        parameters = sum(weight.numel() for weight in model.parameters())
        return cls(
            parameters=parameters,
            trained=parameters,
            layers=text.num_hidden_layers,
            layered=numbers_in_layers(model),
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
            sides=sides,
            vocabulary=text.vocab_size,
            head=0 if head is None else head.weight.numel(),
            tied=head is not None and head.weight is table,
            experts=Experts.of(inner, text.hidden_size, values.get("num_experts_per_tok") or 1),
        )

    def with_lora(self, rank: int) -> "ModelSize":
        """Adds LoRA's matrices beside all of the layers', to be learnt alone; rank 0: none."""
        added = rank * self.sides
        return replace(
            self, parameters=self.parameters + added, layered=self.layered + added, trained=added or self.trained
        )

    def split(self, parts: int) -> "ModelSize":
        """Returns the size of what each of so many neighbours has whose layers are split, and a head that is no
        embedding; activations are counted as whole, as those between layers are."""
        head = self.head if self.tied else self.head // parts
        rest, layered = self.parameters - self.layered - self.head + head, self.layered // parts
        added = self.trained if self.trained < self.parameters else 0
        return replace(
            self,
            parameters=rest + layered,
            layered=layered,
            trained=added // parts or rest + layered,
            multiplied=self.multiplied // parts,
            head=head,
            cached=self.cached // parts,
        )

    @property
    def learns_head(self) -> bool:
        return self.trained == self.parameters

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

    def gathered_bytes(self, reshards: bool, gathered: int) -> int:
        """Counts bytes of weights that are whole while a sharded model computes, `gathered` a number: all that is in no
        layer, and of the layers one at work and one to come; all, unless it `reshards` after their forward."""
        layered = 2 * self.layered // self.layers if reshards else self.layered
        return gathered * (self.parameters - self.layered + layered)

    def update_bytes(
        self, tokens: int, width: int, checkpointed: bool, by_tiles: bool, gathered: int = 0
    ) -> dict[str, int]:
        """Counts the bytes that a forward and backward of a micro-batch takes, with the gradients that it adds to.

        Args:
            checkpointed: the forward keeps hidden states, and the backward computes each layer once more.
            by_tiles: the logits of all tokens are never in memory at once.
            gathered: bytes of a number in the weights of a sharded model where they are whole, and in their gradients
                until they are summed over ranks: a layer's while the next one's are computed, those of head and
                embedding to the end, where no weights are whole and the sum takes float32 beside; 0: it is not sharded.
        """
        logits = TILES if by_tiles else LOGITS * self.vocabulary * tokens
        gradient = FLOAT32 * self.head * self.learns_head  # of this micro-batch
        head = (gradient + logits) if self.head else 0
        # That of the embedding comes last; where it is the head, the head's has waited for it, and their sum is made.
        # Of a gathered one in bfloat16 it is made in float32.
        is_low = 0 < gathered < FLOAT32
        embedding = FLOAT32 + (1 + self.tied) * gathered if is_low else FLOAT32 * (3 if self.tied else 1)
        embedding *= self.vocabulary * self.hidden * self.learns_head
        layer, cast = self.activations(width) // self.layers, 0 if is_low else self.copies(width)
        experts = self.experts.backward_bytes(tokens)
        waiting, of_layer, summed, ends = gradient * self.tied, 0, 0, embedding
        if gathered:
            numbers = min(self.layered, self.trained) // self.layers
            waiting, of_layer, summed = gradient * gathered // FLOAT32, gathered * numbers, FLOAT32 * numbers
            rest = (gathered + FLOAT32) * (self.trained - self.layered)
            ends = max(embedding, rest - self.gathered_bytes(True, gathered))
        if checkpointed:
            kept, cast_now = tokens * (self.layers + 2) * self.hidden * FLOAT32, cast // self.layers
            products = max(tokens * self.widest * width, experts)
            again = tokens * layer + products + cast_now + waiting + of_layer + summed
            cast, backward = 0, max(head, again, ends - kept)
        else:
            kept = tokens * layer * self.layers
            backward = max(head, experts + (waiting + of_layer) * bool(gathered), ends - kept - cast)
        return {
            "gradients": FLOAT32 * self.trained,
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
