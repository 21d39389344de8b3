"""Loads and calls what the config names: objects of the table in configs/extras.py, and users' own Python.

A file is executed once, however often it is named. One that `import` can find is imported under that name, so that
`custom/my_env.py` and `from custom.my_env import …` are one module; any other gets a name made of its path. Both are in
sys.modules and the same in every process, so the classes pickle. A file may import the modules beside it.
"""

import ast
import hashlib
import importlib
import inspect
import math
import re
import sys
import time
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import spec_from_file_location
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from configs.errors import ConfigError, is_users
from configs.extras import TABLE, check_present, has, present
from configs.paths import find_path


class Neighbours:
    """Finds modules beside the files that were loaded, and in the working directory, after all that sys.path has."""

    folders: ClassVar[list[str]] = []
    files: ClassVar[dict[str, Path]] = {}  # by names that no `import` finds
    loaded: ClassVar[set[str]] = set()  # names of the modules that `load_module` or this finder has found
    checked_at: ClassVar[float] = math.inf  # when a run last looked whether files have changed

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name in cls.files:
            return spec_from_file_location(name, file := cls.files[name], loader=SourceFileLoader(name, str(file)))
        spec = PathFinder.find_spec(name, [*cls.folders, ""], target) if path is None else None
        if spec is None or spec.origin is None:  # a folder of that name alone is no module
            return None
        if not is_users(spec.origin):  # custom/gym must not stand in for gym
            return None
        cls.loaded.add(name)
        return spec


FOREIGN = {"verl"}  # projects whose modules an extra stands in for


class Imports:
    """Gives users' files another project's modules, where it is not installed; a subclass for each of FOREIGN."""

    @classmethod
    def install(cls) -> None:
        """Adds its finder to sys.meta_path, if it is not there; it stays, as functions import too."""

    @classmethod
    def idle_methods(cls) -> Mapping[str, str]:
        """Returns, by module.Class.method of ours, what to do instead of overriding it: here it is not called."""
        return {}

    @classmethod
    def find_installed(cls, name: str) -> ModuleSpec | None:
        """Finds the project itself, wherever it is installed: a package. A module, as ROOT/verl.py, stands in."""
        finders = [finder for finder in sys.meta_path if finder is not cls]
        folders = [*sys.path, *Neighbours.folders, ""]
        specs = (finder.find_spec(name, [folder]) for folder in folders for finder in finders)
        return next((spec for spec in specs if spec and spec.origin and spec.submodule_search_locations), None)


sys.meta_path.append(Neighbours)


def find(kind: str, name: str, key: str = "") -> Any:
    """Imports and returns the object of a kind that is called `name`: of the table, or file.py:Name of the user's.

    Raises:
        ConfigError: its extra is not in this copy; names `key`.
    """
    if name not in TABLE[kind]:
        return load_extern_object(*split_object(name), key)
    check_present(kind, name, key)
    module, _, attribute = TABLE[kind][name].partition(":")
    return getattr(importlib.import_module(module), attribute)


