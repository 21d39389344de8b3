"""Makes a checked, typed, read-only config of a yaml file and key=value overrides, and commands that take one.

Hydra composes the yaml files and parses the overrides; the result is laid over the schema. A recipe (`recipe=dapo` is
configs/recipe/dapo.yaml) is laid over the yaml of --config-name; a user's folder may have a folder `recipe`, too.
"""

from configs.process import end_on_interrupt, set_environment  # isort: skip

import argparse
import copy
import inspect
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from typing import Any

from hydra import compose as compose_yaml
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from configs.checks import check_config
from configs.errors import ConfigError, did_you_mean, first_line, late_refusals, notice, refusals
from configs.extras import absence, absent_extra_of, commands, present
from configs.import_utils import find, setting_at
from configs.paths import CONFIG_DIR, expand_home, options
from configs.schema import Config
from configs.settings import (
    Keys,
    assign,
    check_rules,
    check_sections,
    defaults,
    delete,
    free_setting,
    is_among,
    is_known,
    keeps_own_keys,
    known_keys,
    leaves,
    safe_settings,
    tell_idle,
    unresolved,
)

NAMED = ("actor_rollout_ref.model.path", "model.path", "env.id", "data.train_files")  # they name a run that has no name
REWARDS = ("custom_reward_function", "functions", "reward_manager", "reward_model.model.path")
ALGORITHM = ("algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode", "trainer.seed")
LEARNT_FROM = (*NAMED, "env.path", "env.name", "env.kwargs", *(f"reward.{name}" for name in REWARDS), *ALGORITHM)
RESTARTS = "trainer.max_restarts"
OPENERS = ("path", "env.id")  # settings that decide which keys other sections take, so they are set first


def command(
    name: str,
    schema: type,
    check: Callable[[Any], None],
    description: str | None,
    run: str,
    check_early: Callable[[Any], None] | None = None,
) -> Callable[..., None]:
    """Makes the `main` of an entry point, which composes and checks a config, then imports `run` and calls it.

    Args:
        name: the yaml file that is read without --config-name; it and others stand beside the `schema`.
        check: raises ConfigError for settings that contradict each other.
        run: the name of a function of the config, "module.function".
        check_early: raises ValueError for what cannot work here, before `run` is imported, which takes seconds.
    """

    def main(argv: list[str] | None = None) -> None:
        if argv is None:
            end_on_interrupt()
        set_environment()
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv, name, description, yaml_folder(schema))

        def start(config: Any) -> None:
            with refusals():
                if check_early:
                    check_early(config)
            if argv is None and setting_at(config, RESTARTS):
                config = find("optional", RESTARTS)(config)  # comes back in the process that is to run
            with late_refusals():
                module, _, function = run.rpartition(".")
                getattr(import_module(module), function)(config)

        with refusals():
            sweep = find("optional", "--multirun") if arguments.multirun else None
            config = None if sweep else checked_config(arguments, schema, check)
        if sweep:
            sweep(arguments, partial(checked_config, schema=schema, check=check), start)
        else:
            start(config)

    return main


@dataclass
class Arguments:
    """The command line of every entry point."""

    config_name: str
    config_dir: Path
    overrides: list[str]
    print_config: bool
    multirun: bool = False
    settings: Mapping[str, Any] | None = None  # in place of a yaml file


def yaml_folder(schema: type) -> Path:
    """Returns the folder of the shipped yaml files of a schema: they stand beside it."""
    return Path(inspect.getfile(schema)).resolve().parent


