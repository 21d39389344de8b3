"""Pools of several workers, on two machines, train as one pool does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster

from extras.overlap.tests.test_overlap import APART, ROLLOUT, assert_same_weights, trained
from tests.forked import python_command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines() -> Iterator[None]:
    """Two machines, of one core and of two: what has three workers is on both."""
    two = Cluster(head_node_args={"num_cpus": 1}, initialize_head=True)
    two.add_node(num_cpus=2, node_ip_address="127.0.0.2")
    Path(get_ray_address_file(None)).unlink()  # that other runs of this machine do not join
    ray.init(address=two.address, runtime_env={"py_executable": python_command()})
    yield
    ray.shutdown()
    two.shutdown()


POOLS = {
    "two trainers": ["trainer.n_workers_per_node=2"],
    "shards": ["trainer.n_workers_per_node=2", "actor_rollout_ref.actor.strategy=fsdp2"],
    "two engines": [f"{ROLLOUT}.nnodes=2"],
}


@pytest.mark.parametrize("pools", POOLS)
def test_pools_on_two_machines_learn_what_one_pool_learns(machines, tiny_model: Path, tmp_path: Path, pools: str):
    colocated = [setting for setting in POOLS[pools] if not setting.startswith(ROLLOUT)]
    together = trained(tmp_path / "together", tiny_model, "trainer.executor=ray", "trainer.n_threads=1", *colocated)
    apart = trained(tmp_path / "apart", tiny_model, *APART, *POOLS[pools])
    for step in range(5):
        assert apart[step] == pytest.approx(together[step], rel=1e-6, abs=1e-6), step
    assert_same_weights(tmp_path / "together", tmp_path / "apart")
