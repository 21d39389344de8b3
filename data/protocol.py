"""Defines `DataProto`, which passes between the stages of a step: B rows under named columns.

Tensors live in `batch` (a TensorDict), everything else in `non_tensor_batch` (numpy arrays, mostly of dtype object),
and what holds for the whole batch in `meta_info`. Names and semantics are verl's. Whatever moves rows (slicing,
repeating, reordering, padding, mini-batches) is one gather, `_take`, over both kinds of columns.

Verl's methods that the project does not call, such as `chunk`, are found in extras/verl/compat.py.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from os import PathLike
from types import MethodType
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDict

from configs.extras import has
from configs.import_utils import find
from data.files import replacing
from data.wire import pack, unpack

Column = torch.Tensor | np.ndarray
Indices = Sequence[int] | Sequence[bool] | torch.Tensor | np.ndarray
Keys = Iterable[str] | None
AUTO_PADDING = "_verl_auto_padding"  # in meta_info of a batch that may be cut into pieces of unequal size


class ObjectColumn(np.ndarray):
    """An object column as it is read: true if it has rows, like a list. Results, as of ==, are numpy's plain arrays."""

    def __bool__(self) -> bool:
        return self.size > 0 if self.dtype == object else super().__bool__()

    def __array_wrap__(self, result: np.ndarray, context: Any = None, return_scalar: bool = False) -> Any:
        return result[()] if return_scalar else result


@dataclass(eq=False)
class _Columns:
    """The three fields of a batch, or of one row of it: columns read as attributes, and pickling."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor columns, in a dict of their own."""
        return {} if self.batch is None else dict(self.batch.items())

    @property
    def device(self) -> torch.device:
        """The device of the tensors; without tensors, the CPU."""
        return next((tensor.device for tensor in self.tensors.values()), torch.device("cpu"))

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the column called `name`, or `default`. Where both kinds have the name, it is the object column: a
        reward reads texts as data.responses, and their token ids as data.batch["responses"].
        """
        column = self.non_tensor_batch.get(name, self.tensors.get(name, default))
        is_objects = isinstance(column, np.ndarray) and column.dtype == object
        return column.view(ObjectColumn) if is_objects else column

    def __contains__(self, name: str) -> bool:
        return name in self.tensors or name in self.non_tensor_batch

    def __getattr__(self, name: str) -> Any:
        """Returns a column, as in `data.responses`: Python asks here for whatever is neither a field nor a method."""
        if "meta_info" not in vars(self):  # half built, by copy or pickle: no columns to look into yet
            raise AttributeError(name)
        if name in self:
            return self.get(name)
        if has("optional", method := f"DataProto.{name}"):
            return MethodType(find("optional", method), self)
        raise AttributeError(f"no column {name!r}; there are {[*self.tensors, *self.non_tensor_batch]}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:  # the next slice would lose it
            raise AttributeError(f"columns are written as data.batch[{name!r}] = tensor, objects in non_tensor_batch")
        super().__setattr__(name, value)

    def __getstate__(self) -> tuple:
        batch = None if self.batch is None else (self.batch.batch_size, pack(self.tensors))
        return batch, self.non_tensor_batch, self.meta_info

    def __setstate__(self, state: tuple) -> None:
        batch, self.non_tensor_batch, self.meta_info = state
        if batch is not None:
            size, states = batch
            batch = TensorDict(unpack(states), batch_size=size)
        self.batch = batch


class DataProtoItem(_Columns):
    """One row of a `DataProto`: tensors without the batch dimension, plain elements, the parent's meta_info."""


