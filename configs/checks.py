"""Refuses settings of several sections that contradict each other, and summarises those that do not.

A section refuses what it says itself (`check` in configs/schema.py). Nothing here imports torch.
"""

import ast
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

from configs.errors import ConfigError, did_you_mean, notice
from configs.extras import NEEDS_GROUPS, TABLE, check_present, present
from configs.import_utils import REGISTRIES, load_extern_object, load_module, source_file, split_object
from configs.paths import ROOT, check_model_path, find_path, options, row_bound, source_files
from configs.process import most_gpus
from configs.schema import ActorConfig, AgentConfig, Config, CriticConfig, EnvConfig, SamplingConfig

LIB_KEY = "actor_rollout_ref.model.external_lib"
USERS_FILES = (
    "env.path", "data.custom_cls.path", "data.sampler.class_path",
    "reward.custom_reward_function.path", "reward.reward_manager.path", LIB_KEY, "trainer.cls",
)  # fmt: skip
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REGISTERED = (  # names of functions that users may register: the setting, the kind, and what they write
    ("algorithm.adv_estimator", "estimator", "register_adv_est"),
    (f"{ACTOR}.policy_loss.loss_mode", "policy_loss", "register_policy_loss"),
)


def check_config(config: Config, takes_objects: bool = False) -> None:
    """Raises ConfigError for settings that contradict each other; each message names a way out.

    Args:
        takes_objects: whether the run is given data sets as objects, and settings need name none.
    """
    trainer, env, files, users = config.trainer, config.env, config.data.train_files, config.data.custom_cls
    if env.id is None and not files and not trainer.val_only and not takes_objects:
        raise ConfigError("there is nothing to train on: set data.train_files (docs/data.md) or env.id.")
    if env.id is not None and files:
        raise ConfigError(f"env.id={env.id} and data.train_files={files} are both set: prompts come from one of them.")
    for key in ("train_files", "val_files") if users.path is None else ():  # a user's class may fetch them
        check_sources(f"data.{key}", getattr(config.data, key))
    check_batches(config)
    check_engine(config.actor_rollout_ref.rollout.name)
    check_multi_turn(config)
    check_episodes(config)
    check_rewards(config)
    check_sampling(config)
    validates = bool(config.data.val_files) if env.id is None else env.val_episodes > 0 or env.val_size > 0
    if not validates and not takes_objects and (trainer.test_freq > 0 or trainer.val_only):
        raise ConfigError(
            "trainer.test_freq, val_only: nothing to validate on: set data.val_files, env.val_episodes or env.val_size."
        )
    if not trainer.val_only:  # it only reads that folder
        check_output_folder(trainer.default_local_dir)


def check_early(config: Config) -> None:
    """Raises ValueError or FileNotFoundError for what a command can refuse before torch is imported, which takes
    seconds; the cheap first. Where this can say too little, later checks say the rest."""
    check_model_path(config.actor_rollout_ref.model.path, "actor_rollout_ref.model.path")
    logger_names(config)  # or raises
    check_users_files(config)
    check_gpus(config.trainer.n_gpus_per_node or 0)
    if not loads_files(config):
        check_names(config)
        check_env_id(config.env)
    check_epoch(config)


def check_model_early(config: Any) -> None:
    """Does as `check_early` for a command that only generates: by the sections model and rollout."""
    check_model_path(config.model.path, "model.path")
    check_engine(config.rollout.name, "rollout.name")
    check_users_files(config, ["model.external_lib"])


def check_users_files(config: Any, keys: Sequence[str] = USERS_FILES) -> None:
    """Raises FileNotFoundError or ConfigError if no Python is where one of the settings `keys` names a user's file."""
    for key, path in ((name, path) for name in keys for path in as_list(attrgetter(name)(config))):
        if file := source_file(split_object(path)[0] if key == "trainer.cls" else path, key):
            try:
                ast.parse(file.read_bytes(), file.name)
            except (SyntaxError, ValueError) as error:
                raise ConfigError(f"{key}={path}: {type(error).__name__}: {error}") from error


def as_list(setting: str | list[str] | None) -> list[str]:
    return [setting] if isinstance(setting, str) else list(setting or ())


