"""Pools of several workers, on two machines, train as one pool does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray._private.utils import get_ray_address_file
from ray.cluster_utils import Cluster

from extras.overlap.tests.test_overlap import APART, ROLLOUT, VLLM, assert_same_weights, trained
from tests.forked import python_command
from tests.runs import needs_vllm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def machines() -> Iterator[None]:
    """Two machines of two cores: what has three workers is on both."""
    two = Cluster(head_node_args={"num_cpus": 2}, initialize_head=True)
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
    "two of each, vllm": ["trainer.n_workers_per_node=2", f"{ROLLOUT}.n_workers_per_node=2", VLLM],
}


@pytest.mark.parametrize("pools", [pytest.param(name, marks=needs_vllm) if "vllm" in name else name for name in POOLS])
def test_pools_on_two_machines_learn_what_one_pool_learns(machines, wide_headed_model, tmp_path, pools):
    """Metrics and weights are equal to the bit, but for the engine's log-probs, which depend on the size of a batch."""
    colocated = [setting for setting in POOLS[pools] if setting == VLLM or not setting.startswith(ROLLOUT)]
    one_pool = "trainer.executor=ray", "trainer.n_threads=1"
    together = trained(tmp_path / "together", wide_headed_model, *one_pool, *colocated)
    apart = trained(tmp_path / "apart", wide_headed_model, *APART, *POOLS[pools])
    for metrics in together.values():
        metrics |= {name: pytest.approx(metrics[name], abs=1e-6) for name in metrics if "rollout_mismatch/" in name}
    assert apart == together
    assert_same_weights(tmp_path / "together", tmp_path / "apart")
