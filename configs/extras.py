"""The one table of what may be taken away: by kind and name, the object that a setting asks for."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from configs.errors import ConfigError

TABLE: dict[str, dict[str, str]] = {
    "forward": {"off": "workers.forward:Forward", "kernels": "extras.kernels:Kernels"},
    "parallel": {"replicas": "workers.parallel:Replicas", "sharding": "extras.sharding:Sharded"},
    "adapter": {"none": "workers.adapter:NoAdapter", "lora": "extras.lora:Lora"},
}


def find(kind: str, name: str, key: str = "") -> Any:
    """Returns the object called `name`. It is imported now, and not before.

    Raises:
        ConfigError: it is not in this copy; names `key`.
    """
    module, _, attribute = TABLE[kind][name].partition(":")
    if not has(kind, name):
        raise ConfigError(f"{key or kind}: it asks for {module.replace('.', '/')}, which is not in this copy.")
    return getattr(import_module(module), attribute)


def has(kind: str, name: str) -> bool:
    """Says whether it is in this copy."""
    package = TABLE[kind][name].partition(":")[0]
    parent = package.rpartition(".")[0]
    return (not parent or find_spec(parent) is not None) and find_spec(package) is not None
