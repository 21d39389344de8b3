"""Shared by all tests: the environment of a command, and a tiny model, made once."""

from pathlib import Path

import pytest

from configs.process import set_environment


def pytest_configure() -> None:
    set_environment()  # before torch is loaded
    import torch

    torch.set_num_threads(2)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: character tokenizer, random Llama of one narrow layer."""
    from custom.tiny_model import save_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, seed=0, hidden_size=32, layers=1)
    return folder


@pytest.fixture(scope="session")
def wide_headed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with two layers and heads of 32 numbers, the narrowest that vLLM takes."""
    from custom.tiny_model import save_tiny_model

    folder = tmp_path_factory.mktemp("models") / "wide_headed"
    save_tiny_model(folder, seed=0, hidden_size=128, layers=2)
    return folder
