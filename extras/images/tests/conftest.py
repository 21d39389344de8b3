"""Tiny models of each family, and rows with images for them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from extras.images.tiny_model import FAMILIES, save_tiny_model

MERGED = "merged"  # a Qwen2.5-VL in which four patches are a token


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each family, by its name."""
    root = tmp_path_factory.mktemp("vision")
    for family in FAMILIES:
        save_tiny_model(root / family, family)
    save_tiny_model(root / MERGED, "qwen2_5_vl", merge=2)
    return {family: root / family for family in (*FAMILIES, MERGED)}


def picture(seed: int, height: int = 16, width: int = 16) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def row(text: str, *pictures: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], "images": list(pictures)}


ROWS = [  # two prompts of one text and other images; two images of two sizes; none
    row("<image>how many?", picture(0)),
    row("<image>how many?", picture(1)),
    row("a <image> and <image>: same?", picture(2, 16, 24), picture(0)),
    row("1+1="),
]
