"""Reads images for models of some families: what the tokens of an image are, and what features take their place.

A family is named in configs/extras.py by the model_type of its models. The class has `reader`, for rows, and an object
of it is a loaded model's `vision`, which every forward with images asks for its inputs. Images are read once for all
rows that show them, and their features go in place of pads by their order, in prompts alone: the policy cannot say a
pad, as a bias of its head forbids it, in training, scoring and generation alike.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from data.chat import Prompt
from data.padding import PromptIds
from data.wire import positions
from extras.images.media import Media, Shown, count_images, read_images, with_parts

FORBIDDEN = -1e4  # added to the logit of a pad
LEAST_BIAS = -100.0  # that vLLM takes
OF_QWEN = ("pixel_values", "image_grid_thw")  # what its processor makes of an image
MEDIA_TOKENS = ("image_token_id", "video_token_id", "audio_token_id")  # in configs: pads


class Reader:
    """Reads the images of rows, and expands the ids of their prompts; `tokenizer.images` of a model with images.

    Args:
        folder: the model's, with the files of its image processor.
    """

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.config = json.loads((folder / "config.json").read_text())
        self.placeholder = self.config["image_token_id"]
        tokenizer.save_pretrained = self.save_pretrained

    def read(self, picture: Image.Image) -> Shown:
        """Processes an image."""
        raise NotImplementedError

    def media(self, images: Any, key: str) -> Media:
        """Reads what a row has in its column `key`; raises ValueError for what is no image."""
        return Media(tuple(map(self.read, read_images(images, key))), self.placeholder)

    def encode(self, prompt: Prompt, images: Any, key: str, encode: Callable[[Prompt], list[int]]) -> PromptIds:
        """Encodes the prompt of a row, by `encode`, with the `images` that its column `key` has.

        Raises:
            ValueError: there are more images than the prompt shows, or fewer; or one cannot be read.
        """
        media = self.media(images, key)
        messages = prompt if isinstance(prompt, str) else with_parts(prompt)
        count = 0 if isinstance(prompt, str) else count_images(messages)
        if count != len(media.images):
            raise ValueError(
                f"the prompt has {count} <image> in chat messages, and {key} has {len(media.images)}: "
                "each image has its place."
            )
        return PromptIds(media.expand(encode(messages if media else prompt)), media)

    def with_images(self, ids: Sequence[int], media: Media | None, images: Any) -> PromptIds:
        """Returns the expanded ids of a prompt with its media, or else with the images of its row."""
        if media is None:
            media = self.media(images, "images")
        if (pads := list(ids).count(self.placeholder)) != (tokens := sum(image.tokens for image in media.images)):
            raise ValueError(f"the row's own ids have {pads} tokens of images, and its images have {tokens}.")
        return PromptIds(ids, media)

    def save_pretrained(self, folder: Path) -> None:
        """Writes the tokenizer's and the processor's files, so that the folder is a model as others load it."""
        type(self.tokenizer).save_pretrained(self.tokenizer, folder)
        for name in ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"):
            if (self.folder / name).is_file():
                (Path(folder) / name).write_bytes((self.folder / name).read_bytes())


class Vision:
    """The inputs of a loaded model for prompts with images.

    Attributes:
        pads: token ids that stand for media, which the policy cannot say.
    """

    reader: ClassVar[type[Reader]]

    def __init__(self, model: PreTrainedModel) -> None:
        self.model, self.pad = model, model.config.image_token_id
        self.pads = sorted({vars(model.config).get(name) for name in MEDIA_TOKENS} - {None})
        forbid(model.get_output_embeddings(), self.pads)

    def features(self, images: Sequence[Shown]) -> list[Tensor]:
        """Computes what takes the place of each image's pads: [tokens, d] each."""
        raise NotImplementedError

    def places(self, ids: Tensor, base: Tensor, media: Sequence[Media | None]) -> Tensor:
        """Returns the positions of tokens, by `base` [b, w], where they are among the real ones."""
        return base

    def inputs(
        self, ids: Tensor, mask: Tensor, media: Sequence[Media | None], new: slice = slice(None)
    ) -> dict[str, Tensor | None]:
        """Returns the inputs of the columns `new` of rows [b, w] whose prompts show `media`."""
        is_pad = self.first_pads(ids, media)
        is_new = is_pad[:, new]
        numbers = (is_pad.flatten().cumsum(0).view(is_pad.shape) - 1)[:, new][is_new]  # of the pads, in all rows
        features = self.per_pad(media)[numbers] if len(numbers) else None
        embedded = self.fill(ids[:, new], is_new, features)
        places = self.places(ids, positions(mask), media)
        return {"inputs_embeds": embedded, "position_ids": places[..., new]}

    def packed_inputs(self, packed: Any) -> dict[str, Tensor | None]:
        """Returns the inputs of a packed row, whose prompts show `packed.media`."""
        ids, lengths = packed.input_ids, packed.prompts.lengths.tolist()
        prompts = ids[: packed.prompts.total].split(lengths)
        padded = nn.utils.rnn.pad_sequence(prompts, True, padding_value=-1)
        base = torch.arange(padded.shape[1], device=ids.device).expand(len(prompts), -1)
        is_pad = torch.zeros_like(ids, dtype=torch.bool)
        is_prompt = padded >= 0
        is_pad[: packed.prompts.total] = self.first_pads(padded, packed.media)[is_prompt]
        places = self.places(padded, base, packed.media)[..., is_prompt]
        shifts = torch.tensor([shown.shift for shown in packed.media], device=ids.device)[packed.prompt_of_row]
        behind = packed.position_ids[packed.prompts.total :] + packed.responses.each(shifts)
        places = torch.cat([places, behind.expand(*places.shape[:-1], -1)], dim=-1)
        embedded = self.fill(ids, is_pad, self.per_pad(packed.media))
        return {"inputs_embeds": embedded.unsqueeze(0), "position_ids": places.unsqueeze(-2)}

    def first_pads(self, ids: Tensor, media: Sequence[Media | None]) -> Tensor:
        """Marks the pads of each row's images, [b, w] bool; further ones, of another engine, are tokens like others."""
        is_pad = ids == self.pad
        counts = [sum(image.tokens for image in shown.images) if shown else 0 for shown in media]
        return is_pad & (is_pad.cumsum(-1) <= torch.tensor(counts, device=ids.device)[:, None])

    def per_pad(self, media: Sequence[Media | None]) -> Tensor:
        """Computes each distinct image once, and lays its features out for all pads in order: [pads, d]."""
        distinct = {image.key: image for shown in media if shown for image in shown.images}
        computed = dict(zip(distinct, self.features([*distinct.values()]), strict=True))
        return torch.cat([computed[image.key] for shown in media if shown for image in shown.images])

    def fill(self, ids: Tensor, is_pad: Tensor, features: Tensor | None) -> Tensor:
        """Embeds `ids`, with features in place of pads, if there are any."""
        embedded = self.model.get_input_embeddings()(ids)
        if features is None:
            return embedded
        return embedded.masked_scatter(is_pad.unsqueeze(-1), features.to(embedded.dtype))

    def sampling(self) -> dict[str, Any]:
        """Returns arguments of vllm.SamplingParams by which no pad is drawn."""
        return {"logit_bias": dict.fromkeys(self.pads, LEAST_BIAS)}

    def check_read(self, ids: Sequence[int], read: Sequence[int]) -> None:
        """Raises ValueError if an engine has read other tokens than `ids`, those of the trainer."""
        if list(read) != list(ids):
            raise ValueError(
                f"the engine expands the images of a prompt to {len(read)} tokens, and the trainer to {len(ids)}: its "
                "processor is another one."
            )

    def freeze(self) -> None:
        """Takes the weights that read images out of training."""
        for name, weight in self.model.named_parameters():
            if name.startswith(self.tower):
                weight.requires_grad_(False)


