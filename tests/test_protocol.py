"""DataProto against its slow twin: a python list with one tuple a row (`rows`), where every operation is obvious."""

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from data.protocol import DataProto, DataProtoItem, ObjectColumn, object_array, union_numpy_dict

few = settings(max_examples=40, deadline=None)
sizes = st.integers(0, 9)
bounds = st.none() | st.integers(-12, 12)
slices = st.builds(slice, bounds, bounds, st.none() | st.integers(1, 4) | st.integers(-4, -1))


class CustomProto(DataProto):
    """A user's subclass."""


def make(n: int, cls: type[DataProto] = DataProto, **meta) -> DataProto:
    """n different rows: a matrix, a vector, objects of different types and lengths, a numeric array."""
    return cls.from_dict(
        tensors={"obs": torch.arange(2 * n).view(n, 2), "score": torch.arange(n) / 2},
        non_tensors={"label": object_array([[f"r{i}"] * i for i in range(n)]), "number": np.arange(n) * 10},
        meta_info=meta,
    )


def rows(data: DataProto) -> list[tuple]:
    names = [*data.batch.keys(), *data.non_tensor_batch.keys()]
    return list(zip(*(data.get(name).tolist() for name in sorted(names)), strict=True))


def assert_same(a: DataProto, b: DataProto) -> None:
    assert type(a) is type(b)
    assert a.meta_info == b.meta_info
    assert (a.batch is None) == (b.batch is None)
    assert len(a) == len(b)
    assert set(a.tensors) == set(b.tensors)
    assert all(torch.equal(a.batch[k], b.batch[k]) and a.batch[k].dtype == b.batch[k].dtype for k in a.tensors)
    assert set(a.non_tensor_batch) == set(b.non_tensor_batch)
    for name, array in a.non_tensor_batch.items():
        assert array.dtype == b.non_tensor_batch[name].dtype
        assert array.tolist() == b.non_tensor_batch[name].tolist()


# Construction


def test_there_is_one_batch_dimension():
    data = DataProto.from_dict({"obs": torch.zeros(10, 3, 2)})
    assert data.batch.batch_size == torch.Size([10])


def test_from_dict_leaves_the_callers_dict_alone_and_makes_equal_lists_two_dimensional():
    given_columns = {"pairs": [["a", "b"], ["c", "d"]], "ragged": [[1], [1, 2]]}
    data = DataProto.from_dict(non_tensors=given_columns)
    assert given_columns == {"pairs": [["a", "b"], ["c", "d"]], "ragged": [[1], [1, 2]]}
    assert data.pairs.shape == (2, 2)
    assert data.ragged.shape == (2,)
    assert data.pairs.dtype == data.ragged.dtype == object


def test_from_single_dict_sorts_by_type_and_keeps_inner_lists_whole():
    tensor, array = torch.zeros(2, 3), np.array([1.5, 2.5])
    data = CustomProto.from_single_dict({"t": tensor, "a": array, "l": [[1, 2], [3, 4]]}, meta_info={"k": 1})
    assert type(data) is CustomProto
    assert data.batch["t"] is tensor
    assert data.non_tensor_batch["a"] is array
    assert data.l.shape == (2,)
    assert data.l.tolist() == [[1, 2], [3, 4]]
    assert data.meta_info == {"k": 1}


def test_length_in_every_shape():
    batch = TensorDict({"obs": torch.zeros(3)}, batch_size=[3])
    assert len(DataProto(batch, {"label": np.arange(3)})) == 3
    assert len(DataProto(None, {"label": np.arange(2)})) == 2
    assert len(DataProto(None, {})) == 0
    assert len(DataProto(None, None, None)) == 0
    assert len(DataProto()) == 0
    for tensors in (None, {}):
        data = DataProto.from_dict(tensors, {"label": ["a", "b"]})
        assert data.batch is None and len(data) == 2


# Plain access


def test_short_scripts_read_columns_as_attributes():
    data = DataProto.from_single_dict({"responses": ["answer: 42"] * 4, "ground_truths": ["42"] * 4})
    assert [r.split(": ")[1] == g for r, g in zip(data.responses, data.ground_truths, strict=True)] == [True] * 4
    assert data.get("ground_truths", None).tolist() == data.ground_truths.tolist() == ["42"] * 4
    assert data.get("missing", "default") == "default"
    assert len(data.batch) == len(data) == 4
    assert data.meta_info == {}
    assert "responses" in data
    assert "missing" not in data
    assert [row.responses for row in data] == ["answer: 42"] * 4
    assert_same(data.clone(), data)


