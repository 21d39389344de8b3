"""What several settings must agree on, checked before torch is imported, and the batch arithmetic in one sentence."""

from configs.engines import check_engine
from configs.errors import ConfigError
from configs.loader import notice, workers_asked_for
from configs.multi_turn import check_episodes, check_multi_turn
from configs.paths import is_named_source, source_files
from configs.reward_checks import check_rewards
from configs.rollout_correction import RolloutCorrectionConfig, parse_band, parse_rejection
from configs.run_checks import check_output_folder, check_resume, check_save_contents, check_workers
from configs.schema import (
    ActorConfig,
    Config,
    CriticConfig,
    PolicyLossConfig,
    RolloutConfig,
    SamplingConfig,
)


def check_config(config: Config) -> None:
    """Raises ConfigError for settings that contradict each other; each message names a way out."""
    check_data(config)
    check_batches(config)
    check_workers(config.trainer)
    check_engine(config.actor_rollout_ref.rollout, workers_asked_for(config.trainer))
    check_multi_turn(config.actor_rollout_ref.rollout.multi_turn, config.env.id)
    check_episodes(config)
    check_policy(config)
    check_trainer(config)
    if not config.trainer.val_only:  # which only reads there
        check_output_folder(config.trainer.default_local_dir)


def check_data(config: Config) -> None:
    if config.env.id is None and not config.data.train_files:
        raise ConfigError(
            "there is nothing to train on: set data.train_files (docs/data.md says what it may name), or env.id to a "
            "gymnasium environment (python main.py --config-name frozenlake shows one)."
        )
    if config.env.id is not None and config.data.train_files:
        raise ConfigError(
            f"env.id={config.env.id} and data.train_files={config.data.train_files} are both set: prompts come from "
            "one of them. Take one back with env.id=null or data.train_files=null."
        )
    for key in ("train_files", "val_files"):
        files = getattr(config.data, key) or []
        for file in [files] if isinstance(files, str) else files:
            try:
                _ = is_named_source(file) or source_files(file)
            except FileNotFoundError as error:
                raise ConfigError(f"data.{key}={error}") from error
    chosen = config.data.custom_cls
    if chosen.path is None and (unread := sorted(chosen.extras) + sorted(chosen.kwargs)):
        raise ConfigError(
            f"data.custom_cls holds {unread}, which only a dataset class of yours reads, and data.custom_cls.path is "
            "null: set it to a Python file, or take them back."
        )


def check_batches(config: Config) -> None:
    rollout, prompts = config.actor_rollout_ref.rollout, config.data.train_batch_size
    if prompts * rollout.n < 2:
        raise ConfigError(
            f"data.train_batch_size={prompts} × actor_rollout_ref.rollout.n={rollout.n} is one sequence a step, which "
            "has nothing to be compared with: raise either."
        )
    for key, actor in (("actor_rollout_ref.actor", config.actor_rollout_ref.actor), ("critic", config.critic)):
        mini, micro = actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu
        if mini is not None and mini > prompts:
            raise ConfigError(
                f"{key}.ppo_mini_batch_size={mini} is above data.train_batch_size={prompts}: both count prompts, and "
                f"a mini-batch is a part of the batch. Set it to at most {prompts}, or leave it null for one update."
            )
        if actor.use_dynamic_bsz is False and micro is None:
            raise ConfigError(
                f"{key}.use_dynamic_bsz=false needs {key}.ppo_micro_batch_size_per_gpu, the sequences of a forward "
                f"pass (try {min(8, prompts * rollout.n)}); or leave use_dynamic_bsz null to cut by tokens."
            )
    if rollout.prompt_length < config.data.max_prompt_length:
        raise ConfigError(
            f"actor_rollout_ref.rollout.prompt_length={rollout.prompt_length} is below data.max_prompt_length="
            f"{config.data.max_prompt_length}: set data.max_prompt_length alone, the other follows."
        )
    if rollout.response_length > config.data.max_response_length:
        raise ConfigError(
            f"actor_rollout_ref.rollout.response_length={rollout.response_length} is above data.max_response_length="
            f"{config.data.max_response_length}: set data.max_response_length alone, the other follows."
        )