def loads_files(config: Config) -> bool:
    """Says whether files of the user's are loaded before names are looked up, which those files may register."""
    users = config.actor_rollout_ref.model.external_lib or config.trainer.cls != type(config.trainer).cls
    return bool(users) or any(":" in name for name in logger_names(config))


def check_names(config: Config) -> None:
    """Raises ConfigError for an estimator or a policy loss that nobody has registered, and no extra has."""
    for key, kind, decorator in REGISTERED:
        name, registry = attrgetter(key)(config), REGISTRIES[kind]
        if name not in registry:
            check_present(kind, name, key)
            lowered, loaded = name.lower(), config.actor_rollout_ref.model.external_lib
            is_recipe = lowered in options("recipe") and lowered not in registry
            guess = f" Did you mean recipe={lowered}?" if is_recipe else did_you_mean(lowered, [*registry])
            raise ConfigError(
                f"{key}={name}: there is none of this name.{guess} There are {[*registry]}; one of yours stands under "
                f"@{decorator}({name!r}) in a file that {LIB_KEY} names; it names {loaded or 'none'}."
            )


def logger_names(config: Any) -> list[str]:
    """Lists the loggers of trainer.logger; verl's "file" is the record, which is always written. Raises ConfigError for
    an unknown name, or a missing package, which is called as its logger is."""
    names = [name for name in dict.fromkeys(as_list(config.trainer.logger)) if name != "file"]
    for name in names:
        check_present("logger", name, "trainer.logger")
        if name not in TABLE["logger"] and ":" not in name:
            known = ", ".join([*TABLE["logger"], "file"])
            raise ConfigError(f"trainer.logger has {name!r}: choose from {known}, or name file.py:Class of yours.")
        if name in TABLE["logger"] and name != "console" and find_spec(name) is None:
            raise ConfigError(f"trainer.logger has {name!r}: no such package. `pip install {name}`, or leave it out.")
    return names


def check_gpus(n_gpus: int) -> None:
    if n_gpus > (present := most_gpus()):
        raise ConfigError(
            f"trainer.n_gpus_per_node={n_gpus}: {present} are there, by /dev and CUDA_VISIBLE_DEVICES. Lower it (0: "
            "the CPU), or join a Ray cluster (docs/cluster.md)."
        )


def check_env_id(env: EnvConfig) -> None:
    """Raises ConfigError for an id without a module that gymnasium does not have, where our factory takes it."""
    is_ours = env.name == type(env).name and find_path(env.path).resolve() == ROOT / type(env).path
    if not env.id or ":" in env.id or not is_ours:
        return
    check_id = load_extern_object("custom/gym/world.py", "check_id")
    with suppress(ValueError):
        return check_id(env.id)
    load_module(env.path, "env.path")  # who has changed it may register the id there
    try:
        check_id(env.id)
    except ValueError as error:
        raise ConfigError(f"env.id={error}") from error


def check_epoch(config: Config) -> None:
    """Raises ValueError if the files alone show that no step has a full batch; rows may yet be left out of them."""
    data, size = config.data, config.data.train_batch_size
    by_files = data.custom_cls.path is None and data.sampler.class_path is None and data.dataset == "files"
    trains = config.trainer.action == "train" and not config.trainer.val_only
    if not by_files or not trains or size == type(data).train_batch_size or any(map(data.get, TABLE["sampler"])):
        return
    sources = as_list(data.train_files)
    is_plain = all(source.partition(":")[0] not in TABLE["source"] for source in sources)
    if sources and is_plain:
        rows = sum(row_bound(file, size) for source in sources for file in source_files(source))
        rows = rows if data.train_max_samples < 0 else min(rows, data.train_max_samples)
        if 0 < rows < size:
            raise no_batch_error(size, rows)


def no_batch_error(size: int, rows: float, length_key: str = "data.max_prompt_length") -> ConfigError:
    """Makes the error of an epoch of so many rows that has no batch of this `size`; `length_key` drops long ones."""
    remedy = f"Lower it, or give more rows ({length_key} may drop too many)"
    return ConfigError(f"data.train_batch_size={size} cannot be filled: an epoch has {rows} rows. {remedy}.")


