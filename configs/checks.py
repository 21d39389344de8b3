"""Refuses settings that contradict each other, before torch is imported, and summarises those that do not.

`check_config` raises ConfigError; each message names a remedy. Below it: the batch arithmetic and the sampling in one
sentence each.
"""

import tempfile
from pathlib import Path

from configs.errors import ConfigError, notice
from configs.extras import TABLE, check_present, present
from configs.import_utils import split_object
from configs.loader import workers_asked_for
from configs.paths import find_path, source_files
from configs.schema import (
    ActorConfig,
    AgentConfig,
    CheckpointConfig,
    Config,
    CriticConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
)
from configs.threads import worker_threads

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def check_config(config: Config) -> None:
    """Raises ConfigError for settings that contradict each other; each message names a way out."""
    trainer, rollout, env, files = config.trainer, config.actor_rollout_ref.rollout, config.env, config.data.train_files
    if env.id is None and not files and not trainer.val_only:
        raise ConfigError("there is nothing to train on: set data.train_files (docs/data.md) or env.id.")
    if env.id is not None and files:
        raise ConfigError(f"env.id={env.id} and data.train_files={files} are both set: prompts come from one of them.")
    own = config.data.custom_cls
    for key in ("train_files", "val_files") if own.path is None else ():  # a class of the user's may fetch them
        check_sources(f"data.{key}", getattr(config.data, key))
    if own.path is None and own.kwargs:
        raise ConfigError(
            f"data.custom_cls.kwargs holds {sorted(own.kwargs)}, which only a dataset class reads: set its path."
        )
    check_batches(config)
    check_run(trainer, config.actor_rollout_ref.actor.checkpoint, f"{ACTOR}.checkpoint")
    check_engine(rollout.name)
    check_multi_turn(rollout, env.id)
    check_episodes(config)
    check_policy(config)
    if not has_validation(config) and (trainer.test_freq > 0 or trainer.val_only):
        raise ConfigError(
            "trainer.test_freq, val_only: nothing to validate on: set data.val_files, env.val_episodes or env.val_size."
        )
    if not trainer.val_only:  # which only reads there
        check_output_folder(trainer.default_local_dir)


def check_sources(key: str, files: str | list[str] | None) -> None:
    """Raises ConfigError if the setting `key` names a file, folder or glob without any data."""
    for file in [files] if isinstance(files, str) else files or []:
        try:
            _ = str(file).partition(":")[0] in TABLE["source"] or source_files(file)
        except FileNotFoundError as error:
            raise ConfigError(f"{key}={error}") from error


def check_batches(config: Config) -> None:
    rollout, prompts, data = config.actor_rollout_ref.rollout, config.data.train_batch_size, config.data
    if prompts * rollout.n < 2:
        raise ConfigError(
            f"data.train_batch_size={prompts} × {ROLLOUT}.n={rollout.n} is one sequence a step: raise either."
        )
    for key, role in ((ACTOR, config.actor_rollout_ref.actor), ("critic", config.critic)):
        mini, betas = role.ppo_mini_batch_size, role.optim.betas
        if mini is not None and mini > prompts:
            raise ConfigError(
                f"{key}.ppo_mini_batch_size={mini} is above data.train_batch_size. Set it to at most {prompts}."
            )
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"{key}.optim.betas={betas} must be two numbers in [0, 1), e.g. [0.9, 0.999].")
    check_micro_batches(ACTOR, config.actor_rollout_ref.actor, prompts * rollout.n)
    for name, wrong, word in (
        ("prompt", rollout.prompt_length < data.max_prompt_length, "below"),
        ("response", rollout.response_length > data.max_response_length, "above"),
    ):
        whole = f"data.max_{name}_length"
        if wrong:
            raise ConfigError(
                f"{ROLLOUT}.{name}_length={rollout[f'{name}_length']} is {word} {whole}="
                f"{data[f'max_{name}_length']}: set {whole} alone, the other follows."
            )


def check_micro_batches(key: str, section: ActorConfig | CriticConfig, sequences: int) -> None:
    if section.use_dynamic_bsz is False and section.ppo_micro_batch_size_per_gpu is None:
        raise ConfigError(
            f"{key}.use_dynamic_bsz=false needs {key}.ppo_micro_batch_size_per_gpu (try {min(8, sequences)}); or null."
        )


