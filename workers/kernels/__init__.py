"""Makes a CPU or a GPU faster, and does nothing else: it may be left out (`actor_rollout_ref.model.kernels=off`).

Other packages import nothing of it but the functions named here. Classes are exchanged, hooks set and functions
registered with transformers in here alone, and only when `prepare` or `start_process` is called.
"""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from workers.kernels.decode import decoding, lay_out_weights, register_row_attention
from workers.kernels.memory import give_back_memory, start_process
from workers.kernels.norms import use_fast_norms
from workers.kernels.packed_attention import known_padding, packed_scores, use_packed_attention
from workers.kernels.products import use_onednn
from workers.micro_batches import TokenScores

__all__ = ["decoding", "give_back_memory", "known_padding", "lay_out_weights", "prepare", "start_process"]


def prepare(model: PreTrainedModel, device: torch.device) -> Callable[..., TokenScores]:
    """Makes `model`, which is on `device`, faster: on a CPU by other layers in the place of its own, of the same names
    and weights, and everywhere by an attention that takes packed micro-batches and is SDPA for all others.

    Returns:
        The packed forward, (model, micro, temperature, ask) → TokenScores. Whether it does what the padded one does
        depends on the model, and the caller has to try; where it does not, the attention is to be set back.
    """
    if device.type == "cpu":
        use_onednn(model)
        use_fast_norms(model)
    register_row_attention()
    use_packed_attention(model)
    return packed_scores