@dataclass(eq=False)
class DataProto(_Columns):
    """B rows of named columns: tensors [B, ...], arrays [B, ...], and meta_info.

    Slices, chunks and repeats share meta_info with their parent: they do not copy it.
    """

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    def check_consistency(self) -> None:
        """Asserts one batch dimension, and in every column as many rows as there are in the batch."""
        if self.batch is not None:
            size = self.batch.batch_size
            assert len(size) == 1, f"only support num_batch_dims=1, got a TensorDict of batch size {tuple(size)}"
        for name, column in self.tensors.items():
            # TensorDict takes lists too, but they would neither slice, nor concat, nor pickle here.
            assert isinstance(column, torch.Tensor), f"{name!r} is a {type(column)}: it belongs in non_tensor_batch"
        for name, column in self.non_tensor_batch.items():
            assert isinstance(column, np.ndarray), f"{name!r} must be an array, see object_array; got {type(column)}"
            rows = column.shape[:1]
            assert rows == (len(self),), f"{name!r} has shape {column.shape}, but the batch has {len(self)} rows"

    # Construction

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Makes a batch of columns by kind; without tensors, `batch` is None. With `auto_padding`, chunk() takes any
        number. Inner lists of equal length become a second dimension, as in verl, unless `object_array` wraps them.
        """
        assert num_batch_dims == 1, f"only support num_batch_dims=1, got {num_batch_dims}"
        batch = None
        if tensors:
            first = next(iter(tensors))
            rows = len(tensors[first])
            for name, tensor in tensors.items():
                assert len(tensor) == rows, f"tensor {first!r} has {rows} rows, but {name!r} has {len(tensor)}"
            batch = TensorDict(tensors, batch_size=[rows])
        arrays = {
            name: column if isinstance(column, np.ndarray) else np.array(column, dtype=object)
            for name, column in (non_tensors or {}).items()
        }
        return cls(batch, arrays, {**(meta_info or {}), AUTO_PADDING: True} if auto_padding else meta_info)

    @classmethod
    def from_single_dict(
        cls, data: dict[str, Column | list], meta_info: dict[str, Any] | None = None, auto_padding: bool = False
    ) -> Self:
        """Makes a batch of columns of any kind; a list is an object column. `batch` is never None, as in verl."""
        tensors, arrays = {}, {}
        for name, column in data.items():
            match column:
                case torch.Tensor():
                    tensors[name] = column
                case np.ndarray():
                    arrays[name] = column
                case list():
                    arrays[name] = object_array(column)
                case _:
                    allowed = "give a tensor, an array, or a list with one element a row"
                    raise ValueError(f"Unsupported type in data: {name!r} is a {type(column)}; {allowed}")
        proto = cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)
        if data and not tensors:
            proto.batch = TensorDict({}, batch_size=[len(proto)])
        return proto

    def clone(self) -> Self:
        """Copies tensors, arrays and the meta_info dict; the python objects inside them stay shared."""
        batch = None if self.batch is None else self.batch.clone()
        arrays = {name: column.copy() for name, column in self.non_tensor_batch.items()}
        return type(self)(batch, arrays, dict(self.meta_info))

    def to(self, device: torch.device | str) -> Self:
        """Moves the tensors in place; returns self."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def save_to_disk(self, filepath: str | PathLike) -> None:
        """Pickles into `filepath`, which then holds all of it or what it held before."""
        with replacing(filepath) as file:
            pickle.dump(self, file)

    @staticmethod
    def load_from_disk(filepath: str | PathLike) -> DataProto:
        """Unpickles a file: open only files you trust."""
        with open(filepath, "rb") as file:
            return pickle.load(file)

    # Rows

    def __len__(self) -> int:
        if self.batch is not None:
            return self.batch.batch_size[0]
        return next((len(column) for column in self.non_tensor_batch.values()), 0)

    def __getitem__(self, index: int | np.integer | slice | Indices) -> Self | DataProtoItem:
        """Returns a row for an int; a DataProto for a slice and for a 1-D list, array or tensor of ints or bools."""
        if isinstance(index, slice):
            return self.slice(index.start, index.stop, index.step)
        if isinstance(index, list | np.ndarray | torch.Tensor):
            return self.select_idxs(index)
        if isinstance(index, int | np.integer):
            row = range(len(self))[index]
            elements = {name: column[row] for name, column in self.non_tensor_batch.items()}
            return DataProtoItem(None if self.batch is None else self.batch[row], elements, self.meta_info)
        raise TypeError(f"Indexing with {type(index)} is not supported; get(name) reads a column")

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> Self:
        """Returns rows start:end:step, as views; as copies if step is negative, as torch has no such views."""
        rows = slice(start, end, step)
        backwards = step is not None and step < 0
        return self.select_idxs(np.arange(len(self))[rows]) if backwards else self._take(rows)

    def select_idxs(self, idxs: Indices) -> Self:
        """Copies the rows at 1-D `idxs`: positions (negative ones count from the end), or one bool a row."""
        picked = idxs.cpu().numpy() if isinstance(idxs, torch.Tensor) else np.asarray(idxs)
        if not picked.size:  # an empty list has no element type, and numpy takes it for float
            picked = picked.astype(np.int64)
        if picked.ndim != 1 or picked.dtype.kind not in "biu":
            raise TypeError(f"rows are selected by 1-D ints or bools, got {picked.dtype} of shape {picked.shape}")
        return self._take(np.arange(len(self))[picked])

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Repeats every row `repeat_times` times: aabbcc interleaved, abcabc otherwise."""
        rows = np.arange(len(self))
        return self._take(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def split(self, split_size: int) -> list[Self]:
        """Cuts consecutive pieces of `split_size` rows; the last may be shorter."""
        return [self[start : start + split_size] for start in range(0, len(self), split_size)]

    def chunk_uneven(self, chunks: int) -> list[Self]:
        """Cuts `chunks` consecutive pieces whose sizes differ by at most one; with too few rows some have none."""
        edges = [len(self) * i // chunks for i in range(chunks + 1)]
        return [self[start:end] for start, end in pairwise(edges)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Joins the rows of all pieces, which must have the same columns; the type is that of the first.

        `meta_info["metrics"]`, a dict, a list of dicts or None in each piece, becomes one dict of lists. Every other
        key must be equal wherever it appears.
        """
        first, total = data[0], sum(map(len, data))
        columns = [(set(piece.tensors), set(piece.non_tensor_batch)) for piece in data]
        assert all(names == columns[0] for names in columns), f"pieces with different columns: {columns}"
        tensors = {name: torch.cat([piece.batch[name] for piece in data]) for name in first.tensors}
        batch = None if first.batch is None else TensorDict(tensors, batch_size=[total], device=first.batch.device)
        arrays = {name: np.concatenate([p.non_tensor_batch[name] for p in data]) for name in first.non_tensor_batch}
        return type(first)(batch, arrays, _merge_meta([piece.meta_info for piece in data]))

    def _take(self, rows: slice | np.ndarray) -> Self:
        """Returns the rows in a slice (views) or at positions (copies)."""
        batch = self.batch
        if batch is not None:
            tensors = {name: tensor[rows] for name, tensor in batch.items()}
            batch = TensorDict(tensors, batch_size=[len(np.arange(len(self))[rows])], device=batch.device)
        arrays = {name: array[rows] for name, array in self.non_tensor_batch.items()}
        return type(self)(batch, arrays, self.meta_info)

    # Columns

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> Self:
        """Returns the named entries; None keeps all. `deepcopy` copies arrays and meta_info, never tensors.

        Raises:
            KeyError: a tensor is missing. Missing arrays and meta_info entries are passed over, as in verl.
        """
        batch, arrays, meta = self.batch, dict(self.non_tensor_batch), self.meta_info
        if batch is None and batch_keys:
            raise KeyError(f"no tensors {batch_keys}: the batch has none, only the arrays {list(arrays)}")
        if batch is not None:
            batch = batch.select(*(batch.keys() if batch_keys is None else batch_keys))
        if non_tensor_batch_keys is not None:
            arrays = {name: arrays[name] for name in non_tensor_batch_keys if name in arrays}
        if meta_info_keys is not None:
            meta = {name: meta[name] for name in meta_info_keys if name in meta}
        return type(self)(batch, *(copy.deepcopy((arrays, meta)) if deepcopy else (arrays, meta)))

    def pop(
        self, batch_keys: Keys = None, non_tensor_batch_keys: Keys = None, meta_info_keys: Keys = None
    ) -> DataProto:
        """Removes the named entries, which must exist (assert), and returns them as a plain DataProto."""
        tensors, arrays = _pop(self.batch, batch_keys), _pop(self.non_tensor_batch, non_tensor_batch_keys)
        return DataProto.from_dict(tensors, arrays, _pop(self.meta_info, meta_info_keys))

    def union(self, other: DataProto) -> Self:
        """Adds the other's columns and meta_info in place; returns self. What both have must be equal (assert)."""
        if other.batch is not None:
            batch = TensorDict({}, batch_size=[len(self)]) if self.batch is None else self.batch
            self.batch = union_tensor_dict(batch, other.batch)
        self.non_tensor_batch = union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        # A new dict, as the old one may be shared with other slices of the same parent.
        self.meta_info = _union(dict(self.meta_info), other.meta_info, lambda a, b: a is b or a == b, "meta_dict")
        self.check_consistency()
        return self


