"""Lists every setting of a run once, with name, type, default, unit and meaning.

Key names and nesting are verl's where verl has the key. Yaml files hold only what differs from here. configs/loader.py
composes a config, checks it by the rules beside each default, and freezes it.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from omegaconf import II

from configs.errors import ConfigError
from configs.extras import absence, has, section
from configs.paths import find_path
from configs.process import worker_threads
from configs.settings import LAST, Frozen, Open, group, own_keys, setting

AGGREGATION_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum")
SCHEDULES = ("constant", "linear", "cosine", "wsd")
KL_KINDS = tuple(
    kind + plus for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3") for plus in ("", "+")
)  # fmt: skip


@dataclass
class DatasetClassConfig(Open):
    switches = "path: name"
    path: str | None = setting(None, "File or module of your dataset class; null: RLHFDataset.")
    name: str | None = setting(None, "Class in that file, a subclass of torch.utils.data.Dataset.")
    kwargs: dict[str, Any] = setting({}, "Arguments of the constructor; they override the caller's.")
    extras: dict[str, Any] = own_keys("data.custom_cls", "path")

    def check(self, config: Any, key: str) -> None:
        if self.kwargs and self.path is None:
            raise ConfigError(f"{key}.kwargs holds {sorted(self.kwargs)}, for a dataset class: set {key}.path.")


@dataclass
class SamplerConfig(Open):
    switches = "class_path: class_name kwargs"
    class_path: str | None = setting(None, "File or module of your sampler; null: our own order.")
    class_name: str | None = setting(None, "Class in that file, a subclass of data.sampler.AbstractSampler.")
    kwargs: dict[str, Any] = setting({}, "Passed on to the constructor.")
    extras: dict[str, Any] = own_keys("data.sampler", "class_path")


class FileRows(Open):
    dataset = "files"  # name of the dataset in configs/extras.py, unless custom_cls names one


@dataclass
class DataConfig(section("datagen"), section("curriculum"), section("images"), FileRows):
    train_files: Any = setting(None, "Training rows: files, folders, globs, datasets:N, reasoning_gym:T.", texts=True)
    val_files: Any = setting(None, "Validation rows, as train_files; null: no validation on rows.", texts=True)
    train_max_samples: int = setting(-1, "Use at most this many training rows; -1: all.", ge=-1)
    val_max_samples: int = setting(-1, "Use at most this many validation rows; -1: all.", ge=-1)
    prompt_key: str = setting("prompt", "Column with the prompt: a list of chat messages, or a plain string.")
    ground_truth_key: str = setting("ground_truth", "Column with the right answer, if reward_model has none.")
    reward_fn_key: str = setting("data_source", "Column that names where a row comes from; metrics are split by it.")
    max_prompt_length: int = setting(512, "Longest prompt, in tokens, template included.", ge=1)
    max_response_length: int = setting(512, "Longest response, in tokens.", ge=1)
    filter_overlong_prompts: bool = setting(True, "Drop prompts above max_prompt_length when loading, and count them.")
    truncation: str = setting(
        "error",
        "What happens to over-long prompts that are not filtered: raise, or cut a side.",
        choices=("error", "left", "right", "middle"),
    )
    train_batch_size: int = setting(1024, "Prompts per step; the default is lowered to the rows of an epoch.", ge=1)
    val_batch_size: int | None = setting(None, "Prompts per validation batch; null: all at once.", ge=1)
    shuffle: bool = setting(True, "Draw the training rows in a new random order every epoch.")
    seed: int | None = setting(None, "Seed of the row order and sub-sampling; null: derived from trainer.seed.")
    apply_chat_template_kwargs: dict[str, Any] = setting({}, "Passed on to the tokenizer's apply_chat_template.")
    custom_cls: DatasetClassConfig = group(DatasetClassConfig, "A dataset class of yours; null: RLHFDataset.")
    sampler: SamplerConfig = group(SamplerConfig, "A sampler of yours (curriculum).")
    max_bad_fraction: float = setting(0.0, "Share of rows that may be unusable: left out and listed.", ge=0, lt=1)
    extras: dict[str, Any] = own_keys("data", "custom_cls.path")


@dataclass
class SuccessConfig(Frozen):
    terminated: bool | None = setting(None, "Whether the environment must end it; false: the step limit must.")
    last_reward_above: float | None = setting(None, "The last reward must be above this.")
    return_above: float | None = setting(None, "The sum of the episode's rewards must be above this.")
    info_success: bool | None = setting(None, "What the last info['success'] must be; none counts as false.")


class InOneProcess(Frozen):
    in_processes = False  # whether episodes are played in processes, which keep env.timeout by themselves


@dataclass
class EnvConfig(section("gym"), InOneProcess):
    switches = "id: kwargs train_size val_size val_episodes val_seed max_turns max_walk invalid_action success"
    id: str | None = setting(None, "gymnasium id, e.g. FrozenLake-v1; null: the prompts come from data.train_files.")
    path: str = setting("custom/env_wrapper.py", "File or module that holds the factory of the environment.")
    name: str = setting("make_env", "Factory in it: name(env_id, seed=…, max_turns=…, exclude_seeds=…, **kwargs).")
    kwargs: dict[str, Any] = setting({}, "Arguments of the factory (ours passes them on to gymnasium).")
    mode: str = setting("step", "A prompt is a state, or the start of an episode.", choices=("step", "episode"))
    history: str = setting("transcript", "All turns in one row, or each in its own.", choices=("transcript", "turns"))
    timeout: float | None = setting(60.0, "Seconds for a reset or step, or the episode fails; null: any.", gt=0)
    max_failed_fraction: float = setting(0.5, "The run ends if a larger share of episodes has failed.", ge=0, le=1)
    train_size: int = setting(10_000, "States (or starts of episodes) an epoch draws from the environment.", ge=1)
    val_size: int = setting(0, "States of the validation set (one answer each); 0: none.", ge=0)
    val_episodes: int = setting(0, "Whole episodes played at validation; 0: none.", ge=0)
    val_seed: int = setting(1_000_000, "Reset seed of the first validation episode; the others count up from it.", ge=0)
    max_turns: int | None = setting(None, "Most moves per episode; null: the environment's own limit.", ge=1)
    max_walk: int | None = setting(None, "Most random moves from a reset to a training state; null: 20.", ge=0)
    invalid_action: str | None = setting(
        None, "An answer without a legal action uses up a turn, or ends; null: as it says.", choices=("retry", "end")
    )
    success: SuccessConfig = group(SuccessConfig, "When an episode is a success; null: as it says itself.")


@dataclass
class PretrainedModelConfig(Frozen):
    shaped_by: ClassVar[tuple[str, ...]] = ()  # settings, beside the path, that decide which weights a checkpoint holds
    path: str | None = setting(None, "Hugging Face model directory (or hub name, if the hub is reachable).")
    tokenizer_path: str | None = setting(None, "Tokenizer directory; null: the model's.")
    trust_remote_code: bool = setting(False, "Run Python code that comes with the model or tokenizer.")
    custom_chat_template: str | None = setting(None, "Jinja text; null: the tokenizer's own template.", jinja=True)
    override_config: dict[str, Any] = setting({}, "Values that replace those of the model's config.json.")

    @property
    def adapter(self) -> str:
        """Names what is trained in place of all weights, among the adapters of configs/extras.py."""
        return "none"

    def without_adapter(self) -> Any:
        """Returns these settings with all weights trained."""
        return self

    def at(self, path: str) -> Any:
        """Returns the settings of a whole model at `path`: those of this one if it is there, else none of its own."""
        settings = self.without_adapter()
        return settings if path == self.path else replace(settings, path=path, tokenizer_path=None, override_config={})


@dataclass
class ModelConfig(section("lora"), PretrainedModelConfig):
    external_lib: Any = setting(None, "Files or modules (one or a list) to import first, e.g. your losses.", texts=True)
    use_remove_padding: bool = setting(True, "Pack sequences without padding, a prompt once for all samples.")
    kernels: str = setting("auto", "Faster layers (extras/kernels); off: plain ones.", choices=("auto", "off"))
    enable_gradient_checkpointing: bool | None = setting(None, "Recompute activations to save memory; null: on a GPU.")


@dataclass
class OptimConfig(section("sharding", "OptimSettings")):
    switches = "lr_scheduler_type=cosine: num_cycles; lr_scheduler_type=linear,cosine,wsd: min_lr_ratio"
    lr: float = setting(1e-6, "Peak learning rate of AdamW.", ge=0)
    weight_decay: float = setting(0.01, "AdamW's decoupled weight decay.", ge=0)
    betas: list[float] = setting([0.9, 0.999], "AdamW's betas.")
    clip_grad: float = setting(1.0, "Largest global gradient norm; larger gradients are scaled down.", gt=0)
    lr_scheduler_type: str = setting("constant", "Schedule after warm-up.", choices=SCHEDULES)
    lr_warmup_steps: int = setting(-1, "Warm-up steps; negative: lr_warmup_steps_ratio of all steps.")
    lr_warmup_steps_ratio: float = setting(0.0, "Warm-up as a share of all steps.", ge=0, le=1)
    init_lr_ratio: float = setting(0.0, "Where the warm-up begins, as a share of lr.", ge=0, le=1)
    zero_indexed_step: bool = setting(True, "Whether the first step has the warm-up's first rate, or its second.")
    min_lr_ratio: float = setting(0.0, "Where linear, cosine and wsd end, as a share of lr.", ge=0, le=1)
    num_cycles: float = setting(0.5, "Cosine cycles after warm-up; 0.5 falls once.", gt=0)

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"{key}.betas={self.betas} must be two numbers in [0, 1), e.g. [0.9, 0.999].")


@dataclass
class FSDPConfig(section("sharding", "OffloadSettings")):
    dtype: str = setting(
        "auto",
        "Compute dtype, beside weights in float32; auto: bfloat16 on GPUs that have it.",
        choices=("auto", "float32", "bfloat16"),
    )


@dataclass
class TrainFSDPConfig(section("sharding", "TrainSettings"), FSDPConfig):
    """Adds the settings of models in training."""


@dataclass
class PolicyLossConfig(section("algorithms", "LossSettings")):
    loss_mode: str = setting("vanilla", "Name in the registry of policy losses.")
    kwargs: dict[str, Any] = setting({}, "Arguments of your own loss, by name.")


@dataclass
class CheckpointConfig(Frozen):
    save_contents: list[str] = setting(["model", "optimizer", "extra", "hf_model"], "What a checkpoint holds.")
    async_save: bool = setting(False, "Keep training while a checkpoint is written from a copy in main memory.")

    def check(self, config: Any, key: str) -> None:
        if unknown := sorted({*self.save_contents} - {"model", "optimizer", "extra", "hf_model"}):
            raise ConfigError(f"{key}.save_contents holds {unknown}: it can hold model, optimizer, extra, hf_model.")


@dataclass
class LayoutConfig(Frozen):
    strategy: str = setting(
        "fsdp2", "How several workers hold a model: in shards, or each a whole one.", choices=("fsdp2", "replicas")
    )

    @property
    def peers(self) -> int:
        """Counts the workers that compute each layer together."""
        return 1


@dataclass
class ActorConfig(*(section(extra, "ActorSettings") for extra in ("sharding", "algorithms", "images")), LayoutConfig):
    switches = "use_kl_loss: kl_loss_coef kl_loss_type; loss_agg_mode=seq-mean-token-sum-norm: loss_scale_factor"
    ppo_mini_batch_size: int | None = setting(None, "Prompts per optimiser step; null: all, on-policy.", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = setting(None, "Sequences per forward pass; null: as tokens allow.", ge=1)
    use_dynamic_bsz: bool | None = setting(None, "Cut passes by tokens; null: unless a number of sequences is set.")
    ppo_max_token_len_per_gpu: int = setting(16384, "Tokens a forward pass may hold when cutting by tokens.", ge=1)
    ppo_epochs: int = setting(1, "Passes over each batch of rollouts.", ge=1)
    shuffle: bool = setting(False, "Shuffle the prompts before cutting mini-batches, anew every epoch.")
    clip_ratio: float = setting(0.2, "PPO's ε.", ge=0)
    clip_ratio_low: float | None = setting(None, "Lower ε; null: clip_ratio.", ge=0)
    clip_ratio_high: float | None = setting(None, "Upper ε; null: clip_ratio.", ge=0)
    clip_ratio_c: float = setting(3.0, "Dual-clip bound where advantages are negative; dppo: the largest ratio.", gt=1)
    policy_loss: PolicyLossConfig = group(PolicyLossConfig, "Which policy loss.")
    loss_agg_mode: str = setting("token-mean", "How token losses become one number.", choices=AGGREGATION_MODES)
    loss_scale_factor: float | None = setting(None, "Divisor of seq-mean-token-sum-norm; null: the width R.", gt=0)
    entropy_coeff: float = setting(0.0, "Weight of the entropy bonus.")
    calculate_entropy: bool = setting(False, "Log the entropy even when its weight is 0.")
    use_kl_loss: bool = setting(False, "Add the KL to the reference policy to the loss.")
    kl_loss_coef: float = setting(0.001, "Weight of the KL in the loss.", ge=0)
    kl_loss_type: str = setting("low_var_kl", "Estimator of the KL in the loss.", choices=KL_KINDS)
    optim: OptimConfig = group(OptimConfig, "Optimiser and schedule.")
    fsdp_config: TrainFSDPConfig = group(TrainFSDPConfig, "Precision and offloading; the critic's too.")
    checkpoint: CheckpointConfig = group(CheckpointConfig, "Contents of checkpoints.")


@dataclass
class RefModelConfig(Frozen):
    path: str | None = setting(II("actor_rollout_ref.model.path"), "Directory of the reference; default: the actor's.")


@dataclass
class RefConfig(section("sharding", "RefSettings")):
    log_prob_micro_batch_size_per_gpu: int | None = setting(
        II("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"), "As in rollout, for the reference.", ge=1
    )
    log_prob_max_token_len_per_gpu: int = setting(
        II("actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu"), "As in rollout, for the reference.", ge=1
    )
    model: RefModelConfig = group(RefModelConfig, "The reference's model; another one than the actor's is a teacher.")


@dataclass
class SamplingConfig(Frozen):
    do_sample: bool | None = setting(None, "Sample; false: the likeliest token; null: if a temperature above 0 is set.")
    temperature: float | None = setting(None, "Softmax temperature when sampling; null: 1.", ge=0)
    top_k: int = setting(-1, "Keep the k most likely tokens; -1: all.", ge=-1)
    top_p: float = setting(1.0, "Keep the smallest set of tokens with this probability; 1: all.", gt=0, le=1)
    min_p: float = setting(0.0, "Keep tokens at least this share as likely as the likeliest; 0: all.", ge=0, lt=1)
    n: int = setting(1, "Samples per prompt.", ge=1)

    def draws(self) -> tuple[bool, float]:
        """Returns whether tokens are sampled, rather than the likeliest taken, and the softmax temperature."""
        temperature = 1.0 if self.temperature is None else self.temperature
        requested = self.temperature is not None if self.do_sample is None else self.do_sample
        return requested and temperature > 0, temperature


@dataclass
class MultiTurnConfig(section("tools"), section("interactions"), Frozen):
    enable: bool = setting(False, "Play each row as a conversation, with tools or a simulated user: an episode.")
    format: str = setting("hermes", "How answers write calls: hermes, one of extras/tools/formats.py, or yours.")
    tool_timeout: float = setting(30.0, "Seconds that a call of a tool, a user or an agent loop may take.", gt=0)
    max_tokens_per_turn: int | None = setting(None, "Most tokens of one answer; null: what is left of all.", ge=1)

    def files(self) -> dict[str, str]:
        """Returns the files that settings name, of extras too, by the settings' names."""
        return {item.name: self[item.name] for item in fields(self) if "file" in item.metadata and self[item.name]}

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        if self.enable and not has("source", "conversations"):
            raise ConfigError(f"{key}.enable=true: {absence('tools')}", f"{key}.enable")
        files = self.files()
        for name, file in files.items():
            if not find_path(file.rpartition(":")[0] or file).is_file():
                raise ConfigError(f"{key}.{name}={file}: there is no such file (looked in {Path.cwd()}).")
        if files and not self.enable:
            raise ConfigError(f"{key} names {', '.join(files)}, which {key}.enable=false does not read: enable it.")