def parse_arguments(
    argv: list[str], default_config: str, description: str | None, folder: Path = CONFIG_DIR
) -> Arguments:
    """Parses Hydra's everyday flags; the help lists the yaml files of `folder`."""
    shipped, of_core = sorted(path.stem for path in folder.glob("*.yaml")), folder == CONFIG_DIR
    recipes = f"recipe=NAME lays an algorithm over one: {', '.join(options('recipe'))}. " if of_core else ""
    schema = "configs/schema.py" if of_core else f"extras/{folder.name}/settings.py"
    help_text = textwrap.fill(
        f"configs: {', '.join(shipped)}. {recipes}Any setting is changed as key=value; "
        f"--cfg job prints them all; {schema} explains each.",
        width=80,
    )
    command_list = "".join(f"\n{name}\n    {text}" for name, text in commands()) if of_core else ""
    parser = argparse.ArgumentParser(
        description=description,
        epilog=help_text + (command_list and f"\n\nother commands, each with --help:{command_list}"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config-name", "-cn", default=default_config, metavar="NAME", help="a yaml (%(default)s)")
    parser.add_argument("--config-path", "--config-dir", "-cd", metavar="DIR", help="folder of your own yaml files")
    parser.add_argument("--cfg", choices=("job",), help="print the composed config and exit")
    parser.add_argument("--multirun", "-m", action="store_true", help="a run for each value of key=a,b or key=range(3)")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        key, _, value = unknown[0].lstrip("-").partition("=")
        parser.error(f"{unknown[0]}: a setting is given as key=value, without dashes: {key}={value or '…'}")
    config_dir = Path(arguments.config_path).expanduser() if arguments.config_path else folder
    name = arguments.config_name.removesuffix(".yaml")
    if not config_dir.is_absolute() or config_dir == folder:  # relative to main_ppo.py: verl's yaml
        exists = (config_dir / f"{name}.yaml").is_file()
        if not exists and any(kind.has_yaml(name, default_config) for kind in kinds_of_keys()):
            notice(f"--config-name {name} is one of verl's: {default_config} is read in its place.")
            name, config_dir = default_config, folder
    return Arguments(name, config_dir.resolve(), arguments.overrides, arguments.cfg == "job", arguments.multirun)


def load_config(arguments: Arguments, schema: type) -> Any:
    """Composes, checks and freezes an instance of the `schema` dataclass."""
    composed, given = compose_dict(arguments, schema)
    try:
        if OmegaConf.select(composed, "trainer.experiment_name", default="no run") is None:
            composed.trainer.experiment_name = name_of_experiment(composed, arguments.overrides)
        config = OmegaConf.to_object(composed)
        note_environment(composed)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'config'}: {first_line(error)}") from error
    check_rules(config)
    check_sections(config, config)
    tell_idle(composed, given)
    if arguments.print_config:
        print(OmegaConf.to_yaml(OmegaConf.create(safe_settings(config))), end="")
        raise SystemExit(0)
    return config


def compose(
    source: str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    folder: str | Path = CONFIG_DIR,
    takes_objects: bool = False,
) -> Config:
    """Composes and checks a config without a command line: `main.run(compose("frozenlake", ["trainer.seed=1"]))`.

    Args:
        source: the name of a yaml file, or settings: a dict or DictConfig, nested or by dotted keys.
        takes_objects: whether `main.run` is given data sets, and settings need name none.
    """
    name, settings = (source, None) if isinstance(source, str) else ("ppo_trainer", source)
    arguments = Arguments(name, Path(folder).absolute(), list(overrides), print_config=False, settings=settings)
    return checked_config(arguments, Config, partial(check_config, takes_objects=takes_objects))


def checked_config(arguments: Arguments, schema: type, check: Callable[[Any], None]) -> Any:
    """Loads a config that a run can start from. Raises ConfigError, also for settings that contradict each other."""
    config = load_config(arguments, schema)
    check_is_whole(arguments, config)
    check(config)
    return config


def note_environment(composed: DictConfig) -> None:
    """Notes which settings name variables of the environment, for whoever writes them down."""
    for key, raw in leaves(composed):
        if "${oc.env:" in str(raw) and not key.endswith("model.path"):  # by which a checkpoint is known
            value = OmegaConf.select(composed, key)
            unresolved[key] = raw, OmegaConf.to_object(value) if OmegaConf.is_config(value) else value


def name_of_experiment(composed: DictConfig, overrides: list[str]) -> str:
    """Names a run after its model and its data, with a digest of all that it learns from, of algorithm and seed: no
    other experiment goes on from its weights, and the same command does."""
    selected = {key: OmegaConf.select(composed, key) for key in LEARNT_FROM}
    values = {key: OmegaConf.to_object(item) if OmegaConf.is_config(item) else item for key, item in selected.items()}
    values["recipe"] = [text for text in overrides if text.lstrip("+").startswith("recipe")]
    firsts = [value[0] if isinstance(value, list) else value for value in map(values.get, NAMED) if value]
    words = [re.sub(r"[^\w.-]", "_", Path(first).name) for first in firsts]
    return "_".join([*words, sha256(repr(values).encode()).hexdigest()[:6]]) if words else "default"


def compose_dict(arguments: Arguments, schema: type) -> tuple[DictConfig, set[str]]:
    """Composes all settings: the schema's defaults, over them the yaml file, over that the overrides; and returns the
    keys that the user gives, by overrides or a yaml that is not ours."""
    overrides = [parse_override(text) for text in arguments.overrides if text.strip()]  # bash gives "" for "$EMPTY"
    chosen, settings = choose_groups(overrides, arguments.config_dir)
    config = read_yaml(arguments, chosen)
    translators = [kind(schema) for kind in kinds_of_keys()]
    file = arguments.config_dir / f"{arguments.config_name.removesuffix('.yaml')}.yaml"
    is_shipped = file.resolve().parent == yaml_folder(schema) and arguments.settings is None
    of_user = {} if is_shipped else dict(leaves(config if arguments.settings else OmegaConf.load(file)))
    shipped = {key: value for key, value in leaves(config) if key not in of_user}
    for keys in translators:
        keys.translate_yaml(config, settings, str(file))
    for override in settings:
        apply_override(config, override, schema, translators)
        for keys in translators:
            keys.translate_override(config, override)
    for keys in translators:
        keys.tell()
    base = copy.deepcopy(defaults(schema))
    plain = [override.key_or_group for override in overrides if not override.is_add() and not override.is_force_add()]
    for key, value in sorted(leaves(config), key=lambda leaf: not leaf[0].endswith(OPENERS)):
        set_checked(base, key, expand_home(value), plain)
    overridden = {override.key_or_group for override in settings}
    return base, {key for key, value in leaves(config) if key in overridden or (key, value) not in shipped.items()}


def check_is_whole(arguments: Arguments, config: Any) -> None:
    """Raises ConfigError for a yaml that only changes others, or is only their base and not completed by overrides."""
    name, folder = arguments.config_name.removesuffix(".yaml"), arguments.config_dir
    kind, slash, option = name.partition("/")
    if slash and options(kind, folder):
        raise ConfigError(f"--config-name {name}: this is a {kind}: --config-name frozenlake {kind}={option}.")
    files = [path for path in sorted(folder.glob("*.yaml")) if path.is_file()]
    names = [path.stem for path in files if f"defaults: [{name},".encode() in path.read_bytes()]
    if not names or config.env.id or config.data.train_files:
        return
    if not any(OmegaConf.select(read_yaml(arguments, {}), key) for key in ("env.id", "data.train_files")):
        raise ConfigError(
            f"--config-name {name}: it is the base of {', '.join(names)}: name one, or set env.id or data.train_files."
        )


def read_yaml(arguments: Arguments, chosen: dict[str, Any]) -> DictConfig:
    """Reads the named yaml file with its `defaults:` list, and over it the files `chosen` of groups (recipe: dapo).

    Files that a user's folder does not have are taken from the shipped configs.
    """
    if arguments.settings is not None:
        return nest_keys(arguments.settings)
    folder, name = arguments.config_dir, arguments.config_name.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        known = sorted(path.stem for path in folder.glob("*.yaml"))
        raise ConfigError(
            f"--config-name {name}: there is no {name}.yaml in {folder}.{did_you_mean(name, known)} It holds: "
            f"{', '.join(known) or 'no yaml file'}; --config-path names another folder."
        )
    check_choices(chosen, folder)
    search = [] if folder == CONFIG_DIR else [f"hydra.searchpath=[file://{CONFIG_DIR}]"]
    try:
        with warnings.catch_warnings(action="ignore"), initialize_config_dir(str(folder), version_base=None):
            composed = compose_yaml(name, search, return_hydra_config=True)  # warns where a defaults list has no _self_
            if chosen:
                present = composed.hydra.runtime.choices  # those in the defaults list are replaced there
                groups = filter(None, (choice(*item, present) for item in chosen.items()))
                composed = compose_yaml(name, [*search, *groups])
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{folder / name}.yaml cannot be read: {error}") from error
    OmegaConf.set_struct(composed, False)
    composed.pop("hydra", None)
    return composed


def nest_keys(settings: Mapping[str, Any]) -> DictConfig:
    """Returns settings, some by dotted keys, as yaml would nest them; interpolations stay."""
    plain = OmegaConf.to_container(settings) if isinstance(settings, DictConfig) else settings
    config = OmegaConf.create()
    for key, value in plain.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def parse_override(text: str) -> Override:
    """Parses one `key=value`; a value that Hydra's grammar cannot read (~, parentheses, = in a path) is a text."""
    key, equals, value = text.partition("=")
    if not key or not (equals or key.startswith("~")):
        raise ConfigError(f"'{text}' is not of the form key=value, without spaces: trainer.total_epochs=3.")
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        if value.startswith(("[", "{", "'", '"')):
            raise ConfigError(
                f"cannot read {text}: {first_line(error)}. In a list, a text with ~, (, ), = or a comma stands in "
                "quotes: 'data.train_files=[\"a (1).jsonl\"]'."
            ) from error
        override = read_as_text(parser, key, value)
    if override.is_sweep_override():
        raise ConfigError(f"{text}: -m runs each of them. A text with a comma stands in quotes: '{key}=\"{value}\"'.")
    return override


def read_as_text(parser: OverridesParser, key: str, value: str) -> Override:
    quoted = value.replace("'", r"\'")
    try:
        return parser.parse_override(f"{key}='{quoted}'")
    except HydraException as error:
        raise ConfigError(f"cannot read {key}={value}: {first_line(error)}.") from error


def choose_groups(overrides: list[Override], folder: Path) -> tuple[dict[str, Any], list[Override]]:
    """Splits overrides into files chosen of groups (recipe: dapo), which are laid first wherever they stand, and
    settings. A choice among another project's files has no effect."""
    chosen, settings = {}, []
    for override in overrides:
        group, package = override.key_or_group, override.package
        option = None if override.is_delete() else override.value()
        if options(group, folder):
            chosen[group if package in (None, group) else f"{group}@{package}"] = option
        elif reason := next(filter(None, (keys.idle_choice(group, package, option) for keys in kinds_of_keys())), None):
            notice(f"{override.input_line} has no effect: {reason}.")
        else:
            settings.append(override)
    return chosen, settings


def check_choices(chosen: dict[str, Any], folder: Path) -> None:
    """Raises ConfigError if a file `chosen` of a group (recipe: dapo; None: no file) does not exist; says what stands
    for it, or which has nearly its name."""
    for kind, option in chosen.items():
        if option is not None and option not in (known := options(group := kind.partition("@")[0], folder)):
            name = str(option).lower()
            advice = [*filter(None, (keys.stand_in(group, name) for keys in kinds_of_keys()))]
            advice += [f"Did you mean '{near}'?" for near in get_close_matches(name, known, n=1, cutoff=0.75)]
            sentences = f"{kind}={option}: no such {kind}.", *advice[:1], f"There are {', '.join(known)}."
            raise ConfigError(" ".join(sentences))


def choice(kind: str, option: str | None, present: Mapping[str, str]) -> str:
    """Writes the choice of a group's file, or of none, in Hydra's grammar: replaces, removes or adds it."""
    if option is None:
        return f"~{kind}" if kind in present else ""
    return f"{'' if kind in present else '+'}{kind}={option}"


def kinds_of_keys() -> list[type[Keys]]:
    """Returns the translators that this copy has, in the order in which they translate."""
    return [find("keys", name) for name in present("keys")]


def apply_override(config: DictConfig, override: Override, schema: type, translators: list[Keys]) -> None:
    """Sets `key=value`; Hydra's `+key=value` and `++key=value` mean the same here, `~key` restores the default."""
    key = override.key_or_group
    if not override.is_delete():
        if override.value() == "???":
            raise ConfigError(f"{key} is ???, which stands for a value that you have to give: set it.")
        OmegaConf.update(config, key, override.value(), force_add=True)
    elif not delete(config, key):
        is_ours = is_known(key, schema) or is_known(f"{key}.", schema)
        if not is_ours and not any(keys.knows(key) for keys in translators):
            raise ConfigError(f"~{key}: nothing sets this key, so there is nothing to take back.", key)
        notice(f"~{key} has no effect: nothing sets it, so it has its default.")


def set_checked(base: DictConfig, key: str, value: Any, plain: list[str]) -> None:
    """Sets one key of the schema; below a free-form section (`reward_kwargs`, `env.kwargs`, …) any key is new."""
    node, parts, closed = base, key.split("."), ""
    try:
        for depth, part in enumerate(parts[:-1]):
            node, rest = node[part], parts[depth + 1 :]
            if not isinstance(node, DictConfig):
                raise ConfigKeyError(f"{part} is not a section")
            if rest[0] not in node and (free := free_setting(node)):
                section = ".".join(parts[: depth + 1])
                if not keeps_own_keys(base, section, free[1], key, plain):
                    if not is_among(key, plain):
                        condition = ", and env.id none" if section == "data" and "env" in base else ""
                        closed = f" A key of your own is kept where {section}.{free[1]} names your file{condition}."
                    raise ConfigKeyError(f"{rest[0]} is of no file")
                if free[1] is not True:  # reward_kwargs are arguments, which the manager takes or refuses
                    known = [f"{section}.{name}" for name in node if name != free[0]]
                    near = did_you_mean(f"{section}.{rest[0]}", known)
                    notice(f"{key} is none of our keys: it is kept for the class that {section}.{free[1]} names.{near}")
                node = node[free[0]]
            if node._metadata.object_type is dict:
                OmegaConf.update(entry := OmegaConf.create(), ".".join(rest), value, force_add=True)
                return node.merge_with(entry)  # which gives entries the type that the dict may have
        assign(node, parts[-1], value)
    except ConfigKeyError:
        if options(parts[0]):
            raise ConfigError(
                f"the {parts[0]} sets '{key}' below itself: '# @package _global_' must be its first line."
            ) from None
        if extra := absent_extra_of(key):
            raise ConfigError(f"{key}: {absence(extra)}", key) from None
        suggestion = did_you_mean(key, [*known_keys(base), "--config-name"])
        raise ConfigError(f"unknown key '{key}'.{suggestion} --cfg job lists them all.{closed}", key) from None
    except OmegaConfBaseException as error:
        if OmegaConf.get_type(node) is dict:
            raise ConfigError(f"{key}={value!r}: {first_line(error)}.", key) from error
        if OmegaConf.is_dict(node[parts[-1]]):
            raise ConfigError(f"{key}={value!r}: {key} is a section; set the keys in it, {key}.…=….") from error
        reason = "it cannot be null" if value is None else first_line(error)
        help_text = OmegaConf.get_type(node).__dataclass_fields__[parts[-1]].metadata["help"]
        raise ConfigError(f"{key}={value!r}: {reason}. {key}: {help_text}") from error
