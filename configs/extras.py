"""The one table of what a run can do without: by kind and name, the object that a setting asks for.

The core imports no extra. It asks `find` (configs/import_utils.py) for an object by its kind and name, and `section`
for the settings that an extra adds to the schema. Any folder of extras/ can be deleted: a setting that asks for it is
then refused by its name.
"""

from collections.abc import Iterator
from dataclasses import make_dataclass
from importlib import import_module

from omegaconf import OmegaConf

from configs.errors import ConfigError
from configs.paths import ROOT

FOLDER = ROOT / "extras"
HEADS: dict[str, tuple[str, ...]] = {  # what a reader meets: every folder of extras/ under one of nine
    "compute": ("kernels", "sharding", "lora", "images", "overlap"),
    "engines": ("openai", "sglang", "http", "certificate"),
    "algorithms": (*("algorithms", "rollout_correction", "pf_ppo", "prime", "distillation", "replay"),),
    "rewards": ("rules", "weighted", "reward_model", "judge", "scorers", "processes", "sandbox", "try_reward"),
    "episodes": ("gym", "lookahead", "imitate", "tools", "interactions", "sessions", "verifiers"),
    "data": ("sources", "many_rows", "curriculum", "datagen"),
    "beside a run": ("report", "watch", "loggers", "best", "dry_run", "restarts"),
    "commands": ("sft", "evaluation", "standalone", "server", "merge", "cluster", "sweep", "completion", "python"),
    "verl": ("verl",),
}
TABLE: dict[str, dict[str, str]] = {  # kinds of hook, under the heads of HEADS
    # compute
    "forward": {"off": "workers.forward:Forward", "kernels": "extras.kernels.kernels:Kernels"},
    "parallel": {"replicas": "workers.parallel:Replicas", "fsdp2": "extras.sharding.layout:Sharded"},
    "adapter": {"none": "workers.adapter:NoAdapter", "lora": "extras.lora.lora:Lora"},
    "vision": {  # by the model_type of a config.json: how such models read images
        "qwen2_vl": "extras.images.families:Qwen2VL",
        "qwen2_5_vl": "extras.images.families:Qwen2VL",
        "idefics3": "extras.images.families:Idefics3",
    },
    "pools": {
        "launch": "workers.launch:Launch",
        "split": "extras.overlap.pools:split",
        "rollout": "extras.overlap.pools:ApartRollout",
    },
    # engines
    "engine": {
        "hf": "workers.hf_rollout:HFRollout",
        "vllm": "workers.vllm_rollout_spmd:vLLMRollout",
        "sglang": "extras.sglang.rollout:SGLangRollout",
        "openai": "extras.openai.rollout:OpenAIRollout",
    },
    "sync": {"plain": "workers.weight_sync:WeightSync", "certificate": "extras.certificate.certificate:Certificate"},
    # algorithms: estimators and losses beside those that users register (`REGISTRIES`), in one mapping of each module;
    # others by the setting that asks for them
    "estimator": dict.fromkeys(("gae", "grpo", "grpo_vectorized"), "training.core_algos:ESTIMATORS")
    | dict.fromkeys(
        (
            *("turn_gae", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline", "spo"),
            *("gdpo", "reinforce_plus_plus", "remax", "optimal_token_baseline", "tir_optimal_token_baseline", "max_rl"),
            *("sppo", "fapo"),
        ),
        "extras.algorithms.estimators:ESTIMATORS",
    )
    | {"prime": "extras.prime.estimator:ESTIMATORS"}
    | dict.fromkeys(("opd", "no_rewards"), "extras.distillation.divergence:ESTIMATORS"),
    "policy_loss": {"vanilla": "training.losses:LOSSES", "bypass_mode": "extras.rollout_correction.correction:LOSSES"}
    | dict.fromkeys(
        ("dppo_tv", "dppo_kl", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dro", "sppo"),
        "extras.algorithms.policy_losses:LOSSES",
    )
    | dict.fromkeys(("gvpo", "pair", "spin", "flowrl"), "extras.algorithms.group_losses:LOSSES"),
    "stage": {
        "distillation.enabled": "extras.distillation.stage:Distillation",
        "reward.reward_model.enable": "extras.reward_model.stage:ModelScores",
        "algorithm.prime.enable": "extras.prime.stage:ProcessRewards",
        "algorithm.rollout_correction": "extras.rollout_correction.correction:RolloutCorrection",
        "algorithm.use_pf_ppo": "extras.pf_ppo.stage:PFPPO",
        "env.id": "extras.gym.actions:ActionShares",
        "trainer.async_mode": "extras.overlap.one_step_off:Staleness",
        "algorithm.adv_estimator=spo": "extras.algorithms.spo:SuccessTracker",
        "actor_rollout_ref.actor.policy_loss.loss_mode=flowrl,gvpo,pair,spin": (
            "extras.algorithms.group_losses:GroupIds"
        ),
    },
    "role": {
        "rm": "extras.reward_model.role:ROLE",
        "prm": "extras.prime.role:ROLE",
        "teachers": "extras.distillation.stage:ROLE",
        "sender": "extras.overlap.wire_roles:SENDER",
        "receiver": "extras.overlap.wire_roles:RECEIVER",
        "generator": "extras.overlap.wire_roles:GENERATOR",
    },
    "trainer": {  # each makes one of another's class
        "algorithm.filter_groups.enable": "extras.algorithms.dynamic_sampling:dynamic_sampling",
        "trainer.async_mode=one_step_off": "extras.overlap.one_step_off:one_step_off",
        "trainer.async_mode=fully_async": "extras.overlap.fully_async:fully_async",
        "trainer.save_rollouts": "extras.replay.replay:saving",
        "trainer.replay_rollouts": "extras.replay.replay:replaying",
    },
    # rewards
    "reward": {  # load(settings, RewardRun) -> what scores a reward_view
        "manager": "extras.verl.managers:load",
        "functions": "training.reward_function:load",
        "weighted": "extras.weighted.reward:load",
        "environment": "training.reward:load_environment",
        "object": "training.reward_function:reward_by",  # called with it, the settings and the tokenizer
        "model": "extras.reward_model.stage:load",
        "rules": "extras.rules.reward:load",
    },
    # episodes
    "episode": {
        "class": "extras.tools.shared_loop:UsersEpisode",
        "agent_loop": "extras.verl.users_loop:LoopEpisode",
        "program": "extras.sessions.play:ProgramEpisode",
    },
    "environment": {
        "spaces": "extras.gym.space_text:SpaceText",
        "search": "extras.lookahead.credit:Search",
        "playouts": "extras.lookahead.credit:Playouts",
        "policy": "extras.lookahead.policy:play_on",
        "trial": "extras.gym.walks:try_out",
        "moves": "extras.gym.actions:compare_moves",
        "processes": "extras.gym.process_env:ProcessEnv",
    },
    "format": {  # of calls, for extras/tools/parsers.py
        "hermes": "extras.tools.parsers:HermesParser",
        "plain": "extras.tools.formats:PlainParser",
        "llama3": "extras.tools.formats:Llama3Parser",
        "qwen3_coder": "extras.tools.formats:Qwen3CoderParser",
        "glm": "extras.tools.formats:GLMParser",
        "gpt-oss": "extras.tools.formats:HarmonyParser",
    },
    # data
    "source": {
        "conversations": "extras.tools.conversations:ToolEpisodes",
        "tools": "extras.tools.conversations:load_tools",
        "interactions": "extras.interactions.base:Users",
        "agents": "extras.verl.agents:load_agents",
        "program": "extras.sessions.play:load_program",
        "datasets": "extras.sources.packages:read_datasets",
        "reasoning_gym": "extras.sources.packages:read_reasoning_gym",
        "verifiers": "extras.verifiers.bridge:read_rows",
    },
    "sampler": {"source_weights": "extras.curriculum.curriculum:MixtureSampler"},  # by the setting of data
    "dataset": {
        "files": "data.rl_dataset:RLHFDataset",
        "many_rows": "extras.many_rows.dataset:ManyRows",  # of large parquet files
        "lengths": "extras.many_rows.prompt_lengths:Lengths",
        "datagen": "extras.datagen.dataset:DynamicGenDataset",
        "verl": "extras.verl.hooks:RLHFDataset",  # of classes that define verl's hooks
        "table": "extras.verl.hooks:Table",
    },
    # beside a run
    "observer": {"report": "extras.report.observer:Report", "watch": "extras.watch.health:Watch"},
    "callback": {  # observers that may add to a validation, and ask a run to save or to end, by the setting
        "env.id": "extras.gym.walks:RandomPlayer",
        "trainer.save_best": "extras.best.best:Best",
        "trainer.early_stop.metric": "extras.best.best:Best",
    },
    "logger": {  # observers, too: those of trainer.logger
        "console": "training.tracking:ConsoleLine",
        "tensorboard": "extras.loggers.trackers:TensorBoard",
        "wandb": "extras.loggers.trackers:Wandb",
        "mlflow": "extras.loggers.trackers:MLflow",
        "trackio": "extras.loggers.trackers:Trackio",
        "swanlab": "extras.loggers.trackers:SwanLab",
    },
    # commands
    "action": {"train": "training.run:Training", "dry_run": "extras.dry_run.dry_run:DryRun"},
    # verl, and whatever else one place of the core calls by its name
    "keys": {  # they translate in this order
        "verl": "extras.verl.keys:VerlKeys",
        "rollout_correction": "extras.rollout_correction.settings:Presets",
        "verifiers": "extras.verifiers.env_id:VerifiersKeys",
    },
    "optional": {
        "verl": "extras.verl.imports:StandIns",
        "generate_sequences": "extras.verl.engines:WholeBatches",  # of an engine that defines it itself
        **{  # methods that the project does not call
            f"DataProto.{name}": f"extras.verl.compat:{name}"
            for name in (
                *("chunk", "rename", "reorder", "make_iterator", "sample_level_repeat", "unfold_column_chunks"),
                *("padding", "is_padding_enabled", "to_tensordict", "get_data_info", "print_size"),
            )
        },
        "--multirun": "extras.sweep.sweep:sweep",
        "trainer.max_restarts": "extras.restarts.restarts:supervise",  # the process that is to run
        "scorers": "extras.scorers.pool:Scorers",  # they call a reward function outside this process
        "write_report": "extras.report.__main__:write_report",
        "plot_metric": "extras.report.charts:plot_metric",
        **{name: f"extras.python.trainer:{name}" for name in ("Trainer", "GRPOTrainer", "PPOTrainer")},
        "TrainingConfig": "extras.python.objects:TrainingConfig",
        "CellProgress": "extras.python.notebook:CellProgress",
        **{
            name: f"extras.tools.tool_classes:{name}"
            for name in ("BaseTool", "FunctionTool", "ToolResponse", "ToolSchema", "function_tool", "schema_of_text")
        },
        **{
            name: f"extras.tools.parsers:{name}"
            for name in ("FunctionCall", "HermesParser", "ParsedAnswer", "ToolCall", "ToolParser", "parse_answer")
        },
        "positions_and_metrics": "extras.curriculum.curriculum:positions_and_metrics",  # of a step, for samplers
        "agents": "extras.tools.shared_loop:load_agents",
        "behind_calls": "extras.tools.parsers:behind_calls",
    },
}
# Estimators that compare a sample with the others of its prompt alone: a group of one has no baseline at all. Those
# that whiten over the batch as well still have the batch to compare it with.
NEEDS_GROUPS = frozenset((
    *("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg", "max_rl", "sppo", "fapo"),
    *("optimal_token_baseline", "tir_optimal_token_baseline", "prime"),
))  # fmt: skip
PAIRS: tuple[tuple[str, str], ...] = (  # (an extra, another that it imports): deleted together
    ("distillation", "http"),
    ("evaluation", "standalone"),
    ("gym", "processes"),
    ("imitate", "processes"),
    ("interactions", "http"),
    ("judge", "http"),
    ("lookahead", "standalone"),
    ("openai", "http"),
    ("rules", "http"),
    ("rules", "processes"),
    ("rules", "sandbox"),
    ("scorers", "processes"),
    ("server", "standalone"),
    ("server", "tools"),
    ("sessions", "sandbox"),
    ("sessions", "server"),
    ("sessions", "tools"),
    ("sglang", "openai"),
    ("sweep", "restarts"),
    ("sandbox", "tools"),
    ("verl", "sandbox"),
    ("verl", "tools"),
    ("interactions", "tools"),
    ("dry_run", "watch"),  # both say why a step teaches nothing
    ("sft", "algorithms"),  # whose policy loss gpg it takes by name
)
SETTINGS: dict[str, tuple[str, ...]] = {  # by extra: how the keys of its settings begin, behind any section
    "distillation": ("distillation.enabled", "distillation.teacher", "distillation.distillation_loss"),
    "dry_run": ("trainer.dry_run",),
    "datagen": ("data.datagen",),
    "curriculum": ("data.source_weights",),
    "images": ("data.image_key", "actor.freeze_vision_tower"),
    "report": ("trainer.rollout_data_", "trainer.validation_data_dir", "trainer.sample_"),
    "restarts": ("trainer.max_restarts",),
    "best": ("trainer.save_best", "trainer.early_stop"),
    "watch": ("trainer.no_signal_steps", "trainer.max_rollout_mismatch", "trainer.log_val_generations"),
    "gym": ("env.processes",),
    "interactions": ("multi_turn.interaction_config_path",),
    "lora": ("model.lora_", "model.target_modules", "model.exclude_modules", "rollout.load_lora"),
    "reward_model": ("reward.reward_model",),
    "rules": ("reward.sandbox_fusion",),
    "sandbox": ("reward.sandbox",),
    "sessions": ("rollout.agent.program",),
    "sharding": (
        *("actor.tensor_parallel_size", "fsdp_config.fsdp_size", "fsdp_config.reshard_after_forward"),
        *("fsdp_config.mixed_precision", "fsdp_config.param_offload", "fsdp_config.optimizer_offload"),
        *("optim.moments_dtype", "ref.fsdp_config"),
    ),
    "scorers": (
        *("reward.num_workers", "reward.memory_limit_mb", "reward.in_process", "reward.max_rpm", "reward.max_tpm"),
        "reward.estimated_tokens_per_request",
    ),
    "rollout_correction": ("algorithm.rollout_correction",),
    "pf_ppo": ("algorithm.use_pf_ppo", "algorithm.pf_ppo"),
    "prime": ("algorithm.prime",),
    "algorithms": (
        *("policy_loss.clip_cov_", "policy_loss.kl_cov_ratio", "policy_loss.ppo_kl_coef", "policy_loss.dro_beta"),
        *("actor.tau_", "actor.gvpo_beta", "actor.dpo_beta", "actor.flowrl_beta", "actor.sppo_eta"),
        *("algorithm.gdpo_reward_", "trainer.spo", "algorithm.filter_groups"),
    ),
    "replay": ("trainer.save_rollouts", "trainer.replay_rollouts"),
    "verl": ("agent.agent_loop_config_path", "agent.trust_logprobs"),
    "weighted": ("reward.functions",),
    "tools": (
        *(f"multi_turn.{name}" for name in ("tool_config_path", "function_tool_path", "environment_factory")),
        *("multi_turn.max_assistant_turns", "multi_turn.max_user_turns", "multi_turn.max_parallel_calls"),
        *("multi_turn.max_tool_response_length", "multi_turn.tool_response_truncate_side"),
    ),
    "overlap": (
        *("rollout.nnodes", "rollout.n_gpus_per_node", "rollout.n_workers_per_node", "rollout.pool_roles"),
        *("trainer.async_mode", "trainer.max_staleness", "trainer.batch_order", "trainer.replay"),
    ),
}


def check_present(kind: str, name: str, key: str = "") -> None:
    """Raises ConfigError if the table has the name, and this copy not what it stands for; names `key`."""
    if name in TABLE[kind] and not has(kind, name):
        origin = name if kind == "optional" else f"{key or kind}={name}"
        raise ConfigError(f"{origin}: {absence(TABLE[kind][name].split('.')[1])}", key)


def has(kind: str, name: str) -> bool:
    """Says whether the table has the name, and this copy what it stands for."""
    return name in TABLE[kind] and is_here(TABLE[kind][name].partition(":")[0])


def present(kind: str) -> Iterator[str]:
    """Lists the names of a kind that this copy has, in the table's order."""
    return (name for name in TABLE[kind] if has(kind, name))


def is_here(module: str) -> bool:
    """Says whether a module of the repository is in this copy."""
    top, _, rest = module.partition(".")
    return top != "extras" or any((FOLDER / rest.partition(".")[0]).glob("*.py"))


def absence(extra: str) -> str:
    return f"{extra} is not in this copy; extras/{extra} was removed."


def section(extra: str, name: str = "Settings") -> type:
    """Returns the settings that an extra adds to the schema: a class to nest, or to inherit from; without it, none."""
    if not is_here(f"extras.{extra}"):
        from configs.settings import Frozen  # processes that score do not need it

        return make_dataclass(f"Absent{name}", [], bases=(Frozen,))
    return getattr(import_module(f"extras.{extra}.settings"), name)


def absent_extra_of(key: str) -> str | None:
    """Names the extra that would have a key, if it is not in this copy."""
    for extra, starts in SETTINGS.items():
        if any(f".{start}" in f".{key}" for start in starts) and not is_here(f"extras.{extra}"):
            return extra
    return None


def commands() -> Iterator[tuple[str, str]]:
    """Yields the commands of this copy's extras, and the first line that each says of itself."""
    for file in sorted([*FOLDER.glob("*/__main__.py"), *FOLDER.glob("*/main_*.py")]):
        module = f"extras.{file.parent.name}.{file.stem}".removesuffix(".__main__")
        yield f"python -m {module}", file.read_text().splitlines()[0].strip('"')


def those_present(kind: str, *names: str) -> list[str]:
    """Leaves out the names that this copy lacks: `${present:logger,console,tensorboard}` in a yaml file."""
    return [name for name in names if has(kind, name)]


OmegaConf.register_new_resolver("present", those_present, replace=True)