def forbid(head: nn.Linear, tokens: Sequence[int]) -> None:
    """Gives a head without a bias one that no token of these survives, which is trained and saved by nobody."""
    assert head.bias is None, "the head of a model that reads images has no bias"
    bias = torch.zeros(len(head.weight), device=head.weight.device)
    bias[tokens] = FORBIDDEN
    del head.bias
    head.register_buffer("bias", bias, persistent=False)


class QwenReader(Reader):
    """Reads images for Qwen2-VL and Qwen2.5-VL, whose processor itself would need torchvision."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(folder, tokenizer)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder)

    def read(self, picture: Image.Image) -> Shown:
        encoded = self.processor(images=[picture], return_tensors="pt")
        time, *cells = encoded["image_grid_thw"][0].tolist()
        rows, columns = (count // self.processor.merge_size for count in cells)
        tokens, tensors = time * rows * columns, {name: encoded[name] for name in OF_QWEN}
        return Shown(picture, tensors, (self.placeholder,) * tokens, tokens, (rows, columns))


class Qwen2VL(Vision):
    """Qwen2-VL and Qwen2.5-VL: positions have three dimensions, and behind an image go on from its longer side."""

    reader = QwenReader
    tower = "model.visual."

    def features(self, images: Sequence[Shown]) -> list[Tensor]:
        device = self.model.device
        pixels, grids = (torch.cat([image.tensors[name] for image in images]).to(device) for name in OF_QWEN)
        return [*self.model.model.get_image_features(pixels, grids).pooler_output]

    def places(self, ids: Tensor, base: Tensor, media: Sequence[Media | None]) -> Tensor:
        places = base.expand(3, *base.shape).clone()
        is_pad = self.first_pads(ids, media)
        for row, shown in enumerate(media):
            columns = is_pad[row].nonzero()[:, 0].tolist() if shown else []
            for image in shown.images if shown else ():
                width = image.grid[1]
                first, columns = columns[0], columns[image.tokens :]
                cells = torch.arange(image.tokens, device=ids.device)
                inside = slice(first, first + image.tokens)
                start = places[0, row, first].clone()
                places[:, row, inside] = start + torch.stack([cells * 0, cells // width, cells % width])
                places[:, row, inside.stop :] += image.shift
        return places


class Idefics3Reader(Reader):
    """Reads images for Idefics3 and SmolVLM's predecessors, by their own processor."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__(folder, tokenizer)
        length = json.loads((folder / "processor_config.json").read_text()).get("image_seq_len", 169)
        self.processor = Idefics3Processor(Idefics3ImageProcessorPil.from_pretrained(folder), tokenizer, length)

    def read(self, picture: Image.Image) -> Shown:
        text = self.processor.image_token
        encoded = self.processor(images=[[picture]], text=[text], add_special_tokens=False, return_tensors="pt")
        expansion = tuple(encoded["input_ids"][0].tolist())
        tensors = {name: encoded[name] for name in ("pixel_values", "pixel_attention_mask")}
        return Shown(picture, tensors, expansion, expansion.count(self.placeholder))


class Idefics3(Vision):
    """Idefics3: positions are plain, and an image may be several crops."""

    reader = Idefics3Reader
    tower = ("model.vision_model.", "model.connector.")

    def features(self, images: Sequence[Shown]) -> list[Tensor]:
        device, result = self.model.device, []
        for image in images:
            tensors = (image.tensors[name].to(device) for name in ("pixel_values", "pixel_attention_mask"))
            result.append(self.model.model.get_image_features(*tensors).pooler_output.flatten(0, 1))
        return result


for kind, model_class in (  # transformers lists them among models of images and texts alone
    (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    (Idefics3Config, Idefics3ForConditionalGeneration),
):
    AutoModelForCausalLM.register(kind, model_class, exist_ok=True)