def test_an_object_column_is_true_if_it_has_rows_and_else_an_array_of_numpys():
    data = make(3)
    label = data.label
    assert label and data.get("label") and data[:1].label and not data[:0].label and not data.get("none", [])
    equal = label == ["r1"]
    assert type(equal) is np.ndarray and label[np.array([2, 0])].tolist() == [["r2"] * 2, []] and label[1:]
    for numbers in (equal, data.number, object_array([0, 1]).view(ObjectColumn).astype(int)):
        with pytest.raises(ValueError, match="truth value of an array"):
            bool(numbers)
    assert (type((label == label).all()), type(data[:2].label.sum())) == (np.bool_, list)
    assert pickle.loads(pickle.dumps(label)).tolist() == np.concatenate([label[:1], label[1:]]).tolist()
    data.non_tensor_batch["again"] = label
    whole = DataProto.concat([data[:1], pickle.loads(pickle.dumps(data))[1:]])
    assert_same(DataProto.from_dict(None, {"again": data.non_tensor_batch["label"]}).union(whole), whole)


def test_a_batch_is_where_its_tensors_are():
    assert make(2).device == DataProto.from_single_dict({"a": ["b"]}).device == torch.device("cpu")
    assert make(2).to("meta").device == make(2).to("meta")[0].device == torch.device("meta")


def test_clone_owns_its_columns_and_meta_info():
    data = make(3, temperature=1.0)
    twin = data.clone()
    twin.batch["obs"][0] = -1
    twin.non_tensor_batch["number"][0] = -1
    twin.meta_info["temperature"] = 0.0
    twin.batch["new"] = torch.zeros(3)
    assert_same(data, make(3, temperature=1.0))


# Rows


@few
@given(slices, sizes)
def test_slices_are_those_of_a_list(picked, n):
    data = make(n, CustomProto, name="abc")
    part = data[picked]
    assert rows(part) == rows(data)[picked]
    assert type(part) is CustomProto
    assert part.meta_info is data.meta_info
    assert rows(data.slice(picked.start, picked.stop, picked.step)) == rows(part)


@few
@given(st.data(), st.integers(1, 9), st.sampled_from([list, np.array, torch.tensor]))
def test_positions_select_rows_in_their_order(draw, n, kind):
    data = make(n, CustomProto, name="abc")
    positions = draw.draw(st.lists(st.integers(-n, n - 1), max_size=12))
    part = data[kind(positions)]
    assert rows(part) == [rows(data)[i] for i in positions]
    assert type(part) is CustomProto
    assert part.meta_info is data.meta_info


@few
@given(st.data(), sizes, st.sampled_from([list, np.array, torch.tensor]))
def test_a_bool_for_each_row_selects_the_true_ones(draw, n, kind):
    data = make(n)
    mask = draw.draw(st.lists(st.booleans(), min_size=n, max_size=n))
    assert rows(data[kind(mask)]) == [row for row, keep in zip(rows(data), mask, strict=True) if keep]


@pytest.mark.parametrize("index", [2, -1, np.int64(1), np.int32(-3)])
def test_an_int_gives_a_row(index):
    data = make(3, name="abc")
    row = data[index]
    assert type(row) is DataProtoItem
    assert (row.label, row.number, row.obs.tolist(), row.score.item()) == rows(data)[index]
    assert row.batch.batch_size == torch.Size([])
    assert row.meta_info is data.meta_info


def test_a_batch_without_tensors_is_read_repeated_and_united():
    data = DataProto.from_dict(non_tensors={"label": ["a", "b", "c"]})
    assert data[1].label == "b" and data[1].batch is None and data.repeat(2).label.tolist() == [*"aabbcc"]
    assert data[::-1].label.tolist() == ["c", "b", "a"]
    assert data.union(DataProto.from_dict(non_tensors={"b": [3, 4, 5]})).b.tolist() == [3, 4, 5] and data.batch is None
    assert data.union(DataProto.from_dict({"obs": torch.zeros(3)})).obs.tolist() == [0, 0, 0]


