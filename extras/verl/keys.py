"""Judges settings that are no keys of the schema: verl's of all versions, and those of guides.

The tables are extras/verl/keys.toml. `judge` says of one setting whether it works, is renamed, has no effect, or is
refused, and why.
"""

import copy
import re
import tomllib
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.errors import ConfigError, notice
from configs.extras import absent_extra_of
from configs.settings import Keys, delete, is_known, leaves

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATE = "actor_rollout_ref.model.custom_chat_template"
ONE_BACKEND = "there is one backend, transformers with FSDP2"
OFF = (None, False, 0, "", "disabled", "none", "null", "False", [], {})
MANY = 12  # settings of a yaml without effect; more are counted, and not listed
BACKEND = r"(_generated_)?(dp|fsdp2?|megatron|veomni|torchtitan|automodel|mindspeed\w*|hyperparallel|hf|legacy)(_\w+)?"
GROUPS = ("engine", "model", "optim", "model_engine")
VERLS_YAML = r"\w*(ppo|dapo|sft|distill|prime)\w*_trainer\w*|generation|evaluation"


def spelt_out(names: str) -> list[str]:
    """Expands names as a shell does: a.{b,c} is a.b and a.c."""
    parts = [[part.split(",") for part in re.split("[{}]", name)] for name in names.split()]
    return ["".join(chosen) for name in parts for chosen in product(*name)]


