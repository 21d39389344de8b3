"""Defines the settings of rollout correction: their types, verl's presets, and how thresholds are parsed.

Needs no torch, so that an invalid threshold is refused before a model loads. correction.py has the mathematics.
"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf

from configs.errors import ConfigError, did_you_mean
from configs.settings import Frozen, Keys, group, setting

Threshold = float | str
BYPASS_LOSS = "bypass_mode"

REJECTION_OPTIONS = (
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
)  # fmt: skip

_BAND_RULE = (
    'it must be an upper bound such as 2.0, or a band such as "0.5_2.0", with 0 < lower <= upper. Give both bounds a '
    "decimal point: YAML and the command line read 1_2 as the number 12"
)


def parse_band(name: str, entry: Threshold) -> tuple[float | None, float]:
    """Parses "lower_upper" as (lower, upper), and a number or its text as (None, upper); `name` is used in errors.

    Raises TypeError on anything but numbers and strings, ValueError unless 0 < lower <= upper.
    """
    if isinstance(entry, bool) or not isinstance(entry, int | float | str):
        raise TypeError(f"{name} is {entry!r}, a {type(entry).__name__}; {_BAND_RULE}")
    try:
        bounds = [float(part) for part in str(entry).split("_")]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or not 0 < bounds[0] <= bounds[-1]:
        raise ValueError(f"{name} is {entry!r}; {_BAND_RULE}")
    return (bounds[0] if len(bounds) == 2 else None), bounds[-1]


def parse_rejection(rollout_rs: str | None, rollout_rs_threshold: Threshold | None) -> dict[str, tuple[float, float]]:
    """Maps each option in `rollout_rs` to the smallest and the largest value of its statistic that is kept.

    Raises ValueError and TypeError as `compute_rollout_rejection_mask` says.
    """
    options = list(dict.fromkeys(_split(rollout_rs))) if isinstance(rollout_rs, str) else []
    if not options or not set(options) <= set(REJECTION_OPTIONS):
        raise ValueError(
            f"rollout_rs is {rollout_rs!r}, but must be one or more of {', '.join(REJECTION_OPTIONS)}, joined by commas"
        )
    if rollout_rs_threshold is None:
        raise ValueError(
            f"rollout_rs is {rollout_rs!r} but rollout_rs_threshold is null: set how far is too far, for example "
            '"0.5_2.0" (a band of the ratio) for k1, or 0.01 (an upper bound) for k2 and k3'
        )
    entries = _split(rollout_rs_threshold) if isinstance(rollout_rs_threshold, str) else [rollout_rs_threshold]
    if len(entries) not in (1, len(options)):
        raise ValueError(
            f"rollout_rs_threshold {rollout_rs_threshold!r} has {len(entries)} entries, but rollout_rs names "
            f"{len(options)} options ({', '.join(options)}): give one entry for all, or one for each"
        )
    shared = entries * len(options) if len(entries) == 1 else entries
    return {option: _statistic_bounds(option, entry) for option, entry in zip(options, shared, strict=True)}


def _statistic_bounds(option: str, entry: Threshold) -> tuple[float, float]:
    lower, upper = parse_band("rollout_rs_threshold", entry)
    if option.endswith("k1"):
        lower = 1 / upper if lower is None else lower
        if lower > upper:
            raise ValueError(
                f"rollout_rs_threshold is {entry!r} for {option}, which means the band from {lower:g} to {upper:g}: "
                "give an upper bound of at least 1, or both bounds"
            )
        return math.log(lower), math.log(upper)
    if lower is not None:
        raise ValueError(
            f"rollout_rs_threshold is {entry!r} for {option}, a statistic that starts at 0: give an upper bound alone"
        )
    return -math.inf, upper


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


@dataclass
class RolloutCorrectionConfig(Frozen):
    """Selects the correction; by default there is none, and the drift is only measured.

    The class methods are verl's presets (`PRESETS`): decoupled ones recompute the old log-probs, bypass ones take the
    rollout's. is, tis: importance weights; rs: rejection; geo: by the geometric mean of the ratio; pg: plain policy
    gradient.
    """

    switches = "rollout_is: rollout_is_threshold rollout_is_batch_normalize; bypass_mode: loss_type"
    rollout_is: str | None = setting(
        None, "Importance weights of each token or each sequence; null: none.", choices=("token", "sequence")
    )
    rollout_is_threshold: Any = setting(2.0, 'Largest weight; "0.5_5.0": weights outside become 0 (IcePop).')
    rollout_is_batch_normalize: bool = setting(False, "Divide the weights by their mean.")
    rollout_rs: str | None = setting(None, "Statistics of rejection, e.g. seq_mean_k1, joined by commas; null: none.")
    rollout_rs_threshold: Any = setting(
        None, 'Limit of the statistic: for k1 a band of the ratio, e.g. "0.5_2.0", for k2 and k3 an upper bound.'
    )
    bypass_mode: bool = setting(False, "Use the rollout's log-probs as the old ones: one forward pass less.")
    loss_type: str = setting("ppo_clip", "Loss in bypass mode.", choices=("ppo_clip", "reinforce"))

    @property
    def corrects(self) -> bool:
        """Says whether weights or rejection are asked for, now or in the loss."""
        return self.bypass_mode or self.rollout_is is not None or self.rollout_rs is not None

    def check(self, config: Any, key: str) -> None:
        """Refuses invalid thresholds, and a policy loss beside bypass mode, which has its own."""
        super().check(config, key)
        try:
            parse_band("rollout_is_threshold", self.rollout_is_threshold)
            if self.rollout_rs is not None:
                parse_rejection(self.rollout_rs, self.rollout_rs_threshold)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{key}.{error}.") from error
        loss, loss_key = config.actor_rollout_ref.actor.policy_loss, "actor_rollout_ref.actor.policy_loss.loss_mode"
        if self.bypass_mode and loss.loss_mode not in ("vanilla", BYPASS_LOSS):
            raise ConfigError(f"{key}.bypass_mode=true brings its own loss: leave out {loss_key}={loss.loss_mode}.")
        if loss.loss_mode == BYPASS_LOSS and not self.bypass_mode:
            raise ConfigError(f"{loss_key}={BYPASS_LOSS} is chosen by {key}.bypass_mode=true: set that.")
        if self.bypass_mode and self.rollout_is_batch_normalize:
            raise ConfigError(f"{key}.rollout_is_batch_normalize=true needs a whole batch: leave out bypass_mode=true.")


_TOKEN, _SEQUENCE, _ICEPOP = {"rollout_is": "token"}, {"rollout_is": "sequence"}, {"rollout_is_threshold": "0.5_5.0"}
_GEO = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3 = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}
_BYPASS = {"bypass_mode": True}
_PG = _BYPASS | {"loss_type": "reinforce"}
PRESETS: dict[str, dict[str, Any]] = {
    "disabled": {},
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _TOKEN | _ICEPOP,
    "decoupled_seq_is_rs": _SEQUENCE | {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": _GEO | _SEQUENCE,
    "decoupled_geo_rs_token_tis": _GEO | _TOKEN,
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": _K3 | _SEQUENCE,
    "decoupled_k3_rs_token_tis": _K3 | _TOKEN,
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": _GEO | _BYPASS,
    "bypass_ppo_clip_k3_rs": _K3 | _BYPASS,
    "bypass_pg_is": _SEQUENCE | _PG,
    "bypass_pg_token_icepop": _TOKEN | _ICEPOP | _PG,
    "bypass_pg_geo_rs": _GEO | _PG,
    "bypass_pg_geo_rs_seq_tis": _GEO | _SEQUENCE | _PG,
    "bypass_pg_geo_rs_token_tis": _GEO | _TOKEN | _PG,
}


def _preset(cls: type, settings: dict[str, Any], **bounds: Any) -> Any:
    """Makes a config of a preset; `bounds` are verl's threshold (or is_threshold), threshold_lower and rs_threshold."""
    upper = bounds.get("threshold", bounds.get("is_threshold", settings.get("rollout_is_threshold", 2.0)))
    upper = f"{bounds['threshold_lower']}_{upper}" if "threshold_lower" in bounds else upper
    values = settings | ({"rollout_is_threshold": upper} if "rollout_is" in settings else {})
    return cls(**values | ({"rollout_rs_threshold": bounds["rs_threshold"]} if "rs_threshold" in bounds else {}))