def test_slices_are_views_and_selections_are_copies():
    data = make(4)
    data[1:3].batch["obs"][:] = -1
    assert data.obs.tolist() == [[0, 1], [-1, -1], [-1, -1], [6, 7]]
    data[[0, 3]].batch["obs"][:] = -2
    assert data.obs[0].tolist() == [0, 1]


@few
@given(sizes, st.integers(0, 4))
def test_repeat_interleaved_or_tiled(n, times):
    data = make(n, CustomProto, name="abc")
    assert rows(data.repeat(times)) == [row for row in rows(data) for _ in range(times)]
    assert rows(data.repeat(times, interleave=False)) == rows(data) * times
    assert data.repeat(times).meta_info is data.meta_info
    assert type(data.repeat(times)) is CustomProto


# Cutting and joining


@few
@given(sizes, st.integers(1, 6))
def test_concat_inverts_every_way_to_cut(n, pieces):
    data = make(n, CustomProto, name="abc")
    uneven = data.chunk_uneven(pieces)
    assert len(uneven) == pieces
    assert max(map(len, uneven)) - min(map(len, uneven)) <= 1
    assert_same(DataProto.concat(uneven), data)
    if n:
        split = data.split(pieces)
        assert [len(part) for part in split[:-1]] == [pieces] * (len(split) - 1)
        assert 1 <= len(split[-1]) <= pieces
        assert_same(DataProto.concat(split), data)
    assert all(part.meta_info is data.meta_info for part in uneven)


@pytest.mark.parametrize(
    ("given_metrics", "merged"),
    [
        ([{"loss": 1}, {"loss": 2}], {"loss": [1, 2]}),
        ([[{"loss": 1}, {"loss": 2}], [{"loss": 3}]], {"loss": [1, 2, 3]}),
        ([{"loss": 1}, [{"loss": 2}, {"loss": 3}]], {"loss": [1, 2, 3]}),
        ([None, {"loss": 2}], {"loss": [2]}),
        (["absent", {"loss": 2}], {"loss": [2]}),
        ([{"loss": 1, "lr": 5}, {"loss": 2}], {"loss": [1, 2], "lr": [5]}),
    ],
)
def test_concat_collects_metrics(given_metrics, merged):
    pieces = [make(1, name="abc", **({} if m == "absent" else {"metrics": m})) for m in given_metrics]
    assert DataProto.concat(pieces).meta_info == {"name": "abc", "metrics": merged}


def test_concat_unites_meta_info():
    assert DataProto.concat([make(1, a=1), make(1, b=2), make(1, a=1)]).meta_info == {"a": 1, "b": 2}


# Columns


def test_select_keeps_what_is_named_and_everything_for_none():
    data = make(3, CustomProto, name="abc", step=1)
    part = data.select(["obs"], ["label", "missing"], ["step", "missing"])
    assert type(part) is CustomProto
    assert (set(part.tensors), set(part.non_tensor_batch), part.meta_info) == ({"obs"}, {"label"}, {"step": 1})
    assert_same(data.select(), data)
    assert len(data.select(batch_keys=[], non_tensor_batch_keys=[])) == 3


def test_select_deepcopy_copies_objects_but_no_tensors():
    data = make(3, nested={"a": [1]})
    part = data.select(deepcopy=True)
    part.label[1].append("changed")
    part.meta_info["nested"]["a"].append(2)
    assert data.label[1] == ["r1"]
    assert data.meta_info == {"nested": {"a": [1]}}
    assert part.obs is data.obs


def test_pop_moves_entries_into_a_plain_dataproto():
    data = make(3, CustomProto, name="abc", step=1)
    popped = data.pop(["obs"], ["label"], ["step"])
    assert type(popped) is DataProto
    assert_same(popped, make(3, step=1).select(["obs"], ["label"]))
    assert_same(data, make(3, CustomProto, name="abc").select(["score"], ["number"]))
    assert len(data.pop()) == 0


# Union


def test_union_adds_columns_and_meta_info_in_place():
    data, other = make(3, CustomProto, name="abc"), make(3, name="abc", step=1)
    other.batch["adv"] = torch.ones(3)
    other.non_tensor_batch["uid"] = np.array(["x", "y", "z"], dtype=object)
    sibling = data[:1]
    assert data.union(other) is data
    assert {"obs", "adv", "uid", "label"} <= {*data.tensors, *data.non_tensor_batch}
    assert data.meta_info == {"name": "abc", "step": 1}
    assert sibling.meta_info == {"name": "abc"}


