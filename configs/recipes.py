"""Settings that go by one name: groups of yaml files (`recipe=dapo` is configs/recipe/dapo.yaml), presets of a section.

A recipe is a yaml of Hydra's, laid over the one that --config-name names; a folder `recipe` beside a user's yaml adds
to the shipped ones.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from configs.errors import ConfigError, did_you_mean
from configs.rollout_correction import PRESETS, preset

CONFIG_DIR = Path(__file__).parent


def options(kind: str, folder: Path = CONFIG_DIR) -> list[str]:
    """The yaml files of a group: those in the folder of its name, in `folder` and among the shipped configs."""
    return sorted({path.stem for place in (folder, CONFIG_DIR) for path in (place / kind).glob("*.yaml")})


def check_choices(chosen: dict[str, Any], folder: Path) -> None:
    """Raises ConfigError where what is `chosen` of a group (recipe: dapo; None: nothing) is not there."""
    for kind, option in chosen.items():
        if option is not None and option not in (known := options(kind, folder)):
            raise ConfigError(f"{kind}={option}: no such {kind}.{did_you_mean(str(option), known)} {', '.join(known)}.")


def choice(kind: str, option: str | None, present: Mapping[str, str]) -> str:
    """Hydra's spelling for one file of a group, or none: exchanged or removed in a defaults list, or added to it."""
    if option is None:
        return f"~{kind}" if kind in present else ""
    return f"{'' if kind in present else '+'}{kind}={option}"


def expand_presets(given: DictConfig) -> None:
    """`algorithm.rollout_correction: NAME` becomes the settings of that preset, each of which can then be changed.

    null is the preset "disabled". In a mapping, which yaml files can inherit in parts, `preset: NAME` does the same.
    """
    section, key = OmegaConf.select(given, "algorithm"), "rollout_correction"
    if not OmegaConf.is_dict(section) or key not in section:
        return
    settings = dict(section[key]) if OmegaConf.is_dict(section[key]) else {"preset": section[key] or "disabled"}
    if (name := settings.pop("preset", None)) is None:
        return
    if name not in PRESETS:
        near = did_you_mean(str(name), list(PRESETS))
        raise ConfigError(f"algorithm.{key}={name}: no such preset.{near} {', '.join(PRESETS)}.")
    section[key] = preset(name) | settings
