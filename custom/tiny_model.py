"""A language model small enough to train in minutes on a laptop, made here: python -m custom.tiny_model DIR

A character-level tokenizer with a chat template, and a Llama of about 0.8 million parameters with random weights, as
an ordinary Hugging Face directory: everything that takes a model path takes this one.
"""

from configs.process import end_on_interrupt  # isort: skip

import argparse
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

logging.disable_progress_bar()

SPECIALS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>"]
ALPHABET = string.digits + string.ascii_letters + string.punctuation + " \n"

# One special token opens a message and one ends it: a prompt costs little more than its characters.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token a character of printable ASCII; anything else is <|unknown|>."""
    vocabulary = {token: index for index, token in enumerate(SPECIALS + list(ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern="", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        additional_special_tokens=SPECIALS[2:5],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, hidden_size: int = 128, layers: int = 4
) -> LlamaForCausalLM:
    """Builds a Llama with random weights, fixed by `seed`; 0.8 million parameters as it stands."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=0.06,  # with the usual 0.02 a model this narrow learns slowly and gets stuck
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def save_tiny_model(folder: str | Path, seed: int = 0, hidden_size: int = 128, layers: int = 4) -> None:
    """Writes model and tokenizer to `folder`, to be loaded with from_pretrained."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed, hidden_size, layers).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where to write the model")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (%(default)s)")
    parser.add_argument("--hidden-size", type=int, default=128, help="width, a multiple of 8 (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="number of layers (%(default)s)")
    arguments = parser.parse_args()
    end_on_interrupt()
    if arguments.hidden_size < 8 or arguments.hidden_size % 8 or arguments.layers < 1:
        parser.error("--hidden-size must be a multiple of 8, and --layers at least 1")
    try:
        Path(arguments.folder).mkdir(parents=True, exist_ok=True)  # save_pretrained would log that it cannot, and go on
    except OSError as error:
        parser.error(f"{arguments.folder}: no folder for the model can be made there: {error.strerror}")
    save_tiny_model(arguments.folder, arguments.seed, arguments.hidden_size, arguments.layers)
    print(f"wrote a model and its tokenizer to {arguments.folder}")


if __name__ == "__main__":
    main()