class Registry(UserDict):
    """Maps names to what decorators registered of a kind and, where nothing was, to what the table has for them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __missing__(self, name: str) -> Any:
        if not has(self.kind, name):
            raise KeyError(name)
        return find(self.kind, name)[name]

    def __contains__(self, name: object) -> bool:
        return name in self.data or has(self.kind, name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*present(self.kind), *self.data]))

    def __len__(self) -> int:
        return sum(1 for _ in self)


REGISTRIES = {kind: Registry(kind) for kind in ("estimator", "policy_loss")}


def asked_for(kind: str, config: Any) -> list[Any]:
    """Finds objects of a kind by settings of `config` that are set or, of a key with =, have one of those values."""
    keys = []
    for key in present(kind):
        path, _, values = key.partition("=")
        setting = setting_at(config, path)
        keys += [key] if (setting in values.split(",") if values else setting) else []
    return [find(kind, key) for key in keys]


def setting_at(config: Any, key: str) -> Any:
    """Returns what `config` has at a dotted key; a section that is not there has nothing."""
    return reduce(lambda section, name: section and section.get(name), key.split("."), config)


def foreign_imports() -> list[type[Imports]]:
    return [find("optional", name) for name in FOREIGN if has("optional", name)]


def with_key(path: str, key: str) -> str:
    return f"{key}={path}" if key else path


def source_file(path: str, key: str = "") -> Path | None:
    """Returns the file that `path` names, None if that is a dotted module; raises FileNotFoundError."""
    file = find_path(path.removeprefix("file://"))
    if path.startswith("pkg://") or not (file.suffix == ".py" or "/" in path or file.is_file()):
        return None
    if not file.is_file():
        origin = with_key(path, key)
        raise FileNotFoundError(f"{origin}: there is no file {file.absolute()}: give a path, or a dotted module.")
    return file.resolve()


def load_module(path: str, key: str = "") -> ModuleType:
    """Returns the module at `path`: a file (as `find_path` finds it, or "file://…"), "pkg://a.b", or "a.b".

    Raises (the messages name `key`, the setting that gave the path):
        FileNotFoundError: no such file.
        ModuleNotFoundError: no such module.
        ValueError: it imports a module beside it whose name another module has.
        RuntimeError: executing it failed; the cause carries the user's file and line.
    """
    for foreign in foreign_imports():
        foreign.install()
    origin, file, dotted = with_key(path, key), source_file(path, key), path.removeprefix("pkg://").replace("/", ".")
    if file:
        check_imports(file)
    try:
        return _load_file(file) if file else importlib.import_module(dotted)
    except Exception as error:  # whatever a user's file raises is passed on as the cause
        is_missing = isinstance(error, ModuleNotFoundError) and f"{dotted}.".startswith(f"{error.name}.")
        if not file and is_missing:  # itself, or a package above it
            raise ModuleNotFoundError(f"{origin}: neither a file in {Path.cwd()} nor a module.") from None
        raise RuntimeError(f"Error loading module from {origin}: {type(error).__name__}: {error}") from error


def forget_changed_files() -> None:
    """Has the files that were loaded here executed anew, in a notebook's next run, if one has changed since the last
    call. Modules that were imported before they were loaded are others' too, and stay."""
    last, Neighbours.checked_at = Neighbours.checked_at, time.time()
    files = [Path(sys.modules[name].__file__) for name in Neighbours.loaded if name in sys.modules]
    if any(file.is_file() and file.stat().st_mtime > last for file in files):
        for name in Neighbours.loaded:
            sys.modules.pop(name, None)
        Neighbours.loaded.clear()


def load_modules(paths: str | list[str] | None, key: str = "") -> list[ModuleType]:
    """Returns the modules at one path or several, in order (see `load_module`); None: none."""
    return [load_module(path, key) for path in ([paths] if isinstance(paths, str) else paths or [])]


def load_extern_object(path: str, name: str | None, key: str = "") -> Any:
    """Returns the object called `name` in the module at `path`; `key` is the setting that gave it (see `load_module`).

    Raises:
        ValueError: a path without a name.
        AttributeError: the module has no such object; lists the public ones.
    """
    if not name:
        raise ValueError(f"{with_key(path, key)} is given without the name of the object in it: set its `name`.")
    module = load_module(path, key)
    if name not in vars(module) and type(module) is ModuleType:  # other types report themselves what they lack
        public = sorted(k for k, value in vars(module).items() if k[0] != "_" and not isinstance(value, ModuleType))
        origin = with_key(path, key)
        raise AttributeError(f"Object not found in module: {origin} has no {name!r}; it has {', '.join(public)}.")
    return getattr(module, name)