def check_token_budgets(config: Config, with_ref: bool, with_critic: bool) -> None:
    """Raises ConfigError unless the longest sequence fits into one pass, wherever passes are cut by tokens."""
    policy, critic, name = config.actor_rollout_ref, config.critic, "log_prob_max_token_len_per_gpu"
    if with_critic:
        check_micro_batches("critic", critic, config.data.train_batch_size * policy.rollout.n)
    longest = config.data.max_prompt_length + policy.rollout.response_length
    for applies, key, budget in (
        (cuts_by_tokens(policy.actor), f"{ACTOR}.ppo_max_token_len_per_gpu", policy.actor.ppo_max_token_len_per_gpu),
        (policy.rollout.log_prob_micro_batch_size_per_gpu is None, f"{ROLLOUT}.{name}", policy.rollout[name]),
        (
            with_ref and policy.ref.log_prob_micro_batch_size_per_gpu is None,
            f"actor_rollout_ref.ref.{name}",
            policy.ref[name],
        ),
        (with_critic and cuts_by_tokens(critic), "critic.ppo_max_token_len_per_gpu", critic.ppo_max_token_len_per_gpu),
    ):
        if applies and budget < longest:
            raise ConfigError(
                f"{key}={budget} is below max_prompt_length + response_length = {longest}: one sequence may not fit. "
                f"Raise it to at least {longest}."
            )


def check_policy(config: Config) -> None:
    rollout, loss = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor.policy_loss
    key = f"{ACTOR}.policy_loss"
    if loss.loss_mode == "dro" and loss.dro_beta is None:
        raise ConfigError(f"{key}.loss_mode=dro needs {key}.dro_beta, the weight of the squared log-ratio, e.g. 0.05.")
    if loss.clip_cov_lb >= loss.clip_cov_ub:
        raise ConfigError(f"{key}.clip_cov_lb={loss.clip_cov_lb} must be below {key}.clip_cov_ub={loss.clip_cov_ub}.")
    check_rewards(config)
    key, validation = f"{ROLLOUT}.val_kwargs", rollout.val_kwargs
    given = {name: validation[name] for name in ("do_sample", "temperature") if validation[name] is not None}
    beside = " and ".join(f"{name}={str(value).lower()}" for name, value in given.items())
    if (n := validation.n) > 1 and is_greedy(validation):
        raise ConfigError(
            f"{key}.n={n}{' with ' * bool(given)}{beside} asks for {n} greedy answers to a prompt, which are all the "
            f"same. Set {key}.do_sample=true with a temperature above 0, or {key}.n=1."
        )
    if validation.do_sample is False and validation.temperature:
        notice(f"{key}.do_sample=false takes the likeliest token at any {key}.temperature; without it, that samples.")
    if rollout.do_sample and (rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0):
        notice(
            f"training samples with top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p}: the policy "
            "that samples is then not quite the policy that is trained. top_p=1 top_k=-1 min_p=0 is exact."
        )


def has_validation(config: Config) -> bool:
    env = config.env
    return bool(config.data.val_files) if env.id is None else env.val_episodes > 0 or env.val_size > 0


def check_run(trainer: RunConfig, checkpoint: CheckpointConfig, checkpoint_key: str) -> None:
    """Raises ConfigError for settings of every run that trains, by reinforcement or by examples."""
    asked, by_path = workers_asked_for(trainer), trainer.resume_mode == "resume_path"
    if asked > 1 and trainer.executor == "local":
        raise ConfigError(
            f"trainer.nnodes={trainer.nnodes}, n_gpus_per_node={trainer.n_gpus_per_node}, n_workers_per_node="
            f"{trainer.n_workers_per_node} ask for {asked} workers, and executor=local has one: leave executor null."
        )
    worker_threads(trainer.n_threads)
    if by_path and not trainer.resume_from_path:
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path=…/global_step_N.")
    if not by_path and trainer.resume_from_path:
        raise ConfigError(
            f"trainer.resume_from_path={trainer.resume_from_path} is only read with trainer.resume_mode=resume_path."
        )
    unknown = set(checkpoint.save_contents) - {"model", "optimizer", "extra", "hf_model"}
    if unknown:
        raise ConfigError(
            f"{checkpoint_key}.save_contents holds {sorted(unknown)}: it can hold model, optimizer, extra, hf_model."
        )


def check_output_folder(path: str, key: str = "trainer.default_local_dir") -> None:
    """Raises ConfigError if `path` cannot be written to; makes no folder, for a run may yet be refused."""
    try:
        nearest = next(at for at in (Path(path), *Path(path).absolute().parents) if at.exists() or at.is_symlink())
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(b"a full disk takes a file, but nothing into it")
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be written to ({error.strerror}): name another folder.") from error


