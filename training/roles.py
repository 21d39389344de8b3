"""Lists the roles of a run in one table: the columns that each computes, whether it learns, how a worker builds it.

A file of yours, named by actor_rollout_ref.model.external_lib, adds a role by `register_role`, and is loaded by the
driver and by every worker.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from configs.checks import check_cuts
from configs.errors import ConfigError, did_you_mean
from configs.extras import present
from configs.import_utils import asked_for, find, load_extern_object, required_arguments
from configs.schema import Config, PretrainedModelConfig
from configs.settings import lay_over
from data.pretrained import check_same_tokens
from training.advantage import estimator_needs
from training.losses import TENSOR_ARGS, PolicyLoss, ReadableNamespace, get_policy_loss

TEACHER_KEY = "actor_rollout_ref.ref.model"
POLICY_COLUMNS = ("old_log_probs", "entropys", "sum_pi_squared")  # of the log-prob pass of the policy in training
SEQUENCES = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")  # of a forward pass
LOSS_COLUMNS = ("advantages", "old_log_probs", "rollout_is_weights")  # [B, R]; the last two where there are any
UPDATE_COLUMNS = (*LOSS_COLUMNS, "ref_log_prob", "rollout_log_probs")


@dataclass(frozen=True)
class RoleSpec:
    """An entry of the table.

    Attributes:
        name: of the role, and of its folder in a checkpoint.
        build: called in each worker with its `ModelWorker`, returns the object whose methods `Role` calls; a function,
            or "module:function".
        section: key of its settings, or a dataclass of defaults that are set at roles.NAME. A role that learns has
            optim, ppo_epochs, ppo_mini_batch_size and shuffle.
        head: transformers' class of its model, whose path is at model.path of the section.
        model: for models that are set elsewhere: maps a config to their settings by the keys of their paths; the first
            is the one that learns.
        columns: that its method `compute` adds to a batch; `compute` is called with rows and `arguments`.
        arguments: of `compute`: the sampling "temperature", the "columns" to compute.
        objects: columns of objects that it reads.
        reads: maps a config to the tensors that each method reads beside `SEQUENCES`; a method not listed gets all.
        update: its method that takes one step on a mini-batch; None: it does not learn.
        in_stage: whether it learns in a stage, not at the end of the step.
        stage: name of `compute` in timing_s/; None: the role's name.
        like_policy: its layers are split like the policy's, and it computes a prompt that rows share only once.
        build_order: roles are built in ascending order; below 0: before the policy has an optimiser.
        plays: says whether a run of this config has the role even if nothing reads its columns.
        check: raises ConfigError for settings that cannot work; called before workers start, if the run has the role.
    """

    name: str
    build: Callable[[Any], Any] | str
    section: str | type = ""
    head: type | None = None
    model: Callable[[Config], dict[str, PretrainedModelConfig]] | None = None
    columns: tuple[str, ...] = ()
    compute: str = "compute"
    arguments: tuple[str, ...] = ()
    objects: tuple[str, ...] = ("media",)
    update: str | None = None
    in_stage: bool = False
    stage: str | None = None
    like_policy: bool = True
    build_order: int = 0
    plays: Callable[[Config], bool] = lambda config: False
    reads: Callable[[Config], Mapping[str, Collection[str]]] = lambda config: {}
    check: Callable[[Config], None] = lambda config: None

    @property
    def key(self) -> str:
        """Returns the key of its settings."""
        return self.section if isinstance(self.section, str) else f"roles.{self.name}"

    def settings(self, config: Config) -> Any:
        if isinstance(self.section, str):
            return reduce(getattr, self.section.split("."), config)
        return lay_over(self.section, config.roles.get(self.name, {}), config, self.key)

    def models(self, config: Config) -> dict[str, PretrainedModelConfig]:
        """Returns its models' settings by the keys of their paths; other settings than the path are the policy's."""
        if self.model:
            return self.model(config)
        model = self.settings(config).model
        if not isinstance(model, PretrainedModelConfig):
            model = replace(config.policy_model, path=model.path)
        return {f"{self.key}.model.path": model}

    def builder(self) -> Callable[[Any], Any]:
        return load_extern_object(*self.build.split(":")) if isinstance(self.build, str) else self.build


ROLES: dict[str, RoleSpec] = {}


def register_role(spec: RoleSpec) -> RoleSpec:
    """Adds a role to the table; it replaces one of its name.

    Raises:
        ValueError: another role computes one of its columns.
    """
    for other in ROLES.values():
        if other.name != spec.name and (shared := set(spec.columns).intersection(other.columns)):
            raise ValueError(f"the role {spec.name} makes {sorted(shared)}, which the role {other.name} makes.")
    ROLES[spec.name] = spec
    return spec


def has_teacher(config: Config) -> bool:
    """Says whether ref.model names another model than the policy's."""
    return config.actor_rollout_ref.ref.model.path != config.policy_model.path


def check_teacher(config: Config) -> None:
    if has_teacher(config):
        check_same_tokens(config.policy_model, config.actor_rollout_ref.ref.model.path, f"{TEACHER_KEY}.path")