def load_subclass(path: str, name: str | None, base: type, key: str) -> type:
    """Returns the class `name` in the module at `path` (see `load_extern_object`); `key` is the setting that chose it.

    Raises:
        TypeError: it is no subclass of `base`.
        ValueError: it overrides a method of another project's that nothing calls here.
    """
    loaded = load_extern_object(path, name, re.sub("name$", "path", key))
    if not isinstance(loaded, type) or not issubclass(loaded, base):
        needed = f"{base.__module__}.{base.__name__}"
        raise TypeError(f"{key}={name} in {path} is {loaded!r}; it must be a subclass of {needed}.")
    uncalled = {method: why for foreign in foreign_imports() for method, why in foreign.idle_methods().items()}
    for depth, parent in enumerate(loaded.__mro__):
        for method in chain.from_iterable(map(vars, loaded.__mro__[:depth])):
            if reason := uncalled.get(f"{parent.__module__}.{parent.__name__}.{method}"):
                raise ValueError(f"{key}: {loaded.__name__}.{method} is not called here: {reason}.")
    return loaded


def load_named(text: Any, origin: str) -> Any:
    """Loads the object that `text` names, as a.b.Name or file.py:Name; raises ValueError, beginning with `origin`."""
    path, name = split_object(text) if isinstance(text, str) else ("", None)
    if name is None:
        path, _, name = path.rpartition(".")
    if not path or not name:
        raise ValueError(f"{origin} is {text!r}; it must name an object, as package.module.Name or file.py:Name.")
    try:
        return load_extern_object(path, name)
    except (FileNotFoundError, ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"{origin} is {text!r}: {error}") from error


def split_object(text: str) -> tuple[str, str | None]:
    """Returns ("file.py", "Name") of "file.py:Name"; without a name, None in its place."""
    path, _, name = text.rpartition(":")
    return (path, name) if path and name and not name.startswith("//") else (text, None)  # file://… has none


def bind(
    function: Callable,
    offered: Mapping[str, Any],
    required: Mapping[str, Any] | None = None,
    key: str = "",
    *,
    positional: Mapping[str, Any] | None = None,
    settings: str = "kwargs",
) -> partial:
    """Binds a user's `function` (or class) to its arguments; a call of the result, without more of them, runs it.

    It is given `positional` by position, all of `required` by name, and of `offered` what it names, or with **kwargs
    all. Of one name, the first of these counts.

    Raises:
        ValueError: it needs another argument, or does not accept one of `required`, which the config calls `settings`;
            names `key`, the setting that chose it, and what is offered.
    """
    positional = positional or {}
    by_name = {name: value for name, value in offered.items() if name not in positional and accepts(function, name)}
    by_name |= required or {}
    signature = inspect.signature(function)
    try:
        signature.bind(*positional.values(), **by_name)
    except TypeError as error:
        name, file = _name_and_file(function)
        parts = [
            f"{', '.join(positional)} by position" if positional else "",
            f"what it names of {', '.join(offered)}" if offered else "",
            f"{settings}={dict(required or {})}" if required is not None else "",
        ]
        raise ValueError(
            f"{key}: in {file}, {name}{signature} cannot be called: {error}. It is given "
            f"{' and '.join(filter(None, parts))}."
        ) from error
    return partial(function, *positional.values(), **by_name)


def check_reads(cls: type, argument: str, section: str, keys: Mapping[str, Any]) -> None:
    """Raises ValueError if `section` keeps `keys` of the user's, and its class has no `argument` to read them from."""
    if keys and not accepts(cls, argument):
        key, reader = f"{section}.{next(iter(keys))}", callable_name(cls)
        raise ValueError(f"{key} is none of our keys, and {reader} takes no {argument} to read it from: leave it out.")


def accepts(function: Callable, argument: str) -> bool:
    """Says whether `function`, or a class, can be given `argument` by name. What a class takes as **kwargs it hands on
    to its bases, so they are asked."""
    bases = function.__mro__ if isinstance(function, type) else ()
    constructors = [base.__init__ for base in bases if "__init__" in vars(base) and base is not object]
    for constructor in constructors or [function]:
        parameters = inspect.signature(constructor).parameters
        if argument in parameters or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            return argument in parameters
    return True