def object_array(rows: Sequence[Any]) -> np.ndarray:
    """Makes a 1-D object array with one element a row: inner lists and arrays stay elements."""
    return np.fromiter(rows, dtype=object, count=len(rows))


def join_rows(pieces: Sequence[DataProto]) -> DataProto:
    """Joins rows of which some have object columns that others lack, as other episodes have them: None in these.
    Pieces without rows are left out, unless there is no other."""
    pieces = [*filter(len, pieces)] or pieces[:1]
    names = dict.fromkeys(name for piece in pieces for name in piece.non_tensor_batch)
    for piece in pieces:
        missing = {name: object_array([None] * len(piece)) for name in names if name not in piece.non_tensor_batch}
        piece.non_tensor_batch.update(missing)
    return DataProto.concat(pieces)


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """Adds the second's tensors to the first, in place; a name in both must hold equal tensors (assert)."""
    sizes = tensor_dict1.batch_size, tensor_dict2.batch_size
    assert sizes[0] == sizes[1], f"Two tensor dict must have identical batch size. Got {sizes[0]} and {sizes[1]}"
    return _union(tensor_dict1, tensor_dict2, lambda a, b: a is b or torch.equal(a, b), "tensor_dict")


def union_numpy_dict(tensor_dict1: dict[str, np.ndarray], tensor_dict2: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds the second's arrays to the first, in place; a name in both must hold deeply equal arrays (assert)."""
    return _union(tensor_dict1, tensor_dict2, _deep_equal, "tensor_dict")


def list_of_dict_to_dict_of_list(list_of_dict: Sequence[dict]) -> dict[str, list]:
    """Turns [{a: 1}, {a: 2}] into {a: [1, 2]}. The first has all the keys: a later one may lack some but add none."""
    lists: dict[str, list] = {key: [] for key in (list_of_dict[0] if list_of_dict else ())}
    for row in list_of_dict:
        assert row.keys() <= lists.keys(), f"{list(row)} has keys that the first dict has not: {list(lists)}"
        for key, value in row.items():
            lists[key].append(value)
    return lists


def _pop(bag: MutableMapping[str, Any] | None, keys: Keys) -> dict[str, Any]:
    keys, present = list(keys or ()), [] if bag is None else list(bag.keys())
    assert set(keys) <= set(present), f"asked for {keys}, but there are only {present}"
    return {key: bag.pop(key) for key in keys}


def _union(target: MutableMapping, new: MutableMapping, equal: Callable[[Any, Any], bool], kind: str) -> MutableMapping:
    """Updates `target` with `new`, after checking that no value changes."""
    for name, value in new.items():
        problem = f"{name} in {kind}1 and {kind}2 are not the same object"
        clash = name in target.keys() and not equal(target[name], value)  # noqa: SIM118 - `in` of a TensorDict looks at values
        assert not clash, f"{problem}: a union needs equal values; pop or rename one of them"
    target.update(new)
    return target


def _deep_equal(a: Any, b: Any) -> bool:
    """Compares types and values, NaN equal to NaN, arrays element by element."""
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return type(a) is type(b) and (a is b or bool(a == b or (a != a and b != b)))
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.dtype != object:
        return np.array_equal(a, b, equal_nan=a.dtype.kind in "fcmM")
    return all(_deep_equal(x, y) for x, y in zip(a.flat, b.flat, strict=True))


def _merge_meta(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the meta_info of a concat, by the rules of `DataProto.concat`."""
    merged: dict[str, Any] = {}
    metrics: list[dict] = []
    for meta in metas:
        for key, value in meta.items():
            if key != "metrics":
                earlier = merged.setdefault(key, value)
                same = earlier is value or earlier == value
                assert same, f"Conflicting values for meta_info key '{key}': {earlier} and {value}"
            elif value is not None:
                metrics += value if isinstance(value, list) else [value]
    return merged | {"metrics": list_of_dict_to_dict_of_list(metrics)} if metrics else merged
