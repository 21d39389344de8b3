"""Rows of packages: tasks of reasoning-gym, data sets of the hub, and the refusal of what is missing."""

import gzip
import sys

import pytest

from data.rows import read_rows


def test_tasks_are_rows_in_verls_form(reasoning_gym):
    rows = [row for _, row in read_rows("reasoning_gym:sums?size=3&seed=7")]
    assert len(rows) == 3 and "7+2?" in rows[2]["prompt"][0]["content"]
    assert rows[0]["data_source"] == "reasoning_gym/sums" and rows[0]["reward_model"]["ground_truth"]["answer"] == "2"


@pytest.mark.parametrize("name", ["n.csv", "n.csv.gz", "n.tsv"])
def test_files_with_separators_hold_texts_whatever_their_ending(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "datasets", None)  # no package reads them
    mark = "\t" if name.endswith("tsv") else ","
    text = "prompt,ground_truth\n1+2=,3\n3+4=,007\nmissing?,NA\nempty?,\n".replace(",", mark)
    (gzip.open if name.endswith("gz") else open)(tmp_path / name, "wt", encoding="utf-8-sig").write(text)
    rows = [row for _, row in read_rows(tmp_path / name)]
    assert [row["ground_truth"] for row in rows] == ["3", "007", "NA", None]


def test_a_file_with_separators_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "n.csv.gz").write_bytes(b"prompt,ground_truth")
    with pytest.raises(ValueError, match=r"n\.csv\.gz cannot be read: .*gzip"):
        read_rows(tmp_path / "n.csv.gz")


def test_an_unknown_task_and_a_missing_package_are_told(reasoning_gym, monkeypatch):
    with pytest.raises(ValueError, match=r"reasoning_gym:products: .*not registered.*The form is reasoning_gym:TASK"):
        read_rows("reasoning_gym:products")
    for name, package in (("reasoning_gym", "reasoning-gym"), ("datasets", "datasets")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match=rf"{name}:x needs the package {package}, .*requirements-sources\.txt"):
            read_rows(f"{name}:x")
