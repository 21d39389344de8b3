"""Files that are replaced whole, and JSON lines that hold whatever a batch does."""

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch

from data.files import append, dispensable, dump_jsonl, json_line, read_metrics, replacing, rewrite
from tests.runs import files_of_at_most


def test_a_replaced_file_is_old_or_new_and_never_half(tmp_path):
    path = tmp_path / "folder" / "state"
    with replacing(path) as file:
        file.write(b"old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"ne")
        file.flush()
        assert path.read_bytes() == b"old"
        raise RuntimeError
    assert path.read_bytes() == b"old"
    with replacing(str(path)) as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_torn_line_is_left_out_and_no_file_is_an_empty_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == []
    whole = {"step": 1, "data": {"x": 0.1}}
    path.write_bytes(json_line(whole) + json_line(whole)[:-5] + b"\n" + json_line(whole) + json_line(whole)[:9])
    assert read_metrics(path) == [whole, whole]


class Odd:
    def __str__(self) -> str:
        return "an odd object"


def test_dump_converts_what_json_does_not_know(tmp_path):
    of_json = [  # what is dumped, and what is read again
        ("迷宮 \ud800 é\u2028", "迷宮 \ud800 é\u2028"),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([None, "a", {"x": np.float64(1.5)}], dtype=object), [None, "a", {"x": 1.5}]),
        (torch.tensor([1.0, float("nan")], requires_grad=True), [1.0, None]),
        (torch.tensor(2.0, dtype=torch.bfloat16), 2.0),
        ({1: (np.int32(1), float("inf")), "odd": Odd()}, {"1": [1, None], "odd": "an odd object"}),
        (Decimal("0.1"), "0.1"),
        (Path("a/b"), "a/b"),
    ]
    path = tmp_path / "new" / "3.jsonl"
    dump_jsonl(path, [{"all": [value for value, _ in of_json]}, {"text": "second"}])
    first, second = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    assert json.loads(first) == {"all": [read for _, read in of_json]}
    assert "迷宮" in first  # readable in an editor, not escaped
    assert json.loads(second) == {"text": "second"}


def test_a_dump_that_fails_leaves_the_old_file(tmp_path):
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no name")

    path = tmp_path / "rows.jsonl"
    dump_jsonl(path, [{"a": 1}])
    with pytest.raises(RuntimeError):
        dump_jsonl(path, [{"a": 2}, {"a": Broken()}])
    assert path.read_text() == '{"a": 1}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_a_rewritten_file_keeps_every_content_it_had(tmp_path):
    path = tmp_path / "config.yaml"
    for content in (b"one", b"one", b"two", b"three"):
        rewrite(path, content)
        assert path.read_bytes() == content
    found = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert found == {"config.yaml": b"three", "config.yaml.bak-1": b"one", "config.yaml.bak-2": b"two"}


def test_a_full_disk_takes_all_of_a_line_or_nothing(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, b"0123\n")
    for room in range(5):
        with files_of_at_most(5 + room), pytest.raises(OSError):
            append(path, b"4567\n")
        assert path.read_bytes() == b"0123\n"
    with files_of_at_most(10):
        append(path, b"4567\n")
    assert path.read_bytes() == b"0123\n4567\n"


def test_a_full_disk_costs_what_a_run_can_do_without_and_other_errors_are_raised(tmp_path, caplog):
    with files_of_at_most(20), dispensable("step 3's rollouts"):
        dump_jsonl(tmp_path / "3.jsonl", [{"output": "x" * 20}])
    assert list(tmp_path.iterdir()) == [] and "step 3's rollouts: not written, the disk is full" in caplog.text
    (tmp_path / "file").touch()
    with pytest.raises(OSError), dispensable("step 4's rollouts"):
        dump_jsonl(tmp_path / "file" / "4.jsonl", [{}])