for entry in (
    RoleSpec(
        name="actor",
        build="workers.dp_actor:build_actor",
        section="actor_rollout_ref.actor",
        head=AutoModelForCausalLM,
        model=lambda config: {"actor_rollout_ref.model.path": config.policy_model},
        columns=POLICY_COLUMNS,
        compute="compute_log_prob",
        arguments=("temperature", "columns"),
        update="update_policy",
        stage="old_log_prob",
        plays=lambda config: True,
        reads=lambda config: {
            "compute_log_prob": (),
            **dict.fromkeys(("update_policy", "compute_loss"), (*UPDATE_COLUMNS, *loss_reads(config))),
        },
    ),
    RoleSpec(
        name="rollout",
        build="workers.model_worker:build_rollout",
        section="actor_rollout_ref.rollout",
        build_order=1,
        plays=lambda config: True,
    ),
    RoleSpec(
        name="ref",
        build="workers.dp_actor:build_reference",
        section="actor_rollout_ref.ref",
        head=AutoModelForCausalLM,
        columns=("ref_log_prob",),
        compute="compute_log_prob",
        arguments=("temperature", "columns"),
        build_order=-1,
        check=check_teacher,
        reads=lambda config: {"compute_log_prob": ()},
    ),
    RoleSpec(
        name="critic",
        build="workers.dp_critic:build_critic",
        section="critic",
        head=AutoModelForTokenClassification,
        columns=("values",),
        compute="compute_values",
        update="update_critic",
        stage="values",
        reads=lambda config: {"compute_values": (), "update_critic": ("values", "returns")},
    ),
):
    register_role(entry)
for name in present("role"):  # of extras
    register_role(find("role", name))

stages = partial(asked_for, "stage")  # of a config: the classes, in the order of the table


def columns_made(config: Config) -> set[str]:
    """Names the columns that stages make."""
    return set().union(*(stage.makes(config) for stage in stages(config)))


def loss_settings(config: Config) -> ReadableNamespace:
    """Returns the settings of the policy loss, as the stages override them."""
    settings = dict(vars(config.actor_rollout_ref.actor.policy_loss))
    for stage in stages(config):
        settings |= stage.loss_settings(config)
    return ReadableNamespace(**settings)


def policy_loss_of(config: Config) -> PolicyLoss:
    return get_policy_loss(loss_settings(config).loss_mode)


def needed_roles(config: Config, trainer_reads: Collection[str] = ()) -> list[str]:
    """Names the roles that a run has workers for; a run that only validates reads no columns."""
    read = set() if config.trainer.val_only else columns_read(config) | set(trainer_reads)
    return [name for name, spec in ROLES.items() if spec.plays(config) or not read.isdisjoint(spec.columns)]


def models_of(config: Config, roles: Iterable[str]) -> list[tuple[RoleSpec, str, PretrainedModelConfig]]:
    """Lists the models of these roles: role, key of the model's path, settings."""
    specs = map(ROLES.get, roles)
    return [(spec, *model) for spec in specs if spec.head for model in spec.models(config).items()]


def columns_read(config: Config, updates_policy: bool = True) -> set[str]:
    """Names the columns of roles that a step reads, without those that a stage makes. The estimator, the policy loss,
    KL terms and stages read columns; so does every update but a batch's first, whose ratio is 1. Entropies are added
    to a log-prob pass if there is one and the run logs them.
    """
    algorithm, actor, prompts = config.algorithm, config.actor_rollout_ref.actor, config.data.train_batch_size
    read = estimator_needs(algorithm.adv_estimator) | loss_reads(config)
    several_updates = actor.ppo_epochs > 1 or (actor.ppo_mini_batch_size or prompts) < prompts
    if (several_updates and updates_policy) or algorithm.use_kl_in_reward:
        read |= {"old_log_probs"}
    if algorithm.use_kl_in_reward or actor.use_kl_loss:
        read |= {"ref_log_prob"}
    if config.critic.enable:
        read |= {"values"}
    for stage in stages(config):
        read |= stage.reads(config)
    read -= columns_made(config)
    if not read.isdisjoint(POLICY_COLUMNS) and (actor.calculate_entropy or actor.entropy_coeff):
        read |= {"entropys"}
    return read


def loss_reads(config: Config) -> set[str]:
    """Names the required arguments of the policy loss, and of the task's loss under it, that are columns of roles or
    stages, or logits."""
    columns = columns_made(config).union(["logits"], *(spec.columns for spec in ROLES.values()))
    settings = loss_settings(config)
    losses = [get_policy_loss(name).function for name in (settings.loss_mode, settings.get("task_loss")) if name]
    return {name for loss in losses for name in required_arguments(loss)[len(TENSOR_ARGS) :] if name in columns}


def check_roles(config: Config, roles: list[str]) -> None:
    """Raises ConfigError for settings of a role that there is not, for a teacher whom nothing reads, and for batches
    that the roles of a run cannot cut as they are asked to."""
    with_section = [name for name, spec in ROLES.items() if not isinstance(spec.section, str)]
    for name in config.roles.keys() - with_section:
        raise ConfigError(f"roles.{name}: no role of this name has settings there.{did_you_mean(name, with_section)}")
    if has_teacher(config) and not config.trainer.val_only and "ref" not in roles:
        raise ConfigError(
            f"{TEACHER_KEY}.path names a teacher, and nothing reads ref_log_prob: set actor_rollout_ref.actor."
            "use_kl_loss=true or algorithm.use_kl_in_reward=true, or leave it out."
        )
    for spec in map(ROLES.get, roles):
        if spec.section:
            check_cuts(config, spec.settings(config), spec.key)
