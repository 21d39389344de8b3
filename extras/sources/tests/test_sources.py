"""Rows of packages: tasks of reasoning-gym, data sets of the hub, and the refusal of what is missing."""

import sys
from types import ModuleType

import pytest

from data.rows import read_rows


@pytest.fixture
def gym(monkeypatch):
    """A stand-in with the two functions that are used of the package, which is optional."""
    module = ModuleType("reasoning_gym")

    def create_dataset(name, size=2, seed=0, **settings):
        if name != "sums" or settings:
            raise ValueError(f"Dataset '{name}' not registered")
        entry = {"question": "1+1?", "answer": "2", "metadata": {"source_dataset": "sums"}}
        return [{**entry, "question": f"{seed}+{number}?"} for number in range(size)]

    def get_score_answer_fn(name):
        return lambda answer, entry: 1.0 if answer == entry["answer"] else 0.25

    module.create_dataset, module.get_score_answer_fn = create_dataset, get_score_answer_fn
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


def test_tasks_are_rows_in_verls_form(gym):
    rows = [row for _, row in read_rows("reasoning_gym:sums?size=3&seed=7")]
    assert len(rows) == 3 and "7+2?" in rows[2]["prompt"][0]["content"]
    assert rows[0]["data_source"] == "reasoning_gym/sums" and rows[0]["reward_model"]["ground_truth"]["answer"] == "2"


def test_an_unknown_task_and_a_missing_package_are_told(gym, monkeypatch):
    with pytest.raises(ValueError, match=r"reasoning_gym:products: .*not registered.*The form is reasoning_gym:TASK"):
        read_rows("reasoning_gym:products")
    for name, package in (("reasoning_gym", "reasoning-gym"), ("datasets", "datasets")):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ValueError, match=rf"{name}:x needs the package {package}, .*requirements-sources\.txt"):
            read_rows(f"{name}:x")