for _name, _settings in PRESETS.items():
    setattr(RolloutCorrectionConfig, _name, classmethod(partial(_preset, settings=_settings)))


def preset(name: str) -> dict[str, Any]:
    """Returns the settings of the preset `name`, one of `PRESETS`."""
    return asdict(getattr(RolloutCorrectionConfig, name)())


class Presets(Keys):
    """Reads the name of a preset as its settings, each of which can then be changed."""

    def translate_yaml(self, config: DictConfig, overrides: Any, file: str) -> None:
        expand_presets(config)

    def translate_override(self, config: DictConfig, override: Any) -> None:
        expand_presets(config)


def expand_presets(config: DictConfig) -> None:
    """Replaces `algorithm.rollout_correction: NAME` by the settings of that preset, each of which can then be changed.

    null is the preset "disabled". In a mapping, which yaml files can inherit in parts, `preset: NAME` does the same.
    """
    section, key = OmegaConf.select(config, "algorithm"), "rollout_correction"
    if not OmegaConf.is_dict(section) or key not in section:
        return
    settings = dict(section[key]) if OmegaConf.is_dict(section[key]) else {"preset": section[key] or "disabled"}
    if (name := settings.pop("preset", None)) is None:
        return
    if name not in PRESETS:
        near = did_you_mean(str(name), list(PRESETS))
        raise ConfigError(f"algorithm.{key}={name}: no such preset.{near} {', '.join(PRESETS)}.")
    section[key] = preset(name) | settings


@dataclass
class Settings(Frozen):
    rollout_correction: RolloutCorrectionConfig = group(
        RolloutCorrectionConfig, "For rollouts whose probabilities are not the trainer's; or the name of a preset."
    )
