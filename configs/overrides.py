"""The command line's `key=value` in Hydra's grammar; paths stand in it as they are."""

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from configs.errors import ConfigError, first_line
from configs.legacy import HYDRA

ONE_RUN = (
    "sweeps are not run here; start one run per value, each in its folder: for seed in 0 1 2; do python main.py "
    "trainer.seed=$seed trainer.experiment_name=seed_$seed; done"
)


def parse_override(text: str) -> Override:
    """One `key=value`; a value that Hydra's grammar cannot read (~, parentheses, = in a path …) is a plain text.

    Raises:
        ConfigError: no key=value, a list or mapping that is not one, a sweep, or a setting of Hydra's own.
    """
    key, equals, value = text.partition("=")
    if not equals and not text.startswith("~"):
        raise ConfigError(f"'{text}' is not of the form key=value, e.g. trainer.total_epochs=3.")
    if key.lstrip("+~").startswith(("hydra.", "hydra/")):
        raise ConfigError(f"{text}: {HYDRA}")
    parser = OverridesParser.create()
    try:
        override = parser.parse_override(text)
    except HydraException as error:
        if value.startswith(("[", "{", "'", '"')):
            raise ConfigError(
                f"cannot read {text}: {first_line(error)}. In a list or mapping, a text with ~, (, ), = or a comma "
                "stands in quotes, and all of it in others for the shell: 'data.train_files=[\"a (1).jsonl\"]'."
            ) from error
        override = read_as_text(parser, key, value)
    if override.is_sweep_override():
        raise ConfigError(f"{text}: {ONE_RUN}. A text with a comma stands in quotes: '{key}=\"{value}\"'.")
    return override


def read_as_text(parser: OverridesParser, key: str, value: str) -> Override:
    quoted = value.replace("'", r"\'")
    try:
        return parser.parse_override(f"{key}='{quoted}'")
    except HydraException as error:
        raise ConfigError(f"cannot read {key}={value}: {first_line(error)}.") from error