def check_engine(name: str) -> None:
    """Raises ConfigError for an engine that is neither in this copy nor a file or module of the user's."""
    if name not in TABLE["engine"] and not find_path(split_object(name)[0]).is_file() and "." not in name:
        known = ", ".join(present("engine"))
        raise ConfigError(f"{ROLLOUT}.name={name} is none of {known}, nor a file or module of a Rollout of yours.")
    check_present("engine", name, f"{ROLLOUT}.name")


def check_multi_turn(rollout: RolloutConfig, env_id: str | None) -> None:
    key, settings = f"{ROLLOUT}.multi_turn", rollout.multi_turn
    files = settings.files()
    others = files.keys() - {"tool_config_path", "function_tool_path"} if env_id is not None else ()
    for name, file in files.items():
        if not find_path(file.rpartition(":")[0] or file).is_file():
            raise ConfigError(f"{key}.{name}={file}: there is no such file (looked in {Path.cwd()}).")
    if files and not settings.enable:
        raise ConfigError(
            f"{key} names {', '.join(files)}, and {key}.enable=false: rows would be answered once. Enable it."
        )
    if settings.enable and not files and rollout.agent == AgentConfig() and env_id is None:
        raise ConfigError(
            f"{key}.enable=true, and there is nobody to talk to: set env.id, {ROLLOUT}.agent, or one of the files of "
            f"{key}, e.g. function_tool_path."
        )
    if others:
        raise ConfigError(
            f"{key} names {', '.join(others)}, and env.id={env_id}: they go with rows. Take one of the two back."
        )


def check_episodes(config: Config) -> None:
    """Raises ConfigError for settings that have no effect on whole episodes of an environment."""
    if config.env.mode != "episode":
        return
    if config.env.id is None:
        raise ConfigError("env.mode=episode: there is no environment to play. Set env.id, e.g. env.id=FrozenLake-v1.")
    source = config.reward.source()
    if source:
        raise ConfigError(
            f"{source}, and env.mode=episode: the environment pays for its episodes. Have it pay otherwise (a "
            "gymnasium wrapper), or train on single states: env.mode=step."
        )
    if config.env.val_size:
        raise ConfigError(f"env.val_size={config.env.val_size}, and env.mode=episode: no single states to validate on.")


def check_rewards(config: Config) -> None:
    rollout, env, shaping = config.actor_rollout_ref.rollout, config.env, config.reward.reward_kwargs
    if config.algorithm.filter_groups.enable and rollout.n < 2:
        raise ConfigError(
            f"algorithm.filter_groups.enable=true with {ROLLOUT}.n={rollout.n}: one sample cannot differ from itself."
        )
    source, manager = config.reward.source(), config.reward.reward_manager
    if manager != type(manager)() and ((env.id and source) or config.reward.functions):
        raise ConfigError(
            f"reward.reward_manager={{path: {manager.path}, name: {manager.name}}} scores answers, "
            f"and {source} scores them: take one of the two back."
        )
    buffer, key = shaping.overlong_buffer_cfg, "reward.reward_kwargs"
    if buffer.enable and buffer.len is not None and buffer.len > shaping.max_resp_len:
        raise ConfigError(
            f"{key}.overlong_buffer_cfg.len={buffer.len} is above {key}.max_resp_len={shaping.max_resp_len}: "
            "leave it null for a fifth of that."
        )


def batch_arithmetic(config: Config) -> str:
    """Describes in one sentence how many prompts, sequences, updates and forward passes a step has."""
    prompts, samples = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    actor = config.actor_rollout_ref.actor
    mini = actor.ppo_mini_batch_size or prompts
    updates = -(-prompts // mini)
    epochs = f", {actor.ppo_epochs} times" if actor.ppo_epochs > 1 else ""
    each = f"{plural(updates, 'update')} of {'up to ' * (prompts % mini > 0)}{mini * samples} sequences"
    by_tokens = cuts_by_tokens(actor)
    size = actor.ppo_max_token_len_per_gpu if by_tokens else actor.ppo_micro_batch_size_per_gpu
    return (
        f"{plural(prompts, 'prompt')} × {plural(samples, 'sample')} = {prompts * samples} sequences a step → "
        f"{each}{epochs} → forward passes of at most {size} {'tokens' if by_tokens else 'sequences'}."
    )


def plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def cuts_by_tokens(config: ActorConfig | CriticConfig) -> bool:
    """Whether a number of tokens limits forward passes, instead of a number of sequences.

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