class NoProgram(Frozen):
    program = None  # that plays the rows


@dataclass
class AgentConfig(section("sessions"), section("verl"), NoProgram):
    default_agent_loop: str | None = setting(
        None, "Who plays rows without agent_name: a registered name, or file.py:Class; null: tool_agent or single."
    )


class BesideTrainer(Frozen):
    roles_apart = ()  # roles that have workers of their own


@dataclass
class RolloutConfig(section("lora", "RolloutSettings"), section("overlap", "Pool"), BesideTrainer, SamplingConfig):
    name: str = setting("hf", "Engine: hf (the model itself), vllm, sglang, openai (a server), or your file.py.")
    n: int = setting(1, "Samples per prompt: the group size of GRPO and RLOO.", ge=1)
    do_sample: bool = setting(True, "Sample in training; false: greedy.")
    temperature: float = setting(1.0, "Softmax temperature in training; the trainer's log-probs use it too.", gt=0)
    prompt_length: int = setting(II("data.max_prompt_length"), "Longest prompt, in tokens: the padded width P.", ge=1)
    response_length: int = setting(II("data.max_response_length"), "Longest response, in tokens: the width R.", ge=1)
    max_num_seqs: int = setting(1024, "Sequences generated at once; others wait their turn.", ge=1)
    max_num_batched_tokens: int = setting(8192, "Tokens of a pass: of padded prompts (hf), of all (vllm).", ge=1)
    gpu_memory_utilization: float = setting(0.5, "With vllm: share of GPU memory for weights and cache.", gt=0, le=1)
    free_cache_engine: bool = setting(True, "With vllm: leave the GPU's memory to the trainer between generations.")
    enforce_eager: bool | None = setting(None, "With vllm, true: no CUDA graphs.")
    max_model_len: int | None = setting(None, "With vllm: longest sequence; null: prompt and response.", ge=2)
    enable_prefix_caching: bool = setting(True, "With vllm: compute the common beginning of prompts only once.")
    enable_chunked_prefill: bool = setting(True, "With vllm: let a long prompt go through the model in several steps.")
    load_format: str = setting("dummy", "With vllm: how its weights start (dummy: at random).")
    tensor_model_parallel_size: int = setting(1, "With vllm: workers of one engine; divides all workers.", ge=1)
    engine_kwargs: dict[str, Any] = setting({}, "Arguments of the engine, by its name: engine_kwargs.vllm.KEY=….")
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, "Sequences a log-prob pass; null: by tokens.", ge=1)
    log_prob_max_token_len_per_gpu: int = setting(
        II("actor_rollout_ref.actor.ppo_max_token_len_per_gpu"), "Tokens a log-prob pass may hold.", ge=1
    )
    val_kwargs: SamplingConfig = group(SamplingConfig, "Sampling at validation, spelt out; nothing is inherited.")
    multi_turn: MultiTurnConfig = group(MultiTurnConfig, "Episodes: several answers, each followed by what it led to.")
    agent: AgentConfig = group(AgentConfig, "Classes of yours that play the episodes.")


