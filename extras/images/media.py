"""Reads the images of a row, and says what they are among the tokens of its prompt.

A prompt has an `<image>` for each image of its row, in verl's form: text, or `{"type": "image"}` parts. The chat
template writes one placeholder for each; the tokens that the model reads in its place are its expansion. Ids are
expanded everywhere here, so that lengths are true; an engine that expands by itself is given `Media.collapse`.
"""

import hashlib
import io
import reprlib
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from configs.paths import find_path
from data.types import Message

MARK = "<image>"  # of an image in a text
BASE64 = "data:image/"  # how such a URL begins
SMALL = 64  # pixels a side, of pictures in a report


@dataclass(frozen=True, eq=False)
class Shown:
    """An image as a model reads it.

    Attributes:
        picture: for engines that process it themselves.
        tensors: what the model's processor made of it.
        expansion: its token ids in a prompt, of which `tokens` are pads that its features replace.
        grid: rows and columns of its features, for models that have positions in three dimensions.
    """

    picture: Image.Image
    tensors: dict[str, torch.Tensor]
    expansion: tuple[int, ...]
    tokens: int
    grid: tuple[int, int] | None = None

    @cached_property
    def key(self) -> str:
        """A hash of its pixels: equal pictures are one image."""
        pixels = self.picture.tobytes()
        return hashlib.sha256(repr((self.picture.size, self.picture.mode)).encode() + pixels).hexdigest()

    @property
    def shift(self) -> int:
        """Returns by how much the image shifts the positions behind it, compared with a count of tokens."""
        return 0 if self.grid is None else max(self.grid) - self.tokens


@dataclass(frozen=True, eq=False)
class Media:
    """The images of a prompt in their order, maybe none; compared and hashed by what they show."""

    images: tuple[Shown, ...] = ()
    placeholder: int = -1  # the token id that stands for an image before it is expanded
    _key: tuple[str, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_key", tuple(image.key for image in self.images))

    def __bool__(self) -> bool:
        return bool(self.images)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Media) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @cached_property
    def shift(self) -> int:
        """Returns by how much the images shift the positions behind the prompt, compared with a count of tokens."""
        return sum(image.shift for image in self.images)

    def thumbnails(self, ids: Sequence[int]) -> list[tuple[int, int, str]]:
        """Lists where an image stands in a prompt, by how many tokens, and a small picture of it as a data URL."""
        thumbnails, position = [], 0
        for image in self.images:
            first = ids.index(self.placeholder, position)
            position = first + image.tokens
            thumbnails.append((first, ids[first:position].count(self.placeholder), thumbnail(image.picture)))
        return thumbnails

    def expand(self, ids: Sequence[int]) -> list[int]:
        """Puts each image's expansion in place of its placeholder.

        Raises:
            ValueError: the prompt has more of them than images, or fewer.
        """
        count = list(ids).count(self.placeholder)
        if count != len(self.images):
            raise ValueError(f"the chat template writes {count} images, and the row has {len(self.images)}.")
        images, expanded = iter(self.images), []
        for token in ids:
            expanded += next(images).expansion if token == self.placeholder else (token,)
        return expanded

    def for_engine(self, ids: Sequence[int]) -> dict[str, Any]:
        """Returns the prompt of an engine that processes pictures, and expands their placeholders, itself."""
        pictures = [image.picture for image in self.images]
        return {"prompt_token_ids": self.collapse(ids), "multi_modal_data": {"image": pictures}}

    def collapse(self, ids: Sequence[int]) -> list[int]:
        """Puts a placeholder in place of each image's expansion, where it comes first: undoes `expand`."""
        collapsed, position, images = [], 0, list(self.images)
        while position < len(ids):
            expansion = images[0].expansion if images else ()
            if expansion and tuple(ids[position : position + len(expansion)]) == expansion:
                collapsed.append(self.placeholder)
                position += len(images.pop(0).expansion)
            else:
                collapsed.append(ids[position])
                position += 1
        assert not images, "the ids lack images of their prompt"
        return collapsed


def read_image(value: Any, name: str = "an image") -> Image.Image:
    """Reads an image of a row: a picture, pixels, bytes, a path, a data URL, or a dictionary of one of these under
    bytes, image, path or url.

    Raises:
        ValueError: it is none of these, or cannot be read; names it.
    """
    try:
        match unpack(value):
            case Image.Image() as picture:
                return picture.convert("RGB")
            case np.ndarray() as pixels:
                return Image.fromarray(pixels).convert("RGB")
            case str(text) if text.startswith(BASE64):
                return open_image(b64decode(text.partition(",")[2], validate=True))
            case str(text) if text.startswith("file://"):
                return open_image(Path(text.removeprefix("file://")).read_bytes())
            case str() | Path() as path:
                return open_image(find_path(path).read_bytes())
            case bytes() | bytearray() as content:
                return open_image(bytes(content))
    except (OSError, NotBase64, TypeError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read ({type(error).__name__}: {error}).") from error
    raise ValueError(f"{name} is {reprlib.repr(value)}: give bytes, a picture of PIL, a path, or a dictionary of one.")


def unpack(value: Any) -> Any:
    """Returns what a dictionary holds an image in; of a row in JSON, bytes are base64."""
    if not isinstance(value, Mapping):
        return value
    content = value.get("bytes")
    if content is None:
        return next((value[name] for name in ("image", "path", "url") if value.get(name) is not None), None)
    return b64decode(content, validate=True) if isinstance(content, str) else content


def thumbnail(picture: Image.Image) -> str:
    """Returns a picture of at most SMALL pixels a side as a data URL."""
    small, file = picture.copy(), io.BytesIO()
    small.thumbnail((SMALL, SMALL))
    small.save(file, "PNG", optimize=True)
    return f"{BASE64}png;base64,{b64encode(file.getvalue()).decode()}"


def open_image(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def read_images(value: Any, key: str) -> list[Image.Image]:
    """Reads the images of a row, from its column `key`: a list of them, one, or nothing."""
    if value is None:
        return []
    listed = list(value) if isinstance(value, list | tuple) else [value]
    if isinstance(value, np.ndarray) and value.dtype == object:
        listed = value.tolist()
    return [read_image(image, f"{key}[{number}]") for number, image in enumerate(listed)]


def with_parts(messages: Sequence[Message]) -> list[Message]:
    """Returns chat messages whose texts have a part for each `<image>` in them; texts without one stay texts."""
    return [{**message, "content": as_parts(message.get("content"))} for message in messages]


def as_parts(content: Any) -> Any:
    if isinstance(content, str) and MARK in content:
        first, *rest = content.split(MARK)
        texts = [[{"type": "image"}, {"type": "text", "text": text}] for text in rest]
        parts = [{"type": "text", "text": first}, *(part for pair in texts for part in pair)]
        return [part for part in parts if part["type"] == "image" or part["text"]]
    if isinstance(content, list):
        return [{"type": "image"} if is_image(part) else part for part in content]
    return content


def is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url")


def count_images(messages: Sequence[Message]) -> int:
    """Counts the images that messages with parts ask for."""
    contents = [message.get("content") for message in messages]
    return sum(is_image(part) for content in contents if isinstance(content, list) for part in content)