def check_accepts(key: str, name: str, function: Callable, kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError unless the function that the setting `key` names accepts `kwargs`."""
    if unknown := sorted(argument for argument in kwargs if not accepts(function, argument)):
        raise ConfigError(f"{key}={name} takes no argument {unknown}: its kwargs are {dict(kwargs)}.")


def required_arguments(function: Callable) -> list[str]:
    """Returns the arguments without which `function` cannot be called, in its order."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def is_setting(function: Callable, argument: str) -> bool:
    """Says whether an argument of `function` is a number or a switch with a default: no column is meant by its name."""
    parameter = inspect.signature(function).parameters.get(argument)
    return parameter is not None and parameter.default is not parameter.empty and parameter.default is not None


def callable_name(function: Callable) -> str:
    """Names a function, or an object's class, and its file (in a notebook: its module), for messages."""
    name, file = _name_and_file(function)
    return f"{name} ({file})"


def _name_and_file(function: Callable) -> tuple[str, str]:
    while isinstance(function, partial):
        function = function.func
    owner = function if inspect.isroutine(function) or inspect.isclass(function) else type(function)
    module = sys.modules.get(owner.__module__)  # code that was executed from a text has none
    return owner.__qualname__, (vars(module) if module else {}).get("__file__", str(owner.__module__))


def _load_file(file: Path) -> ModuleType:
    if str(file.parent) not in Neighbours.folders:
        Neighbours.folders.append(str(file.parent))
    importable = _importable_name(file)
    name = importable or f"{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        Neighbours.loaded.add(name)
        Neighbours.files |= {} if importable else {name: file}
    return importlib.import_module(name)  # a thread waits until another has executed all of it


def check_imports(file: Path) -> None:
    """Checks that a file, and those beside it that it imports, get the modules beside them and no others of that name.

    Raises:
        ValueError: `import` gives another module, unless it is Python's own or of FOREIGN; names both files.
    """
    files, checked, folders = [file], set[Path](), [*Neighbours.folders, str(file.parent)]
    while files:
        importer = files.pop()
        checked.add(importer)
        for name in sorted(imported_names(importer) - sys.stdlib_module_names - FOREIGN):
            paths = (file.parent / f"{name}.py", file.parent / name / "__init__.py")
            beside = next((path for path in paths if path.is_file() and is_users(str(path))), None)
            if beside is None or beside in checked:
                continue
            spec = PathFinder.find_spec(name) or PathFinder.find_spec(name, folders)
            spec = sys.modules[name].__spec__ if name in sys.modules else spec
            imported = spec.origin or (spec.submodule_search_locations or ["another module"])[0]
            path = Path(imported).resolve()
            is_same = path == beside or (path.is_file() and path.read_bytes() == beside.read_bytes())  # a copy of it
            if not is_same:
                raise ValueError(f"{importer} imports {name}, which is {imported} here, not {beside}: rename one.")
            files += [beside] if beside.stem == name else []


def imported_names(file: Path) -> set[str]:
    """Returns the modules that a file imports anywhere, by the first part of their names; of a broken file none."""
    try:
        nodes = [*ast.walk(ast.parse(file.read_bytes()))]
    except (SyntaxError, ValueError):
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


def _importable_name(file: Path) -> str | None:
    """Returns the name under which `import` finds this very file, if there is one, without importing anything."""
    importlib.invalidate_caches()
    for root in (Path(entry).resolve() for entry in sys.path):
        if file.suffix == ".py" and file.is_relative_to(root):
            parts = file.relative_to(root).with_suffix("").parts
            if _found_by_import(parts) == file:
                return ".".join(parts)
    return None


def _found_by_import(parts: tuple[str, ...]) -> Path | None:
    """Returns the file that `import a.b` would execute for ("a", "b")."""
    folders, spec = None, None  # None: sys.path
    for depth, part in enumerate(parts, start=1):
        loaded = sys.modules.get(".".join(parts[:depth]))
        spec = PathFinder.find_spec(part, folders) if loaded is None else loaded.__spec__
        if spec is None or (depth < len(parts) and spec.submodule_search_locations is None):
            return None  # no such name, or a module where a package has to be
        folders = spec.submodule_search_locations
    return Path(spec.origin).resolve() if spec is not None and spec.origin else None
