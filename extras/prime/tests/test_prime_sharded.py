"""PRIME's model in shards, or split over workers, learns what one process learns."""

from functools import partial
from pathlib import Path

import pytest

from extras.prime.tests.test_prime import assert_ranks_take_the_step_of_one
from extras.sharding.tests.test_sharding import sharding
from tests.ranks import Ranks
from tests.test_replicas import save_two_layers


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["sharded", "split", "split shards"])
def test_ranks_take_the_step_of_one(ranks: Ranks, tmp_path: Path, mesh: str):
    assert_ranks_take_the_step_of_one(ranks, save_two_layers(tmp_path / "model"), partial(sharding, mesh))
