"""Lists torch's operations that a piece of code runs."""

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from extras.kernels.products import HAS_ONEDNN

needs_onednn = pytest.mark.skipif(not HAS_ONEDNN, reason="no oneDNN for this CPU")


class Operations(TorchDispatchMode):
    """Counts the calls of each while this mode is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[str(function.overloadpacket)] += 1
        return function(*args, **(kwargs or {}))
