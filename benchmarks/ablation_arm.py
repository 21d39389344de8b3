"""An arm of benchmarks/ablation.py: benchmarks/ours_arm.py without one kernel, which is the first of its own arguments.

Leaving one out means to patch what `workers/kernels/` does: there is a setting for all of them, none for each.
"""

from configs.process import set_environment

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import gc
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import ours_arm
from workers import kernels, scoring_model
from workers.kernels import decode, memory, packed_forward, products, ragged


def nothing(*_: Any, **__: Any) -> None:
    """Stands in for what is left out."""


def plain_head(
    hidden, weight, labels, *, bias=None, temperature=1.0, softcap=None, with_entropy=False, with_sum_pi_squared=False
):
    """The scores of labels from whole logits, which autograd takes apart."""
    logits = products.linear(hidden, weight, bias) / temperature
    log_pi = logits.log_softmax(-1)
    entropy = -(log_pi.exp() * log_pi).sum(-1) if with_entropy else None
    return log_pi.gather(1, labels[:, None])[:, 0], entropy, None


def leave_out(module: Any, name: str, instead: Any) -> Callable[[], None]:
    return lambda: setattr(module, name, instead)


# name → what makes a process go without it
KERNELS = {
    "oneDNN products": leave_out(products, "HAS_ONEDNN", False),
    "backward of RMSNorm": leave_out(kernels, "use_fast_norms", nothing),
    "weights packed for decoding": leave_out(decode, "is_packable", lambda layer: False),
    "prompts read once in decoding": leave_out(decode, "is_packed", lambda model: False),
    "packed forward": leave_out(scoring_model.Trial, "problem", lambda trial: "left out"),
    "attention by blocks": leave_out(ragged, "BLOCK", 1 << 30),
    "token head": leave_out(packed_forward, "score_tokens", plain_head),
    "kept memory": leave_out(memory, "IS_GLIBC", False),
    "frozen collector": leave_out(gc, "freeze", nothing),
}


def main() -> None:
    kernel = sys.argv.pop(2)
    if kernel:
        KERNELS[kernel]()
    ours_arm.main()


if __name__ == "__main__":
    main()
