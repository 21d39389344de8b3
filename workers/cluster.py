"""What a run asks of machines, against what there is, before it costs time."""

import ray
import torch


def check_gpus(asked: int, on_ray: bool) -> None:
    """A run `on_ray` may find its GPUs elsewhere in the cluster that is running; if none is, this machine is all of it.

    Raises:
        ValueError: there are fewer than `asked`; both figures are in the message.
    """
    present = torch.cuda.device_count()
    if asked <= present:
        return
    if on_ray and joins_cluster():
        return check_resources({"GPU": asked}, ray.cluster_resources())
    raise ValueError(
        f"trainer.n_gpus_per_node × trainer.nnodes asks for {asked} GPUs; torch finds {present} on this machine, and "
        "no Ray cluster runs that may have more. Leave trainer.n_gpus_per_node null to take what is here (on the CPU: "
        "trainer.n_workers_per_node), or start a cluster with `ray start` on machines that have them."
    )


def joins_cluster() -> bool:
    """Connects this process to the Ray cluster that is running here, if one is."""
    if ray.is_initialized():
        return True
    try:
        ray.init(address="auto")
    except ConnectionError:
        return False
    return True


def check_resources(asked: dict[str, float], present: dict[str, float]) -> None:
    """Raises ValueError where the cluster has less of anything than is asked of it; both figures are in the message."""
    missing = {name: amount for name, amount in asked.items() if present.get(name, 0) < amount}
    if missing:
        has = {name: present.get(name, 0) for name in missing}
        raise ValueError(
            f"asked Ray for {missing}, the cluster has {has}. Lower trainer.n_threads / trainer.n_workers_per_node / "
            "trainer.n_gpus_per_node / trainer.nnodes, or add nodes with `ray start`."
        )
