"""Derives any number of independent generators from one seed.

Every source of randomness is derived from `trainer.seed` and a name such as ("order", epoch): no state has to be saved,
and adding a generator changes no other. The global generators are for what users' code draws.
"""

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """Returns a seed in [0, 2**63) for the purpose `names`: the same in every process, machine and Python version.

    Different names (1 and "1", ("a", "b") and ("ab",)) give unrelated seeds.
    """
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def torch_generator(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a torch generator on `device` for the purpose `names`, freshly seeded at each call."""
    return torch.Generator(device).manual_seed(derive_seed(seed, *names))


def numpy_generator(seed: int, *names: str | int) -> np.random.Generator:
    """Returns a numpy generator for the purpose `names`, freshly seeded at each call."""
    return np.random.default_rng(derive_seed(seed, *names))


def seed_everything(seed: int) -> None:
    """Seeds the global generators of python, numpy and torch."""
    random.seed(derive_seed(seed, "python"))
    np.random.seed(derive_seed(seed, "numpy") % 2**32)
    torch.manual_seed(derive_seed(seed, "torch"))


@contextmanager
def forked_rng(seed: int) -> Iterator[None]:
    """Seeds the global generators for the body, and then restores them: users' code draws the same behind Ray."""
    state = rng_state()
    seed_everything(seed)
    try:
        yield
    finally:
        set_rng_state(state)


def rng_state() -> dict[str, Any]:
    """Returns the state of this process's global generators, in plain types."""
    name, keys, *position = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *position),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """Puts the global generators into a state that `rng_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