def test_the_same_tensor_unites_with_itself_whatever_it_holds():
    nan = torch.full((2,), torch.nan)
    data = DataProto.from_dict({"obs": nan})
    assert data.union(DataProto.from_dict({"obs": nan})).obs is nan


def nested(*elements) -> np.ndarray:
    return object_array(elements)


@pytest.mark.parametrize(
    "make_array",
    [
        lambda: np.array([1.0, np.nan]),
        lambda: np.array([1.0 + 1j, complex("nan")]),
        lambda: np.array(["a", "b"]),
        lambda: np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
        lambda: nested(1, "a", None, float("nan"), np.float32("nan")),
        lambda: nested(np.array([1.0, np.nan]), nested(float("nan"), [1, {"a": 2}])),
    ],
)
def test_arrays_that_are_deeply_equal_unite(make_array):
    assert list(union_numpy_dict({"a": make_array()}, {"a": make_array(), "b": np.arange(2)})) == ["a", "b"]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.array([1, 2]), np.array([1, 3])),
        (np.array([1, 2]), np.array([1.0, 2.0])),
        (np.array([1, 2]), np.array([[1, 2]])),
        (np.array([1.0, np.nan]), np.array([np.nan, 1.0])),
        (nested(1, 2), nested(1, 2).reshape(1, 2)),
        (nested(1), nested(1.0)),
        (nested(True), nested(1)),
        (nested(float("nan")), nested(0.0)),
        (nested([1, 2]), nested((1, 2))),
        (nested(np.array([1, 2])), nested(np.array([1, 3]))),
        (nested(np.array([1])), nested(np.array([1.0]))),
    ],
)
def test_arrays_that_differ_in_type_shape_or_value_do_not(a, b):
    with pytest.raises(AssertionError, match="a in tensor_dict1 and tensor_dict2 are not the same object"):
        union_numpy_dict({"a": a}, {"a": b})


# Refusals

PAIR = TensorDict({"obs": torch.zeros(2)}, batch_size=[2])
OBS, LABEL = make(1).select(batch_keys=["obs"]), make(1).select(non_tensor_batch_keys=["label"])
UNLIKE = "in tensor_dict1 and tensor_dict2 are not the same object"
WITH_A_LIST = make(3)
WITH_A_LIST.batch["uid"] = ["a", "b", "c"]
NO_ROW, NO_ROWS = [3, -4, [3], [True, False], torch.tensor([-4])], [[0.5], np.zeros((2, 2), dtype=int), torch.tensor(1)]


def changed(change) -> DataProto:
    other = make(3, name="abc")
    change(other)
    return other


