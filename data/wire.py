"""Writes the tensors of a batch in few bytes, to be pickled and sent to workers, and reads them, equal to the bit.

Neither padding is sent nor what follows from another column; integers are as narrow as they fit (tests/wire_bytes.py).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
NARROWER = (np.uint8, np.uint16, np.int32)
FOLLOWING = {  # columns of data/padding.py: from which others, and how, by their width
    "prompts": ("input_ids", lambda ids, width: ids[..., :width]),
    "responses": ("input_ids", lambda ids, width: ids[..., ids.shape[-1] - width :]),
    "position_ids": ("attention_mask", lambda mask, width: positions(mask)),
}


def positions(attention_mask: Tensor) -> Tensor:
    """Numbers the tokens of each row from 0."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def pack(tensors: Mapping[str, Tensor]) -> dict[str, tuple]:
    """Returns the state of each column; of one that follows from another its width."""
    columns = {name: tensor.cpu() for name, tensor in tensors.items()}
    return {name: (c.shape[-1],) if follows(name, columns) else pack_tensor(c) for name, c in columns.items()}


def unpack(states: Mapping[str, tuple]) -> dict[str, Tensor]:
    """Makes the columns again, on the CPU: this process may not have the device that they were on."""
    columns = {name: unpack_tensor(*state) for name, state in states.items() if len(state) > 1}
    for name in states.keys() - columns.keys():
        source, make = FOLLOWING[name]
        columns[name] = make(columns[source], *states[name])
    return {name: columns[name] for name in states}


def follows(name: str, columns: Mapping[str, Tensor]) -> bool:
    source, make = FOLLOWING.get(name, ("", None))
    if source not in columns or not columns[name].ndim == columns[source].ndim > 0:
        return False
    column, expected = columns[name], make(columns[source], columns[name].shape[-1])
    return column.dtype == expected.dtype == torch.int64 and torch.equal(column, expected)


def pack_tensor(tensor: Tensor) -> tuple:
    """Returns dtype, shape, where numbers are not the padding, these, as integers (if all are equal, one), and the
    padding. Without numbers, or integers of their size: dtype, shape, bytes, as in files of earlier versions."""
    column, facts = tensor.cpu().contiguous(), (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    if not column.numel() or column.itemsize not in INTEGERS:
        return *facts, column.view(-1).view(torch.uint8).numpy()
    bits = torch.atleast_1d(column.view(INTEGERS[column.itemsize]))
    padding = bits[..., -1].flatten().mode().values.item()
    is_number = bits.view(-1).numpy() != padding
    numbers = bits.view(-1).numpy()[is_number]
    low, high = numbers.min(initial=padding), numbers.max(initial=padding)
    holds = (kind for kind in NARROWER if np.iinfo(kind).min <= low and high <= np.iinfo(kind).max)
    sent = numbers[:1] if (numbers == numbers[:1]).all() else numbers
    return *facts, np.packbits(is_number), sent.astype(next(holds, sent.dtype)), padding


def unpack_tensor(name: str, shape: tuple, content: np.ndarray, *numbers_and_padding: Any) -> Tensor:
    """Makes a tensor of its own memory: Ray's buffers are shared and read-only."""
    tensor = torch.empty(shape, dtype=getattr(torch, name))
    if not numbers_and_padding:
        tensor.view(-1).view(torch.uint8).numpy()[:] = content
        return tensor
    numbers, padding = numbers_and_padding
    flat = tensor.view(INTEGERS[tensor.itemsize]).view(-1).fill_(padding).numpy()
    flat[np.unpackbits(content, count=len(flat)).view(bool)] = numbers
    return tensor
