"""Shared by all tests: a tiny model, made once."""

import configs.process  # noqa: F401  isort: skip  before torch

from pathlib import Path

import pytest
import torch

from custom.tiny_model import save_tiny_model

torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: character tokenizer, random Llama of one narrow layer."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, seed=0, hidden_size=32, layers=1)
    return folder
