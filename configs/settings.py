"""Declares settings with default, rules and meaning in one line, and sections whose values are set only once.

Below: what a schema and a config hold, by dotted keys, how a config is written down without secrets, and the hook that
translates keys of other projects."""

import re
from collections.abc import Collection, Iterator, KeysView, Mapping, Sequence
from dataclasses import FrozenInstanceError, asdict, field, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from math import isnan
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from configs.errors import ConfigError, did_you_mean, first_line, notice

EACH_EPOCH, LAST = "after_each_epoch", "last"  # for a number of steps
SECRET, MASK = re.compile(r"(?i)(key|token|password|secret)$"), "***"
SECRET_IN_DICT = re.compile(r"""(?i)((?:key|token|password|secret)["']?\s*:\s*)("[^"]*"|'[^']*'|[^\s,}\]]+)""")
PASSWORD_IN_URL = re.compile(r"(://[^/@\s:$]*:)[^/@\s$]+(?=@)")
FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\w+\}")
unresolved: dict[str, tuple[Any, Any]] = {}  # by dotted key: what names variables of the environment, and its value


def setting(default: Any, help: str, **rules: Any) -> Any:
    """Declares a config field. `rules`: `choices` (a tuple), `ge`, `gt`, `le`, `lt` (bounds), `texts` (one or a list),
    `filled` (a text that says something), `steps` (a whole number, or one of these words).

    None always passes a rule. `free="NAME"` on a dict: the section accepts unknown keys where its setting NAME is set,
    which names a file of the user's, and keeps them in this dict; `free=True`: always.
    """
    metadata = {"help": help, **rules}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def group(cls: type, help: str, **overrides: Any) -> Any:
    """Declares a nested section; `overrides` change its defaults at this place."""
    return field(default_factory=lambda: cls(**overrides), metadata={"help": help})


def own_keys(section: str, opener: str) -> dict[str, Any]:
    """Declares the setting that keeps a user's keys in `section`, once the setting `opener` names a file."""
    return setting({}, f"Keys of your own: {section}.NAME=… is kept here; your class reads config.NAME.", free=opener)


def assign(section: DictConfig, name: str, value: Any) -> None:
    """Sets a setting of `section`, also to a list of dataclass entries, which OmegaConf would refuse as dicts.

    Raises:
        OmegaConfBaseException: the section has no such setting, or the value is of another type.
    """
    if not isinstance(value, list) or not any(isinstance(item, dict) for item in value):
        section[name] = value
        return
    try:
        section.merge_with({name: value})
    except ConfigKeyError as error:  # a key of an entry, and not `name`
        if name not in section:
            raise
        raise ValidationError(str(error).splitlines()[0]) from error


def free_setting(section: DictConfig) -> tuple[str, str | bool] | None:
    """Returns the setting of a section that keeps unknown keys, if it has one, and that which has to be set first."""
    kind = OmegaConf.get_type(section)
    rules = {item.name: item.metadata.get("free") for item in fields(kind)} if is_dataclass(kind) else {}
    return next(((name, opener) for name, opener in rules.items() if opener), None)


def keeps_own_keys(base: DictConfig, section: str, opener: str | bool, key: str, plain: list[str]) -> bool:
    """Says whether `section` takes `key`, which is none of ours: its setting `opener` names a file of the user's.

    Below data, where slips are likelier, the key must not be given without a plus, nor rows come from an environment.
    """
    if opener is True:
        return True
    if section == "data" and (OmegaConf.select(base, "env.id") or is_among(key, plain)):
        return False
    return OmegaConf.select(base, f"{section}.{opener}") is not None


def is_among(key: str, keys: list[str]) -> bool:
    """Says whether `key` is one of `keys`, or below one."""
    return any(f"{key}.".startswith(f"{parent}.") for parent in keys)


class Readable:
    """Makes attributes readable as in verl's configs: config.get(name, default), config[name], {**config}."""

    def settings(self) -> dict[str, Any]:
        """Returns all attributes that can be read, by name."""
        return vars(self)

    def get(self, name: str, default: Any = None) -> Any:
        return self.settings().get(name, default)

    def __getitem__(self, name: str) -> Any:
        return self.settings()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings())

    def keys(self) -> KeysView[str]:
        return self.settings().keys()


class Frozen(Readable):
    """Allows each setting to be set once: configs that are rewritten during a run are the bug users report most.

    A class says in `switches` which settings turn others on, NAME or NAME=VALUE,VALUE: "NAME: OTHER OTHER; …".
    """

    switches = ""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in (known := self.__dataclass_fields__):
            raise FrozenInstanceError(f"{type(self).__name__} has no setting '{name}'.{did_you_mean(name, [*known])}")
        if name in self.__dict__:
            raise FrozenInstanceError(f"config is read-only after start-up: {type(self).__name__}.{name}")
        super().__setattr__(name, value)

    def check(self, config: Any, key: str) -> None:
        """Raises ConfigError where this section contradicts itself or another of `config`; `key` names it.

        A class that overrides it calls super().check, as an extra's settings may stand beside the core's in a section.
        """


