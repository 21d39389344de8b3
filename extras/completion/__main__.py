"""Completes settings in bash when Tab is pressed: eval "$(python -m extras.completion)"."""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a file it runs like as a module

from configs.loader import options, yaml_folder
from configs.schema import Config

SCRIPT = """\
COMP_WORDBREAKS=${{COMP_WORDBREAKS//=}}
complete_settings() {{
    case "${{COMP_WORDS[1]}} ${{COMP_WORDS[COMP_CWORD - 1]}}" in
        *main.py\\ --config-name | *main.py\\ -cn) COMPREPLY=($(compgen -W "{configs}" -- "$2")) ;;
        *main.py\\ *) COMPREPLY=($(compgen -o default -W "{settings}" -- "$2")) ;;
        *) COMPREPLY=($(compgen -o default -- "$2")) ;;
    esac
}}
complete -o nospace -F complete_settings python python3"""


def settings(section: Any, prefix: str = "") -> Iterator[str]:
    """Yields `key=` for each setting of a section, and `key=value` for values that can be listed."""
    for item in (item for item in fields(section) if "free" not in item.metadata):  # which keep a user's keys
        key, value = f"{prefix}{item.name}", getattr(section, item.name)
        if is_dataclass(value):
            yield from settings(value, f"{key}.")
            continue
        values = item.metadata.get("choices") or (("true", "false") if isinstance(value, bool) else [""])
        yield from (f"{key}={value}" for value in values)


def script() -> str:
    """Returns the lines of bash by which Tab completes the arguments of python main.py."""
    configs = sorted(path.stem for path in yaml_folder(Config).glob("*.yaml"))
    words = [*settings(Config()), *(f"recipe={name}" for name in options("recipe"))]
    return SCRIPT.format(configs=" ".join(configs), settings=" ".join(words))


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(script())