def check_sources(key: str, files: str | list[str] | None) -> None:
    """Raises ConfigError if the setting `key` names a file, folder or glob without any data, or of unknown endings."""
    for file in as_list(files):
        try:
            _ = str(file).partition(":")[0] in TABLE["source"] or source_files(file)
        except (FileNotFoundError, ValueError) as error:
            raise ConfigError(f"{key}={error}") from error


def check_batches(config: Config) -> None:
    rollout, prompts, data = config.actor_rollout_ref.rollout, config.data.train_batch_size, config.data
    if prompts * rollout.n < 2:
        raise ConfigError(
            f"data.train_batch_size={prompts} × {ROLLOUT}.n={rollout.n} is one sequence a step: raise either."
        )
    if rollout.n < 2 and (name := config.algorithm.adv_estimator) in NEEDS_GROUPS:
        raise ConfigError(
            f"{ROLLOUT}.n={rollout.n}: algorithm.adv_estimator={name} compares the samples of one prompt and needs at "
            "least 2 (8 is usual)."
        )
    for name, wrong, word in (
        ("prompt", rollout.prompt_length < data.max_prompt_length, "below"),
        ("response", rollout.response_length > data.max_response_length, "above"),
    ):
        if wrong:
            key, limit = f"data.max_{name}_length", data[f"max_{name}_length"]
            raise ConfigError(
                f"{ROLLOUT}.{name}_length={rollout[f'{name}_length']} is {word} {key}={limit}: set {key} alone."
            )


def check_cuts(config: Config, section: Any, key: str) -> None:
    """Raises ConfigError where a role, whose settings are `section`, at `key`, has mini-batches above a batch, or the
    longest sequence does not fit into a pass that is cut by tokens."""
    values, prompts = vars(section), config.data.train_batch_size
    if (mini := values.get("ppo_mini_batch_size")) and mini > prompts:
        raise ConfigError(
            f"{key}.ppo_mini_batch_size={mini} is above data.train_batch_size. Set it to at most {prompts}."
        )
    longest = config.data.max_prompt_length + config.actor_rollout_ref.rollout.response_length
    for kind in ("ppo", "log_prob"):
        name, by_rows = f"{kind}_max_token_len_per_gpu", f"{kind}_micro_batch_size_per_gpu"
        if name not in values:
            continue
        by_tokens = values[by_rows] is None or values.get("use_dynamic_bsz")
        if by_tokens and values.get("use_dynamic_bsz") is False:
            raise ConfigError(f"{key}.use_dynamic_bsz=false needs {key}.{by_rows}, e.g. 8.")
        if by_tokens and values[name] < longest:
            raise ConfigError(
                f"{key}.{name}={values[name]} is below max_prompt_length + response_length = {longest}: raise it to "
                f"at least {longest}."
            )


def check_sampling(config: Config) -> None:
    rollout, key = config.actor_rollout_ref.rollout, f"{ROLLOUT}.val_kwargs"
    validation = rollout.val_kwargs
    if validation.n > 1 and is_greedy(validation):
        raise ConfigError(
            f"{key}.n={validation.n} asks for greedy answers, all the same: set {key}.do_sample=true and a "
            f"{key}.temperature above 0, or {key}.n=1."
        )
    if validation.do_sample is False and validation.temperature:
        notice(f"{key}.do_sample=false takes the likeliest token at any {key}.temperature; without it, that samples.")
    if rollout.do_sample and (rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0):
        notice(
            f"training samples with top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p}: the policy "
            "that samples is then not quite the policy that is trained. top_p=1 top_k=-1 min_p=0 is exact."
        )


def check_output_folder(path: str, key: str = "trainer.default_local_dir") -> None:
    """Raises ConfigError if `path` cannot be written to; makes no folder, for a run may yet be refused."""
    if "://" in path:
        raise ConfigError(f"{key}={path}: files are written to a disk. Mount it (s3fs, gcsfuse) and name that folder.")
    try:
        folders = Path(path), *Path(path).absolute().parents
        nearest = next(folder for folder in folders if folder.exists() or folder.is_symlink())
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(b"a full disk takes a file, but nothing into it")
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be written to ({error.strerror}): name another folder.") from error