class Open(Frozen):
    """Keeps keys of the user's beside its own, in the setting that `keeps` names."""

    keeps = "extras"

    def settings(self) -> dict[str, Any]:
        return vars(self)[self.keeps] | vars(self)

    def __getattr__(self, name: str) -> Any:
        """Returns a key of the user's: Python calls this for names that are not fields."""
        extras = vars(self).get(self.keeps, {})  # not there while a copy is made
        if name not in extras:
            raise AttributeError(f"{type(self).__name__} has no {name!r}; it has {', '.join([*vars(self), *extras])}")
        return extras[name]


def with_settings(section: Any, settings: dict[str, Any]) -> Any:
    """Returns a copy of `section` (a dataclass of the config) with other values at these dotted keys."""
    below: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        name, _, rest = key.partition(".")
        below.setdefault(name, {})[rest] = value
    changed = {name: new[""] if "" in new else with_settings(section[name], new) for name, new in below.items()}
    return replace(section, **changed)


@cache
def defaults(schema: type) -> DictConfig:
    """Returns the defaults of `schema`. Cached, because OmegaConf takes six times as long as a copy."""
    return OmegaConf.structured(schema)


def leaves(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of all that is set; interpolations stay interpolations."""
    for name in config:
        key = f"{prefix}{name}"
        value = config._get_node(name)
        if isinstance(value, DictConfig) and not value._is_none() and not value._is_interpolation():
            yield from leaves(value, f"{key}.")
        else:
            yield key, OmegaConf.to_container(value) if OmegaConf.is_config(value) else value._value()


def tell_idle(config: DictConfig, given: Collection[str]) -> None:
    """Tells which of the `given` settings, a user's, have no effect, as a switch is off that is not `given` as well."""
    idle: dict[str, list[str]] = {}
    for key in sorted(given):
        switch = switch_above(config, key)
        if switch is not None and switch.partition("=")[0] not in given:
            idle.setdefault(switch, []).append(key)
    for switch, keys in idle.items():
        notice(f"without {switch.replace(',', ' or ')}, nothing reads {', '.join(keys)}.")


def switch_above(config: DictConfig, key: str) -> str | None:
    """Returns the switch that a setting is under and that is off, KEY or KEY=VALUE,VALUE; None: there is none."""
    node, section = config, ""
    for name in key.split("."):
        if name not in node:  # a key of the user's
            return None
        kinds = (kind for kind in OmegaConf.get_type(node).__mro__ if issubclass(kind, Frozen))
        rules = [rule.split(": ") for kind in kinds for rule in kind.switches.split("; ") if rule]
        for switch in (switch for switch, names in rules if name in names.split()):
            setting, _, values = switch.partition("=")
            value = OmegaConf.select(node, setting)
            if not (value in values.split(",") if values else value):
                return f"{section}{switch}"
        node, section = node._get_node(name), f"{section}{name}."
    return None


def delete(config: DictConfig, key: str) -> bool:
    """Removes a key, or a section; returns whether it was there."""
    parent_key, _, name = key.rpartition(".")
    parent = OmegaConf.select(config, parent_key) if parent_key else config
    return OmegaConf.is_dict(parent) and parent._content.pop(name, None) is not None


def known_keys(section: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yields every key of the schema; a free-form section counts as one; SECTION.* stands for any further key."""
    for name in section:
        node = section._get_node(name)
        if isinstance(node, DictConfig) and OmegaConf.get_type(node) is not dict:
            yield from known_keys(node, f"{prefix}{name}.")
            if (free := free_setting(node)) and free[1] is True:
                yield f"{prefix}{name}.*"
        else:
            yield f"{prefix}{name}"


def is_known(key: str, schema: type) -> bool:
    """Says whether a config of the class `schema` has this key, or a free-form section that it is below; `section.`
    asks for a section."""
    known, parts = keys_of(schema), key.split(".")
    if key.endswith("."):
        return any(name.startswith(key) for name in known)
    starts = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    new = (start for section, start in pairwise(starts) if f"{section}.*" in known)
    return any(start in known for start in starts) or any(not is_known(f"{start}.", schema) for start in new)


@cache
def keys_of(schema: type) -> frozenset[str]:
    return frozenset(known_keys(defaults(schema)))


def safe_settings(config: Any) -> dict[str, Any]:
    """Returns all settings as they may be written down: without secrets, and with variables by their names."""
    return without_secrets(asdict(config), type(config))


def without_secrets(value: Any, schema: type, key: str = "") -> Any:
    """Masks the secrets in a setting, or in a section; what was read from the environment is named instead."""
    raw, resolved = unresolved.get(key, (None, None))
    if raw is not None and value == resolved:
        value = raw
    if isinstance(value, Mapping):
        return {name: without_secrets(item, schema, f"{key}.{name}".lstrip(".")) for name, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item, schema, key) for item in value]
    if value is not None and is_secret(key, schema) and not FROM_ENVIRONMENT.fullmatch(str(value)):
        return MASK
    return PASSWORD_IN_URL.sub(rf"\1{MASK}", value) if isinstance(value, str) else value


def words_without_secrets(words: Sequence[str], schema: type) -> list[str]:
    """Masks the secrets in a command line of key=value."""
    masked = []
    for word in words:
        key, equals, value = word.partition("=")
        value = SECRET_IN_DICT.sub(rf"\1{MASK}", without_secrets(value, schema, key.lstrip("+~-")))
        masked.append(f"{key}{equals}{value}")
    return masked


def is_secret(key: str, schema: type) -> bool:
    """Says whether a setting is a secret, by its name. The schema's own that end in _key are names of columns."""
    return bool(SECRET.search(key)) and (key not in keys_of(schema) or key.endswith("api_key"))


RULES = {
    "choices": (lambda value, choices: value in choices, "must be one of {}"),
    "ge": (lambda value, bound: value >= bound, "must be at least {}"),
    "gt": (lambda value, bound: value > bound, "must be above {}"),
    "le": (lambda value, bound: value <= bound, "must be at most {}"),
    "lt": (lambda value, bound: value < bound, "must be below {}"),
    "filled": (lambda value, _: value.strip() != "", "must not be empty"),
    "texts": (
        lambda value, _: all(isinstance(item, str) for item in (value if isinstance(value, list) else [value])),
        "must be a text or a list of texts",
    ),
    "jinja": (lambda value, _: "{" in value, "is no Jinja template: it has no {{{{ … }}}}"),
    "steps": (lambda value, words: value in words or type(value) is int, "must be a whole number, or {}"),
}


def check_sections(section: Any, config: Any, key: str = "") -> None:
    """Has each section of `config` check itself, the inner ones first."""
    for item in fields(section):
        if is_dataclass(value := getattr(section, item.name)):
            check_sections(value, config, f"{key}.{item.name}".lstrip("."))
    if isinstance(section, Frozen):
        section.check(config, key)


def check_rules(config: Any, prefix: str = "") -> None:
    """Raises ConfigError for a value that breaks a rule beside its default."""
    for item in fields(config):
        key, value = f"{prefix}{item.name}", getattr(config, item.name)
        if is_dataclass(value):
            check_rules(value, f"{key}.")
            continue
        if isinstance(value, float) and isnan(value):
            raise ConfigError(f"{key}=nan is no number. {key}: {item.metadata['help']}")
        for rule, (holds, words) in RULES.items():
            if rule in item.metadata and value is not None and not holds(value, item.metadata[rule]):
                bound = item.metadata[rule]
                bound = ", ".join(map(str, bound)) if isinstance(bound, tuple) else bound
                raise ConfigError(f"{key}={value!r} {words.format(bound)}. {key}: {item.metadata['help']}")


def lay_over(schema: type, values: Mapping[str, Any], config: Any, key: str) -> Any:
    """Makes a section of the class `schema`, whose place is `key`: `values` over its defaults, which may name settings
    of `config`; raises ConfigError as for one of the schema."""
    try:
        node = OmegaConf.merge(defaults(schema), values)
        node._set_parent(OmegaConf.structured(config))
        section = OmegaConf.to_object(node)
    except ConfigKeyError as error:
        unknown, known = f"{key}.{error.full_key}", [f"{key}.{name}" for name in known_keys(defaults(schema))]
        raise ConfigError(f"unknown key '{unknown}'.{did_you_mean(unknown, known)}", unknown) from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"{key}.{error.full_key}: {first_line(error)}") from error
    check_rules(section, f"{key}.")
    check_sections(section, config, key)
    return section


class Keys:
    """Translates settings that are no keys of the schema, such as another project's; one object a composition.

    Subclasses are of the kind `keys` (configs/extras.py). What they leave as it is, the schema judges.
    """

    def __init__(self, schema: type) -> None:
        self.schema = schema

    @staticmethod
    def has_yaml(name: str, default: str) -> bool:
        """Says whether --config-name=name, which is no file here, stands for ours, `default`."""
        return False

    @staticmethod
    def idle_choice(group: str, package: str | None, option: Any) -> str | None:
        """Returns why the choice group@package=option of a file has no effect; None: it is not known."""
        return None

    @staticmethod
    def stand_in(group: str, option: str) -> str | None:
        """Returns what to use for the file `option` of a group, which is not here; None: it is not known."""
        return None

    def knows(self, key: str) -> bool:
        """Says whether `key` is one that is translated."""
        return False

    def translate_yaml(self, config: DictConfig, overrides: Sequence[Any], file: str) -> None:
        """Translates, in place, what a yaml file gives; parsed `overrides` are to follow."""

    def translate_override(self, config: DictConfig, override: Any) -> None:
        """Translates, in place, what one more parsed `override` gave: of two spellings the later wins."""

    def tell(self) -> None:
        """Prints notices of the overrides that were translated."""
