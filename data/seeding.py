"""One seed, many generators.

Every source of randomness of a run is derived from `trainer.seed` and a name such as ("order", epoch). A stage that
knows its name and step can remake its generator at any time, so no generator state has to be saved or restored, and
adding a generator changes no other one. Nothing here touches the global generators of torch, numpy or random.
"""

import hashlib
import json

import numpy as np
import torch


def derive_seed(seed: int, *names: str | int) -> int:
    """A seed in [0, 2**63) for the purpose `names`: the same in every process, machine and Python version.

    Different names (1 and "1", ("a", "b") and ("ab",)) give unrelated seeds.
    """
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def torch_generator(seed: int, *names: str | int, device: torch.device | str = "cpu") -> torch.Generator:
    """A torch generator on `device` for the purpose `names`, freshly seeded at each call."""
    return torch.Generator(device).manual_seed(derive_seed(seed, *names))


def numpy_generator(seed: int, *names: str | int) -> np.random.Generator:
    """A numpy generator for the purpose `names`, freshly seeded at each call."""
    return np.random.default_rng(derive_seed(seed, *names))
