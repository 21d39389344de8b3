"""Serves verl's modules to users' files where verl is not installed, by the names of extras/verl/names.yaml."""

import importlib
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from importlib.machinery import ModuleSpec
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import yaml

from configs.extras import absence, is_here
from configs.import_utils import Imports


class StandIn(ModuleType):
    """A module of verl, whose names are ours as names.yaml has them; a name is looked up when it is read."""

    def __getattr__(self, name: str) -> Any:
        full = f"{self.__name__}.{name}"
        module, _, attribute = names_of_verl().get(self.__name__, {}).get(name, "").partition(":")
        if module and is_here(module):
            return attrgetter(attribute)(importlib.import_module(module))
        if full in names_of_verl():
            return importlib.import_module(full)
        raise AttributeError(name if name.startswith("__") else why_not_here(full))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in names_of_verl().get(self.__name__, {}):
            raise AttributeError(
                f"{self.__name__}.{name} cannot be replaced from outside: register a function or class of yours "
                "(CONTRIBUTING.md)."
            )
        super().__setattr__(name, value)


class StandIns(Imports):
    """Finds verl's modules for a user's files where verl is not installed.

    An installed verl goes first; a folder called verl without an __init__.py, such as a clone's, is no package.
    """

    @classmethod
    def install(cls) -> None:
        if cls not in sys.meta_path:
            sys.meta_path.insert(0, cls)  # before the finder that would take any folder called verl

    @classmethod
    def idle_methods(cls) -> dict[str, str]:
        return table_of_verl()[1]

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        top, _, rest = name.partition(".")
        if top != "verl" or (rest and not isinstance(sys.modules.get(top), StandIn)):
            return None
        if not rest and (spec := cls.find_installed(top)):
            return spec
        program = name.removesuffix(".__main__")
        if name not in names_of_verl() and not is_program(program):
            raise ImportError(why_not_here(name), name=name)
        return ModuleSpec(name, cls, is_package=name == program)

    @staticmethod
    def create_module(spec: ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    @staticmethod
    def exec_module(module: StandIn) -> None:
        served = names_of_verl().get(module.__name__, {}).items()
        module.__all__ = [name for name, target in served if is_here(target.partition(":")[0])]

    @staticmethod
    def get_code(name: str) -> CodeType:
        """Returns what `python -m PROGRAM` executes, the module PROGRAM.__main__: the command of ours for it."""
        program = name.removesuffix(".__main__")
        return compile(f"from extras.verl.programs import run; run({program!r})", name, "exec")


@cache
def table_of_verl() -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Reads extras/verl/names.yaml: {module of verl: {name: "module of ours:name"}}, and {module or name of verl, or
    method of a class of ours, that is refused: what to use instead}."""
    served: dict[str, dict[str, str]] = {}
    refused: dict[str, str] = {}
    for modules, entries in yaml.load(Path(__file__).with_name("names.yaml").read_text(), yaml.CSafeLoader).items():
        for module in (module for pattern in modules.split() for module in with_variants(pattern)):
            if isinstance(entries, str):
                refused[module] = entries
                continue
            for depth in range(module.count(".") + 1):
                served.setdefault(module.rsplit(".", depth)[0], {})
            for home, names in entries.items():
                for verls, _, ours in (name.partition("=") for name in names.split()):
                    if " " in home:
                        refused[f"{module}.{verls}"] = home
                    else:
                        served[module][verls] = f"{home}:{ours or verls}"
    return served, refused


def with_variants(pattern: str) -> list[str]:
    """["a", "a.b"] of "a{,.b}"; of several braces all combinations."""
    first = re.search(r"\{(.*?)\}", pattern)
    if first is None:
        return [pattern]
    before, after = pattern[: first.start()], pattern[first.end() :]
    return [name for part in first[1].split(",") for name in with_variants(before + part + after)]


def names_of_verl() -> dict[str, dict[str, str]]:
    return table_of_verl()[0]


def refusal_of(name: str) -> str | None:
    """Returns what to use in place of a name or module that the table refuses, itself or a part that it is in."""
    refused = table_of_verl()[1]
    parents = (name.rsplit(".", depth)[0] for depth in range(name.count(".")))
    return next((refused[parent] for parent in parents if parent in refused), None)


def is_program(name: str) -> bool:
    """Says whether `name` is a program of verl's, which the table serves or refuses as a module."""
    from extras.verl.programs import program_of  # which a run does not need

    return program_of(["-m", name]) is not None and (name in names_of_verl() or refusal_of(name) is not None)


def why_not_here(name: str) -> str:
    """Returns what to use in place of `name`, a module of verl or a name in one."""
    served = names_of_verl()
    module, _, attribute = name.rpartition(".")
    home = served.get(module, {}).get(attribute, "").partition(":")[0]
    if home and not is_here(home):
        return f"{name} is not here: {absence(home.split('.')[1])}"
    if reason := refusal_of(name):
        return f"{name} is not here: {reason}."
    known = [*served, *(f"{module}.{member}" for module, names in served.items() for member in names)]
    near = "".join(f" Did you mean {match}?" for match in get_close_matches(name, known, 1, 0.8))
    return f"{name} is not here.{near} extras/verl/names.yaml lists the names of verl that are."