@dataclass
class ActorRolloutRefConfig(Frozen):
    model: ModelConfig = group(ModelConfig, "The policy's model.")
    actor: ActorConfig = group(ActorConfig, "The policy's updates.")
    ref: RefConfig = group(RefConfig, "The reference policy.")
    rollout: RolloutConfig = group(RolloutConfig, "Generation.")
    nccl_timeout: int = setting(600, "Seconds that a worker waits for the others before the run ends.", ge=1)


@dataclass
class CriticModelConfig(Frozen):
    path: str | None = setting(II("actor_rollout_ref.model.path"), "Directory of the critic; default: the actor's.")


@dataclass
class CriticConfig(Frozen):
    enable: bool | None = setting(None, "Train a critic; null: if the estimator needs values.")
    model: CriticModelConfig = group(CriticModelConfig, "The critic's model; its value head starts at random.")
    optim: OptimConfig = group(OptimConfig, "Optimiser and schedule.", lr=1e-5)
    ppo_mini_batch_size: int | None = setting(II("actor_rollout_ref.actor.ppo_mini_batch_size"), "The actor's.", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = setting(
        II("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"), "Sequences a forward pass.", ge=1
    )
    use_dynamic_bsz: bool | None = setting(II("actor_rollout_ref.actor.use_dynamic_bsz"), "As for the actor.")
    ppo_max_token_len_per_gpu: int = setting(32768, "Tokens a forward pass may hold.", ge=1)
    ppo_epochs: int = setting(II("actor_rollout_ref.actor.ppo_epochs"), "Passes over each batch.", ge=1)
    shuffle: bool = setting(II("actor_rollout_ref.actor.shuffle"), "As for the actor.")
    loss_agg_mode: str = setting(II("actor_rollout_ref.actor.loss_agg_mode"), "The actor's.", choices=AGGREGATION_MODES)
    cliprange_value: float = setting(0.5, "Largest change of a value in one update, in units of reward.", gt=0)


@dataclass
class RewardFunctionConfig(Frozen):
    switches = "path: name reward_kwargs"
    path: str | None = setting(None, "File or module of your reward function; null: the reward manager's.")
    name: str = setting("compute_score", "Function in that file.")
    reward_kwargs: dict[str, Any] = setting({}, "Arguments of the function; they override the caller's.")


@dataclass
class RewardManagerConfig(Frozen):
    path: str = setting("custom/reward_manager.py", "File or module of your reward manager.")
    name: str = setting("CustomRewardManager", "Class in that file, name(environment) or verl's; or a registered name.")


@dataclass
class OverlongBufferConfig(Frozen):
    enable: bool = setting(False, "Penalise responses that come close to the longest allowed (DAPO).")
    len: int | None = setting(None, "Tokens before the longest length in which the penalty grows; null: a fifth.", ge=1)
    penalty_factor: float = setting(1.0, "The penalty at the longest allowed length.", ge=0)


@dataclass
class RewardKwargsConfig(Frozen):
    switches = "overlong_buffer_cfg.enable: overlong_buffer_cfg"
    max_resp_len: int | None = setting(II("actor_rollout_ref.rollout.response_length"), "Most tokens allowed.", ge=1)
    overlong_buffer_cfg: OverlongBufferConfig = group(OverlongBufferConfig, "Soft punishment of long responses.")
    extras: dict[str, Any] = setting({}, "Keys of your own, for a manager: reward.reward_kwargs.NAME=….", free=True)

    def check(self, config: Any, key: str) -> None:
        buffer, longest = self.overlong_buffer_cfg, self.max_resp_len
        if buffer.enable and buffer.len is not None and buffer.len > longest:
            raise ConfigError(
                f"{key}.overlong_buffer_cfg.len={buffer.len} is above {key}.max_resp_len={longest}: lower it, or null."
            )


@dataclass
class FunctionsConfig(Frozen):
    switches = "on_failure=score: failure_score"
    custom_reward_function: RewardFunctionConfig = group(RewardFunctionConfig, "A reward function of yours.")
    max_concurrent: int = setting(64, "Calls of an async reward function at once; others wait.", ge=1)
    timeout: float | None = setting(60.0, "Seconds to score a response, then its process is killed; null: any.", gt=0)
    on_failure: str = setting(
        "mask",
        "A response without a score is not learnt from, or gets failure_score.",
        choices=("mask", "score"),
    )
    failure_score: float = setting(0.0, "The score of such responses with on_failure=score.")
    max_failed_fraction: float = setting(0.5, "The run ends if a larger share of responses is unscored.", ge=0, le=1)

    @property
    def caller(self) -> str:
        """Names who calls a function: `scorers`, processes of extras/scorers, or `here`, this process."""
        return "here"

    @property
    def fallback(self) -> str:
        """Names the reward that scores where nothing else is named, among the rewards of configs/extras.py."""
        return "rules"

    @property
    def scorer(self) -> str:
        """Names the reward that scores where there is neither a manager nor an environment."""
        return "functions" if self.custom_reward_function.path else self.fallback

    def source(self) -> str | None:
        """Returns the setting that names reward functions, with its value; None if nothing names one."""
        path = self.custom_reward_function.path
        return f"reward.custom_reward_function.path={path}" if path else None


@dataclass
class ScoringConfig(section("sandbox"), section("scorers"), section("weighted"), FunctionsConfig):
    pass


@dataclass
class RewardConfig(section("rules"), section("reward_model"), ScoringConfig):
    reward_manager: RewardManagerConfig = group(RewardManagerConfig, "A manager of yours; an environment has one.")
    reward_kwargs: RewardKwargsConfig = group(RewardKwargsConfig, "What is taken off the scores in training.")


@dataclass
class KLControlConfig(Frozen):
    switches = "type=adaptive: horizon target_kl"
    type: str = setting("fixed", "Whether the coefficient moves.", choices=("fixed", "adaptive"))
    kl_coef: float = setting(0.001, "The (first) coefficient.", ge=0)
    horizon: int = setting(10_000, "Samples over which the adaptive controller adjusts.", gt=0)
    target_kl: float = setting(0.1, "Target of the adaptive controller, in nats per token.", gt=0)


@dataclass
class AlgorithmConfig(*(section(extra) for extra in ("rollout_correction", "pf_ppo", "algorithms", "prime")), Open):
    keeps = "adv_estimator_kwargs"
    switches = "use_kl_in_reward: kl_penalty kl_ctrl"

    adv_estimator: str = setting("gae", "Name in the registry of advantage estimators.")
    adv_estimator_kwargs: dict[str, Any] = setting({}, "Arguments of the estimator, by name, e.g. {f_norm: 2}.")
    gamma: float = setting(1.0, "Discount.", ge=0, le=1)
    lam: float = setting(1.0, "GAE's λ.", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = setting(True, "Divide GRPO's advantages by the group's standard deviation.")
    use_kl_in_reward: bool = setting(False, "Subtract the KL to the reference policy from the reward.")
    kl_penalty: str = setting("kl", "Estimator of the KL in the reward.", choices=KL_KINDS)
    kl_ctrl: KLControlConfig = group(KLControlConfig, "Coefficient of the KL in the reward.")


@dataclass
class RunConfig(Frozen):
    """The settings of every run that trains, by reinforcement or by examples."""

    seed: int = setting(0, "The one seed: every generator of the run is derived from it.", ge=0)
    total_epochs: int = setting(1, "Passes over the training rows.", ge=1)
    total_training_steps: int | None = setting(None, "Steps of the run; null: total_epochs decides.", ge=1)
    project_name: str = setting("nano_verl", "Project at the loggers.")
    experiment_name: str | None = setting(
        None, "Experiment at the loggers, and folder; null: made of what it learns from.", filled=True
    )
    default_local_dir: str = setting(
        "outputs/${trainer.experiment_name}", "Folder of the run: metrics.jsonl, config.yaml, checkpoints.", filled=True
    )
    logger: Any = setting(["console"], "Any of console, tensorboard, wandb, mlflow, trackio, swanlab.", texts=True)
    executor: str | None = setting(
        None, "Where workers live: this process (local, for one) or actors; null: by number.", choices=("local", "ray")
    )
    nnodes: int = setting(1, "Machines.", ge=1)
    n_gpus_per_node: int | None = setting(None, "GPUs per machine; null: one if there is one, else 0.", ge=0)
    n_workers_per_node: int = setting(1, "Workers per machine without GPUs; with GPUs, one each.", ge=1)
    n_threads: int | None = setting(None, "CPU threads of a worker; null: OMP_NUM_THREADS, else a share.", ge=1)
    stall_timeout: float | None = setting(
        1800.0, "Seconds until a run ends whose actors say nothing, or get no further; null: never.", gt=0
    )
    val_before_train: bool = setting(True, "Validate before the first step.")
    max_ckpt_to_keep: int | None = setting(None, "Newest checkpoints to keep; null: all.", ge=1)
    resume_mode: str = setting(
        "auto", "Go on from the newest checkpoint, none, or a named one.", choices=("auto", "disable", "resume_path")
    )
    resume_from_path: str | None = setting(None, "The global_step_N folder for resume_mode=resume_path.")
    trust_checkpoint: bool = setting(False, "Unpickle a sampler's state in a checkpoint, which may run code.")

    patience = 0.0  # seconds that a run waits for machines that its Ray cluster lacks
    also_saved = ()  # when checkpoints are written beside save_freq's, in words
    async_mode = None  # what changes the order of a step, among the trainers of configs/extras.py

    @property
    def action(self) -> str:
        """Names what main.py does with a trainer, in the table of configs/extras.py."""
        return "train"

    @property
    def workers(self) -> int:
        """Counts the workers that are asked for, with a GPU for each or without GPUs."""
        return self.nnodes * (self.n_gpus_per_node or self.n_workers_per_node)

    def check(self, config: Any, key: str) -> None:
        super().check(config, key)
        worker_threads(self.n_threads)
        if self.workers > 1 and self.executor == "local":
            raise ConfigError(
                f"{key}.nnodes={self.nnodes}, n_gpus_per_node={self.n_gpus_per_node}, n_workers_per_node="
                f"{self.n_workers_per_node} ask for {self.workers} workers, and executor=local has one: leave it null."
            )
        if (self.resume_mode == "resume_path") != bool(self.resume_from_path):
            raise ConfigError(f"{key}.resume_mode=resume_path needs {key}.resume_from_path, and only it reads that.")


@dataclass
class TrainerConfig(
    *(section(extra) for extra in ("dry_run", "report", "watch", "restarts", "overlap", "best", "replay")),
    section("algorithms", "TrainerSettings"),
    RunConfig,
):
    cls: str = setting("training.ray_trainer:RayPPOTrainer", "The trainer: ours, or your subclass as file.py:Class.")
    val_only: bool = setting(False, "Validate, print all metrics and stop; the run's folder is only read.")
    test_freq: int = setting(-1, "Validate every this many steps, and after the last; -1: never.")
    save_freq: int | str = setting(
        -1,
        "Save every this many steps, and after the last; last: only then; -1: never, so the model is lost.",
        steps=(LAST,),
    )
    critic_warmup: int = setting(0, "The policy learns from this step on; before it, only the critic.", ge=0)
    max_skipped_updates: int = setting(3, "End the run after this many non-finite updates in a row.", ge=1)


@dataclass
class Config(section("distillation"), Frozen):
    model_key: ClassVar[str] = "actor_rollout_ref.model.path"  # names the model that the run trains

    data: DataConfig = group(DataConfig, "Rows and batches.")
    env: EnvConfig = group(EnvConfig, "A gymnasium environment as the source of prompts and rewards.")
    actor_rollout_ref: ActorRolloutRefConfig = group(ActorRolloutRefConfig, "The policy.")
    critic: CriticConfig = group(CriticConfig, "The critic, for estimators that need one.")
    reward: RewardConfig = group(RewardConfig, "Rewards.")
    algorithm: AlgorithmConfig = group(AlgorithmConfig, "The algorithm.")
    roles: dict[str, Any] = setting({}, "Settings of roles of yours: roles.NAME.KEY=… (model.external_lib).")
    trainer: TrainerConfig = group(TrainerConfig, "The run.")

    @property
    def policy_model(self) -> ModelConfig:
        """Returns the settings of the model that the run trains."""
        return self.actor_rollout_ref.model
