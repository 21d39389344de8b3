"""Models that read images, small enough for a laptop, made here: python -m extras.images.tiny_model DIR --family F

Qwen2-VL, Qwen2.5-VL or Idefics3 of about 0.9 million parameters with random weights, the tokenizer of
custom/tiny_model.py with their special tokens, and an image processor of patches of 4×4 pixels: an image of 16×16 is 16
tokens. All as an ordinary Hugging Face directory.
"""

from configs.process import end_on_interrupt  # isort: skip

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from configs.import_utils import load_extern_object

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "idefics3")
PATCH, SIDE = 4, 16  # pixels
OF_QWEN = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
OF_IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
CHAT_TEMPLATE = (
    "{%% for message in messages %%}{{ '<|' + message['role'] + '|>' }}"
    "{%% if message['content'] is string %%}{{ message['content'] }}{%% else %%}"
    "{%% for part in message['content'] %%}{%% if part['type'] == 'image' %%}{{ '%s' }}"
    "{%% else %%}{{ part['text'] }}{%% endif %%}{%% endfor %%}{%% endif %%}{{ '<|end|>' }}{%% endfor %%}"
    "{%% if add_generation_prompt %%}{{ '<|assistant|>' }}{%% endif %%}"
)


def save_tiny_model(folder: str | Path, family: str = "qwen2_vl", seed: int = 0, merge: int = 1) -> None:
    """Writes model, tokenizer and image processor to `folder`. Of Qwen's, `merge`² patches are a token."""
    is_qwen = family.startswith("qwen")
    tokenizer = load_extern_object("custom/tiny_model.py", "build_tokenizer", "")()
    specials = OF_QWEN if is_qwen else OF_IDEFICS
    tokenizer.add_special_tokens({"additional_special_tokens": specials}, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE % ("".join(OF_QWEN[i] for i in (0, 2, 1)) if is_qwen else "<image>")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_qwen(tokenizer, family, merge) if is_qwen else build_idefics(tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if is_qwen:
        size = {"shortest_edge": SIDE, "longest_edge": 1 << 12}
        Qwen2VLImageProcessorPil(
            patch_size=PATCH, merge_size=merge, temporal_patch_size=merge, size=size, do_resize=False
        ).save_pretrained(folder)
    else:
        size = {"longest_edge": SIDE}
        images = Idefics3ImageProcessorPil(do_image_splitting=False, size=size, max_image_size=size)
        images.save_pretrained(folder)
        Idefics3Processor(images, tokenizer, (SIDE // PATCH) ** 2).save_pretrained(folder)


def of_text(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Returns the settings of the language model, as custom/tiny_model.py has them."""
    return {
        "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 341, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 2048,
        "tie_word_embeddings": True, "initializer_range": 0.06, "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip


def build_qwen(tokenizer: PreTrainedTokenizerFast, family: str, merge: int) -> PreTrainedModel:
    start, end, image, video = tokenizer.convert_tokens_to_ids(OF_QWEN)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    tower = {"depth": 2, "num_heads": 4, "patch_size": PATCH}
    tower |= {"spatial_merge_size": merge, "temporal_patch_size": merge}
    settings = {
        "text_config": of_text(tokenizer) | {"rope_parameters": rope}, "image_token_id": image, "video_token_id": video,
        "vision_start_token_id": start, "vision_end_token_id": end, "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    if family == "qwen2_vl":
        settings["vision_config"] = tower | {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}
        return Qwen2VLForConditionalGeneration(Qwen2VLConfig(**settings))
    windows = {"out_hidden_size": 128, "window_size": 2 * merge * PATCH, "fullatt_block_indexes": [1]}
    settings["vision_config"] = tower | {"hidden_size": 64, "intermediate_size": 128, **windows}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**settings))


def build_idefics(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    config = Idefics3Config(
        scale_factor=1,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        vision_config={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": SIDE, "patch_size": PATCH,
        },
        text_config=of_text(tokenizer) | {"model_type": "llama"},
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    return Idefics3ForConditionalGeneration(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="where to write the model")
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (%(default)s)")
    arguments = parser.parse_args()
    end_on_interrupt()
    save_tiny_model(arguments.folder, arguments.family, arguments.seed)
    print(f"wrote a model, its tokenizer and its image processor to {arguments.folder}")


if __name__ == "__main__":
    main()
