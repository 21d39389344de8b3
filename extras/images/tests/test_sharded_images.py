"""A model that reads images, in shards, takes the step of one process, though the rows of a rank may have no image."""

from pathlib import Path

import pytest
import torch

from configs.errors import ConfigError
from extras.images.tests.test_scores import prompts_of, rollouts
from extras.images.tiny_model import FAMILIES
from extras.sharding.layout import Sharded
from extras.sharding.tests.test_sharding import sharding
from tests.ranks import Ranks
from tests.runs import compose, short_run
from tests.test_replicas import assert_the_step_of_one


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_take_the_step_of_one(ranks: Ranks, folders, family: str):
    batch = rollouts(prompts_of(folders[family]))  # eight rows, the last two without an image
    generator = torch.Generator().manual_seed(0)
    for name, mean in (("old_log_probs", -4.6), ("ref_log_prob", -4.6), ("advantages", 0.0)):
        batch.batch[name] = mean + 0.3 * torch.randn(batch.batch["responses"].shape, generator=generator)
    assert_the_step_of_one(ranks, folders[family], ["vanilla, every term"], sharding, batch)


def test_its_layers_are_not_split(folders, tmp_path: Path):
    settings = short_run(folders["idefics3"], tmp_path, "actor_rollout_ref.actor.tensor_parallel_size=2")
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2: a model that reads images is not split"):
        Sharded.check(compose(*settings, name="frozenlake_pixels"), workers=2)