REFUSED = [
    (AssertionError, "tensor 'obs' has 3 rows, but 'act' has 4",
     lambda: DataProto.from_dict({"obs": torch.zeros(3), "act": torch.zeros(4)})),
    *((AssertionError, "only support num_batch_dims=1",
       lambda dims=dims: DataProto.from_dict({"obs": torch.zeros(10, 3)}, num_batch_dims=dims)) for dims in (0, 2, 3)),
    (AssertionError, "only support num_batch_dims=1",
     lambda: DataProto(TensorDict({"obs": torch.zeros(10, 3)}, batch_size=[10, 3]))),
    (AssertionError, "'label' must be an array, see object_array; got <class 'list'>",
     lambda: DataProto(PAIR, {"label": ["a", "b"]})),
    (AssertionError, r"'label' has shape \(1,\), but the batch has 2 rows",
     lambda: DataProto(PAIR, {"label": np.array(["a"])})),
    (AssertionError, r"'label' has shape \(\), but", lambda: DataProto(PAIR, {"label": np.array("a")})),
    (AssertionError, r"'uid' is a .* belongs in non_tensor_batch", lambda: WITH_A_LIST[:2]),
    *((ValueError, f"Unsupported type in data: 'bad' is a {type(column)}",
       lambda column=column: DataProto.from_single_dict({"good": [1, 2], "bad": column}))
      for column in ("text", 3, (1, 2), {"a": 1}, None)),
    (AttributeError, r"no column 'reward'; there are \['obs', 'score', 'label', 'number'\]", lambda: make(1).reward),
    (AttributeError, r"data\.batch\['rewards'\] = tensor, objects in non_tensor_batch",
     lambda: setattr(make(1), "rewards", torch.zeros(1))),
    *((TypeError, f"Indexing with {type(index)} is not supported", lambda index=index: make(3)[index])
      for index in ("obs", 1.0, (0, 1), None)),
    *((TypeError, "rows are selected by 1-D ints or bools", lambda index=index: make(3)[index])
      for index in (*NO_ROWS, ["obs"])),
    *((IndexError, "", lambda index=index, of=of: of[index]) for index in NO_ROW for of in (make(3), DataProto())),
    (AssertionError, "Conflicting values for meta_info key", lambda: DataProto.concat([make(1, a=n) for n in (1, 2)])),
    *((AssertionError, "pieces with different columns", lambda pieces=pieces: DataProto.concat(pieces))
      for other in (OBS, LABEL) for pieces in ([make(1), other], [other, make(1)])),
    (IndexError, "", lambda: DataProto.concat([])),
    (KeyError, "missing", lambda: make(2).select(batch_keys=["missing"])),
    *((AssertionError, r"\['missing'\], but there are", lambda bag=bag: make(2, a=1).pop(**{bag: ["missing"]}))
      for bag in ("batch_keys", "non_tensor_batch_keys", "meta_info_keys")),
    *((AssertionError, words, lambda change=change: make(3, name="abc").union(changed(change))) for change, words in (
        (lambda d: d.batch.set("obs", d.obs + 1), f"obs {UNLIKE}"),
        (lambda d: d.label.__setitem__(0, "x"), f"label {UNLIKE}"),
        (lambda d: d.meta_info.update(name="x"), "name in meta_dict1 and meta_dict2 are not the same object"))),
    (AssertionError, "Two tensor dict must have identical batch size", lambda: make(3).union(make(4))),
    (AssertionError, r"'b' has shape \(2,\), but the batch has 3 rows",
     lambda: make(3).union(DataProto.from_dict(non_tensors={"b": [1, 2]}))),
]  # fmt: skip


@pytest.mark.parametrize(("error", "words", "call"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_is_refused_by_name(error, words, call):
    with pytest.raises(error, match=words):
        call()


# Pickling


@few
@given(sizes)
def test_disk_and_pickle_round_trips(tmp_path_factory, n):
    data = make(n, CustomProto, name="abc", values=[1, 2])
    path = tmp_path_factory.mktemp("proto") / "data.pkl"
    data.save_to_disk(path)
    for again in (DataProto.load_from_disk(path), pickle.loads(pickle.dumps(data)), copy.deepcopy(data)):
        assert_same(again, data)
        again.check_consistency()


def test_a_slice_carries_its_own_rows_only():
    data = DataProto.from_dict({"obs": torch.zeros(100_000)})
    assert len(pickle.dumps(data[:2])) < 1_000


def test_tensors_from_read_only_shared_memory_are_writable_copies():
    """Writing to a batch from buffers of other processes, as Ray delivers it, leaves the buffers as they were."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(make(3), protocol=5, buffer_callback=buffers.append)
    shared = [bytes(buffer.raw()) for buffer in buffers]
    pickle.loads(pickled, buffers=shared).batch["obs"].fill_(-1)
    assert_same(pickle.loads(pickled, buffers=shared), make(3))


@pytest.mark.parametrize("batch", [None, TensorDict({}, batch_size=[3]), TensorDict({}, batch_size=[0])])
def test_batches_without_tensors_pickle(batch):
    again = pickle.loads(pickle.dumps(DataProto(batch, meta_info={"k": 1})))
    assert_same(again, DataProto(batch, meta_info={"k": 1}))


def test_a_name_of_both_kinds_is_read_as_the_object_column():
    data = DataProto.from_dict({"responses": torch.tensor([[7, 8], [9, 0]])}, {"responses": object_array(["78", "9"])})
    for rows in (data, data[:2], pickle.loads(pickle.dumps(data)), DataProto.concat([data[:1], data[1:]])):
        assert rows.responses.tolist() == ["78", "9"] and rows.batch["responses"].tolist() == [[7, 8], [9, 0]]
    assert data[1].responses == "9" and data[1].batch["responses"].tolist() == [9, 0]