def check_engine(name: str, key: str = f"{ROLLOUT}.name") -> None:
    """Raises ConfigError for an engine that is neither in this copy nor a file or module of the user's."""
    if name not in TABLE["engine"] and not find_path(split_object(name)[0]).is_file() and "." not in name:
        known = ", ".join(present("engine"))
        raise ConfigError(f"{key}={name} is none of {known}, nor a file or module of a Rollout of yours.")
    check_present("engine", name, key)


def check_multi_turn(config: Config) -> None:
    rollout, env_id, key = config.actor_rollout_ref.rollout, config.env.id, f"{ROLLOUT}.multi_turn"
    files = rollout.multi_turn.files()
    if rollout.multi_turn.enable and not files and rollout.agent == AgentConfig() and env_id is None:
        raise ConfigError(
            f"{key}.enable=true and nobody to talk to: set env.id, {ROLLOUT}.agent, or {key}.function_tool_path."
        )
    of_rows = files.keys() - {"tool_config_path", "function_tool_path"}
    if of_rows and env_id is not None:
        raise ConfigError(f"{key} names {', '.join(of_rows)}, for rows, and env.id={env_id}: take one of them back.")


def check_episodes(config: Config) -> None:
    """Raises ConfigError for settings that have no effect on whole episodes of an environment."""
    if config.env.mode != "episode":
        return
    if config.env.id is None:
        raise ConfigError("env.mode=episode: there is no environment to play. Set env.id, e.g. env.id=FrozenLake-v1.")
    if source := config.reward.source():
        raise ConfigError(
            f"{source}, and env.mode=episode: the environment pays for its episodes. Have it pay otherwise (a "
            "gymnasium wrapper), or train on single states: env.mode=step."
        )
    if config.env.val_size:
        raise ConfigError(f"env.val_size={config.env.val_size}, and env.mode=episode: no single states to validate on.")


def check_rewards(config: Config) -> None:
    source, manager = config.reward.source(), config.reward.reward_manager
    if manager != type(manager)() and source and (config.env.id or config.reward.scorer != "functions"):
        raise ConfigError(
            f"reward.reward_manager={{path: {manager.path}, name: {manager.name}}} scores answers, "
            f"and {source} scores them: take one of the two back."
        )


def batch_arithmetic(config: Config) -> str:
    """Describes in one sentence how many prompts, sequences, updates and forward passes a step has."""
    prompts, samples = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    actor = config.actor_rollout_ref.actor
    mini = actor.ppo_mini_batch_size or prompts
    updates = -(-prompts // mini)
    epochs = f", {actor.ppo_epochs} times" if actor.ppo_epochs > 1 else ""
    updates_text = f"{plural(updates, 'update')} of {'up to ' * (prompts % mini > 0)}{mini * samples} sequences"
    by_tokens = cuts_by_tokens(actor)
    size = actor.ppo_max_token_len_per_gpu if by_tokens else actor.ppo_micro_batch_size_per_gpu
    return (
        f"{plural(prompts, 'prompt')} × {plural(samples, 'sample')} = {prompts * samples} sequences a step → "
        f"{updates_text}{epochs} → forward passes of at most {size} {'tokens' if by_tokens else 'sequences'}."
    )


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def cuts_by_tokens(config: ActorConfig | CriticConfig) -> bool:
    """Returns whether a number of tokens limits forward passes, and not one of sequences.

    use_dynamic_bsz decides if it is set; else a given number of sequences goes before the token budget.
    """
    return bool(config.use_dynamic_bsz) or config.ppo_micro_batch_size_per_gpu is None


def sampling_summary(config: Config) -> str:
    """Describes in one sentence how tokens are sampled in training and at validation, whatever a model's files say."""
    rollout = config.actor_rollout_ref.rollout
    return f"training samples {sampling(rollout)}; validation {sampling(rollout.val_kwargs)}."


def sampling(config: SamplingConfig) -> str:
    if is_greedy(config):
        return f"n={config.n}, greedy"
    min_p = f", min_p={config.min_p}" * (config.min_p > 0)
    return f"n={config.n}, temperature={config.draws()[1]}, top_p={config.top_p}, top_k={config.top_k}{min_p}"


def is_greedy(config: SamplingConfig) -> bool:
    return not config.draws()[0]