def pairs(table: dict[str, str]) -> dict[str, str]:
    """Expands old and new names side by side: {a,b}.{c,d} = {e,f}.g is a.c and a.d = e.g, b.c and b.d = f.g."""
    paired = {}
    for old, new in table.items():
        olds, news = spelt_out(old), spelt_out(new)
        paired |= {name: news[at * len(news) // len(olds)] for at, name in enumerate(olds)}
    return paired


TARGET = r"\$\{(?:oc\.select:)?(\.?\w[\w.]*)(?=[,}])"  # what an interpolation names
SIGNS = {".**": r"(?:\..*)?", "**.": r"(?:.*\.)?", "*": "[^.]*", "{": "(?:", "}": ")", ",": "|", ".": r"\."}


def pattern(names: str) -> re.Pattern:
    """Compiles patterns of keys, as extras/verl/keys.toml explains them."""
    return re.compile(
        "|".join(re.sub(r"\.\*\*|\*\*\.|[*{},.]", lambda it: SIGNS[it[0]], name) for name in names.split())
    )


class Table(NamedTuple):
    """The spellings of one entry point, or of all.

    Attributes:
        sections: those of the entry: those of main.py.
        renamed: old spelling: today's.
        computed: old spelling: how its value becomes today's, as an interpolation and in words.
        reasons: patterns of keys and the reason, by kind (refused, no_effect, unread).
    """

    sections: dict[str, str]
    renamed: dict[str, str]
    computed: dict[str, tuple[str, str]]
    reasons: dict[str, list[tuple[re.Pattern, str]]]

    def why(self, kind: str, key: str) -> str | None:
        """Returns the reason why a key is `refused`, of `no_effect` or `unread`; None if it is not."""
        return next((why for names, why in self.reasons[kind] if names.fullmatch(key)), None)


def as_table(read: dict[str, dict[str, str]]) -> Table:
    """Makes a table of what extras/verl/keys.toml says of an entry."""
    workers, lr = pairs(read.get("of_all_workers", {})), pairs(read.get("of_lr", {}))
    computed = dict.fromkeys(workers, ("${{per_worker:{}}}", "divided by the number of workers"))
    computed |= dict.fromkeys(lr, ("${{share:{},${{.lr}}}}", "as a share of lr"))
    reasons = {
        kind: [(pattern(names), why) for why, names in read.get(kind, {}).items()]
        for kind in ("refused", "no_effect", "unread")
    }
    return Table(read.get("sections", {}), pairs(read.get("renamed", {})) | workers | lr, computed, reasons)


READ = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
COMMON = as_table(READ)
ENTRIES = {
    "Config": as_table({"unread": READ["unread"]}),
    "SFTConfig": as_table(READ["sft"]),
    "GenerationConfig": as_table(READ["generation"]),
    "EvaluationConfig": as_table(READ["evaluation"]),
    "ServerConfig": as_table(READ["server"]),
}

RENAMED_VALUES = {
    name: [key, *value]
    for old, (new, *value) in READ["renamed_values"].items()
    for name, key in pairs({old: new}).items()
} | {f"{TEMPLATE}=chatml": [TEMPLATE, CHATML]}
RECIPES = {name: advice for advice, names in READ["recipes"].items() for name in names.split()}
NO_EFFECT_VALUES = {text: why for why, texts in READ["no_effect_values"].items() for text in spelt_out(texts)}
ONLY_VALUE = {  # key: the values as texts, and why no other
    key: ([text.partition("=")[2] for text in spelt_out(texts) if text.startswith(f"{key}=")], why)
    for why, texts in READ["only"].items()
    for key in {text.partition("=")[0] for text in spelt_out(texts)}
}


class Verdict(NamedTuple):
    """Says what becomes of a setting: it `works`, is `renamed`, has `no effect`, is `refused`, or `unknown`.

    Attributes:
        key, value: what is set, in today's spelling; value None of a renamed one: nothing is set.
        why: the reason, or for a renamed one all that is said of it.
    """

    kind: str
    key: str
    value: Any = None
    why: str = ""


def judge(key: str, value: Any, schema: type) -> Verdict:
    """Judges `key=value`, of any version of verl, for a config of the class `schema`."""
    entry = ENTRIES[schema.__name__]
    if key.endswith("_target_"):
        return Verdict("no effect", key, value, "a section is known by its name")
    spelling = spelling_in(key, entry.renamed)  # in the sections of this entry
    if why := entry.why("unread", spelling):
        return Verdict("no effect", key, value, why)
    before = spelling_in(spelling, entry.sections)  # in those of main.py
    main, new, how = spelling_in(before, COMMON.renamed), value, ""
    if (computed := entry.computed.get(key) or COMMON.computed.get(before)) and value is not None:
        new, how = computed[0].format(value), f"={value} {computed[1]}"
    if by_value := RENAMED_VALUES.get(f"{main}={value}") or RENAMED_VALUES.get(f"{spelling}={value}"):
        main, new = (*by_value, None)[:2]
    sections = {long: short for short, long in entry.sections.items()}
    today = spelling_in(main, sections)
    if why := NO_EFFECT_VALUES.get(f"{main}={value}") or NO_EFFECT_VALUES.get(f"{today}={value}"):
        return Verdict("no effect", key, value, why)
    if is_known(today, schema) or absent_extra_of(today):  # which the loader refuses
        if by_value:
            return Verdict("renamed", today, new, f"{key}={value} is read as {today}{f'={new}' * (today == key)}")
        if today == key:
            return Verdict("works", key, value)
        return Verdict("renamed", today, new, f"{key} is now {today}{how}")
    if main in ONLY_VALUE or (why := entry.why("refused", spelling) or COMMON.why("refused", main)):
        texts, why = ONLY_VALUE.get(main) or ((), why)
        if str(value) in texts if texts else value in OFF:
            return Verdict("no effect", key, value, "it is always so here")
        return Verdict("refused", key, value, in_sections(why, sections))
    if why := entry.why("no_effect", spelling) or COMMON.why("no_effect", main):
        return Verdict("no effect", key, value, in_sections(why, sections))
    return Verdict("unknown", key, value)


def spelling_in(key: str, table: dict[str, str]) -> str:
    """Returns the spelling that `table` has for a key, or for a section that it is below; else the key."""
    for old, new in table.items():
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key


def in_sections(text: str, sections: dict[str, str]) -> str:
    """Spells the keys that a reason names as an entry does; `sections` are main.py's: its own."""
    for long, short in sections.items():
        text = text.replace(f"{long}.", f"{short}.")
    return text


class VerlKeys(Keys):
    """Translates verl's keys, of all its versions; tells of what is renamed or has no effect."""

    def __init__(self, schema: type) -> None:
        super().__init__(schema)
        self.moved: list[tuple[str, Any, Verdict]] = []

    @staticmethod
    def has_yaml(name: str, default: str) -> bool:
        return name == default or re.fullmatch(VERLS_YAML, name) is not None

    @staticmethod
    def idle_choice(group: str, package: str | None, option: Any) -> str | None:
        """Says that a choice among verl's files for a backend, such as model_engine=dp, has no effect."""
        is_backend = (group in GROUPS or package is not None) and re.fullmatch(BACKEND, str(option))
        return ONE_BACKEND if is_backend else None

    @staticmethod
    def stand_in(group: str, option: str) -> str | None:
        """Says what verl's recipe is here (recipe=retool)."""
        return f"{RECIPES[option]}." if group == "recipe" and option in RECIPES else None

    def knows(self, key: str) -> bool:
        return judge(key, None, self.schema).kind != "unknown"

    def translate_yaml(self, config: DictConfig, overrides: list[Override], file: str) -> None:
        settle(config, overrides, self.schema)
        tell(move(config, self.schema), file)

    def translate_override(self, config: DictConfig, override: Override) -> None:
        section, _, name = override.key_or_group.partition(".")
        if override.is_add() and section == "algorithm" and not self.knows(override.key_or_group):
            key = f"algorithm.adv_estimator_kwargs.{name}"  # a setting of the user's estimator
            OmegaConf.update(config, key, config.algorithm.pop(name), force_add=True)
        self.moved += move(config, self.schema, later=True)

    def tell(self) -> None:
        tell(self.moved)


def settle(config: DictConfig, overrides: list[Override], schema: type) -> None:
    """Resolves a yaml's references in keys, or to keys, that are about to move, with the values of the overrides.

    A mandatory key without a value (???) is removed."""
    merged = copy.deepcopy(config)
    for override in overrides:
        if not override.is_delete():
            OmegaConf.update(merged, override.key_or_group, override.value(), force_add=True)
    for key, value in list(leaves(config)):
        if value == "???":
            delete(config, key)
        elif isinstance(value, str) and "${" in value:
            parent = key.rpartition(".")[0]
            names = [f"{parent}{name}" if name[0] == "." else name for name in re.findall(TARGET, value)]
            if not all(is_known(name, schema) for name in (key, *names)):
                try:
                    OmegaConf.update(config, key, OmegaConf.select(merged, key))
                except OmegaConfBaseException:
                    delete(config, key)


def move(config: DictConfig, schema: type, later: bool = False) -> list[tuple[str, Any, Verdict]]:
    """Renames old spellings and drops settings without effect; returns them for a notice.

    Today's spelling wins over an old one beside it, except over one that was set `later`."""
    moved = []
    for key, value in list(leaves(config)):
        verdict = judge(key, value, schema)
        if verdict.kind == "refused":
            raise ConfigError(f"{key}={value}: {verdict.why}.")
        if verdict.kind not in ("renamed", "no effect"):
            continue
        delete(config, key)
        if verdict.kind == "renamed":
            beside = OmegaConf.select(config, verdict.key) is not None and not later
            if value is None or beside:  # null was the default of the old key
                continue
            OmegaConf.update(config, verdict.key, verdict.value, force_add=True)
            if key == "trainer.resume_path":
                config.trainer.resume_mode = "resume_path"
        moved.append((key, value, verdict))
    return moved


def tell(moved: list[tuple[str, Any, Verdict]], file: str | None = None) -> None:
    """Prints a notice of each reason why settings (key, value) have no effect, and of each that is renamed.

    Of a yaml `file` with more than MANY of them only the numbers: a yaml of verl's holds hundreds."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for key, value, verdict in moved:
        reasons.setdefault((verdict.why, verdict.kind), []).append(f"{key}={value}")
    if file and len(reasons) > MANY:
        idle = sum(verdict.kind == "no effect" for _, _, verdict in moved)
        notice(
            f"of the settings of {file}, {idle} have no effect here, and {len(moved) - idle} are read by other "
            f"names: python -m extras.verl {file} lists them."
        )
        return
    for (why, kind), keys in reasons.items():
        verb = "has" if len(keys) == 1 else "have"
        notice(f"{why}." if kind == "renamed" else f"{', '.join(keys)} {verb} no effect: {why}.")


def per_worker(number: Any, *, _root_: DictConfig) -> int:
    """Divides a `number` of sequences among the workers: `${per_worker:32}`."""
    trainer = _root_.trainer
    return max(1, int(number) // (trainer.nnodes * (trainer.n_gpus_per_node or trainer.n_workers_per_node)))


def unmerged_lora(*, _root_: DictConfig) -> str:
    """Chooses the rollout.load_lora that verl's lora.merge=False stands for: `${unmerged_lora:}`."""
    policy = _root_.actor_rollout_ref
    has_lora = any(OmegaConf.select(policy, f"model.lora_{name}") for name in ("rank", "adapter_path"))
    return "adapter" if has_lora and policy.rollout.name == "vllm" else "merge"


OmegaConf.register_new_resolver("per_worker", per_worker, replace=True)
OmegaConf.register_new_resolver("unmerged_lora", unmerged_lora, replace=True)
OmegaConf.register_new_resolver("share", lambda part, total: total and part / total, replace=True)  # ${share:1e-7,1e-6}
