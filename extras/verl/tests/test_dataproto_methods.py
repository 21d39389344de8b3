"""Methods of verl's that a DataProto has beside those that the project calls."""

import subprocess
import sys

import pytest

import extras.verl.compat  # noqa: F401  (adds them)
from tests.test_protocol import assert_same, make, rows


def test_a_batch_finds_them_though_nothing_imported_verl():
    program = (
        "import torch; from data.protocol import DataProto as D; batch = D.from_dict({'x': torch.arange(4)});"
        "batch.reorder([3, 2, 1, 0]); print([part.x.tolist() for part in batch.chunk(2)], hasattr(batch, 'y'))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[[3, 2], [1, 0]] False\n"


def test_chunk_cuts_equally_or_not_at_all():
    data = make(6, name="abc")
    assert [rows(part) for part in data.chunk(3)] == [rows(data)[0:2], rows(data)[2:4], rows(data)[4:6]]
    with pytest.raises(AssertionError, match=r"only support equal chunk\. Got size of DataProto 6 and chunk 5"):
        data.chunk(5)


def test_rename_in_place_even_to_swap():
    data = make(2)
    obs, score = data.obs, data.score
    assert data.rename("obs", "state") is data
    assert data.state is obs
    data.rename(["state", "score"], ["score", "state"])
    assert data.score is obs
    assert data.state is score


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (["obs"], ["a", "b"], ValueError, "needs one new name"),
        (["obs", "score"], ["a", "a"], ValueError, "needs one new name"),
        ("obs", "score", ValueError, "unlike the other columns"),
        ("obs", "label", ValueError, "unlike the other columns"),
        ("missing", "a", AssertionError, r"asked for \['missing'\], but there are only \['obs', 'score'\]"),
    ],
)
def test_rename_refuses_what_would_lose_a_column(old, new, error, message):
    data = make(2)
    with pytest.raises(error, match=message):
        data.rename(old, new)
    assert_same(data, make(2))