def check_token_budgets(config: Config, with_ref: bool, with_critic: bool) -> None:
    """Raises ConfigError unless the longest sequence fits into one pass, wherever passes are cut by tokens."""
    policy = config.actor_rollout_ref
    longest = config.data.max_prompt_length + policy.rollout.response_length
    actor, ref, rollout, critic = policy.actor, policy.ref, policy.rollout, config.critic
    scores_by_tokens = rollout.log_prob_micro_batch_size_per_gpu is None
    ref_by_tokens = with_ref and ref.log_prob_micro_batch_size_per_gpu is None
    critic_by_tokens = with_critic and cuts_by_tokens(critic)
    for applies, key, budget in (
        (cuts_by_tokens(actor), "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu),
        (
            scores_by_tokens,
            "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
            rollout.log_prob_max_token_len_per_gpu,
        ),
        (ref_by_tokens, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", ref.log_prob_max_token_len_per_gpu),
        (critic_by_tokens, "critic.ppo_max_token_len_per_gpu", critic.ppo_max_token_len_per_gpu),
    ):
        if applies and budget < longest:
            raise ConfigError(
                f"{key}={budget} is below data.max_prompt_length + response_length = {longest}: one sequence may not "
                f"fit a forward pass. Raise it to at least {longest}."
            )


def check_policy(config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    for key, optim in (
        ("actor_rollout_ref.actor", config.actor_rollout_ref.actor.optim),
        ("critic", config.critic.optim),
    ):
        if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
            raise ConfigError(f"{key}.optim.betas={optim.betas} must be two numbers in [0, 1), e.g. [0.9, 0.999].")
    check_policy_loss(config.actor_rollout_ref.actor.policy_loss)
    check_rollout_correction(config)
    check_rewards(config)
    check_validation_sampling(rollout.val_kwargs)
    if rollout.do_sample and (rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0):
        notice(
            f"training samples with top_p={rollout.top_p}, top_k={rollout.top_k}, min_p={rollout.min_p}: the policy "
            "that samples is then not quite the policy that is trained. top_p=1 top_k=-1 min_p=0 is exact."
        )


def check_validation_sampling(settings: SamplingConfig) -> None:
    if settings.n > 1 and is_greedy(settings):
        key = "actor_rollout_ref.rollout.val_kwargs"
        raise ConfigError(
            f"{key}.n={settings.n} with do_sample={str(settings.do_sample).lower()} and temperature="
            f"{settings.temperature} asks for {settings.n} greedy answers to a prompt, which are all the same: "
            f"best@{settings.n} would be mean@1. Set {key}.do_sample=true with a temperature above 0, or {key}.n=1."
        )


def check_policy_loss(settings: PolicyLossConfig) -> None:
    key = "actor_rollout_ref.actor.policy_loss"
    if settings.loss_mode == "dro" and settings.dro_beta is None:
        raise ConfigError(f"{key}.loss_mode=dro needs {key}.dro_beta, the weight of the squared log-ratio, e.g. 0.05.")
    if settings.clip_cov_lb >= settings.clip_cov_ub:
        raise ConfigError(
            f"{key}.clip_cov_lb={settings.clip_cov_lb} must be below {key}.clip_cov_ub={settings.clip_cov_ub}: tokens "
            "are drawn from those of a covariance between the two."
        )


def check_rollout_correction(config: Config) -> None:
    key, settings = "algorithm.rollout_correction", config.algorithm.rollout_correction
    loss_mode = config.actor_rollout_ref.actor.policy_loss.loss_mode
    try:
        parse_band("rollout_is_threshold", settings.rollout_is_threshold)
        if settings.rollout_rs is not None:
            parse_rejection(settings.rollout_rs, settings.rollout_rs_threshold)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{key}.{error}.") from error
    if settings.bypass_mode and loss_mode not in ("vanilla", "bypass_mode"):
        raise ConfigError(
            f"{key}.bypass_mode=true brings a policy loss of its own, and actor_rollout_ref.actor.policy_loss."
            f"loss_mode={loss_mode} asks for another: take one of the two back."
        )
    if loss_mode == "bypass_mode" and not settings.bypass_mode:
        raise ConfigError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode=bypass_mode is chosen by {key}.bypass_mode=true: set that."
        )
    if settings.bypass_mode and settings.rollout_is_batch_normalize:
        raise ConfigError(
            f"{key}.rollout_is_batch_normalize=true needs all weights of a batch at once, which bypass_mode=true, "
            "where each forward pass makes its own, does not have: take one of the two back."
        )


def policy_loss_name(settings: PolicyLossConfig, correction: RolloutCorrectionConfig) -> str:
    return "bypass_mode" if correction.bypass_mode else settings.loss_mode


def check_trainer(config: Config) -> None:
    trainer = config.trainer
    check_resume(trainer)
    if not has_validation(config) and (trainer.test_freq > 0 or trainer.val_only):
        raise ConfigError(
            "validation is asked for (trainer.test_freq or trainer.val_only), but there is nothing to validate on: set "
            "data.val_files, or with an environment env.val_episodes or env.val_size."
        )
    check_save_contents("actor_rollout_ref.actor.checkpoint.save_contents", config.actor_rollout_ref.actor.checkpoint)


def has_validation(config: Config) -> bool:
    if config.env.id is not None:
        return config.env.val_episodes > 0 or config.env.val_size > 0
    return bool(config.data.val_files)


def batch_arithmetic(config: Config) -> str:
    """One sentence: from prompts a step to what a forward pass holds."""
    prompts, samples = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    actor = config.actor_rollout_ref.actor
    mini = actor.ppo_mini_batch_size or prompts
    updates = -(-prompts // mini)
    epochs = f", {actor.ppo_epochs} times" if actor.ppo_epochs > 1 else ""
    each = f"{counted(updates, 'update')} of {'up to ' * (prompts % mini > 0)}{mini * samples} sequences"
    return (
        f"{counted(prompts, 'prompt')} × {counted(samples, 'sample')} = {prompts * samples} sequences a step → "
        f"{each}{epochs} → forward passes of at most {forward_size(actor)}."
    )


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def forward_size(config: ActorConfig | CriticConfig) -> str:
    if cuts_by_tokens(config):
        return f"{config.ppo_max_token_len_per_gpu} tokens"
    return f"{config.ppo_micro_batch_size_per_gpu} sequences"


def cuts_by_tokens(config: ActorConfig | CriticConfig) -> bool:
    """Whether forward passes hold so many tokens, not so many sequences.

    use_dynamic_bsz decides where it is set; else a given number of sequences wins over the token budget.
    """
    return bool(config.use_dynamic_bsz) or config.ppo_micro_batch_size_per_gpu is None


def sampling_summary(config: Config) -> str:
    """One sentence: how tokens are drawn in training and at validation. Nothing of it comes from the model's files."""
    rollout = config.actor_rollout_ref.rollout
    return f"training samples {sampling(rollout)}; validation {sampling(rollout.val_kwargs)}."


def sampling(config: RolloutConfig | SamplingConfig) -> str:
    if is_greedy(config):
        return f"n={config.n}, greedy"
    min_p = f", min_p={config.min_p}" * (config.min_p > 0)
    return f"n={config.n}, temperature={config.temperature}, top_p={config.top_p}, top_k={config.top_k}{min_p}"


def is_greedy(config: RolloutConfig | SamplingConfig) -> bool:
    return not config.do_sample or config.temperature == 0
