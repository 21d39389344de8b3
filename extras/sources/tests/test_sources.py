"""Rows of packages: tasks of reasoning-gym, data sets of the hub, and the refusal of what is missing."""

import sys

import pytest

from data.rows import read_rows


def test_tasks_are_rows_in_verls_form(reasoning_gym):
    rows = [row for _, row in read_rows("reasoning_gym:sums?size=3&seed=7")]
    assert len(rows) == 3 and "7+2?" in rows[2]["prompt"][0]["content"]
    assert rows[0]["data_source"] == "reasoning_gym/sums" and rows[0]["reward_model"]["ground_truth"]["answer"] == "2"


def test_an_unknown_task_and_a_missing_package_are_told(reasoning_gym, monkeypatch):
    with pytest.raises(ValueError, match=r"reasoning_gym:products: .*not registered.*The form is reasoning_gym:TASK"):
        read_rows("reasoning_gym:products")
    for name, package in (("reasoning_gym", "reasoning-gym"), ("datasets", "datasets")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match=rf"{name}:x needs the package {package}, .*requirements-sources\.txt"):
            read_rows(f"{name}:x")
