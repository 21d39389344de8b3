"""Finds in the pages what a reader is to do: files to write, commands to run.

In a page, a paragraph that is only a path in backticks and a colon names the fenced block below it as a file, and a
fenced block under `<!-- run -->` is run. SHIPPED says which files of custom/ are ours.
"""

import re
import shlex
from pathlib import Path

from configs.paths import ROOT

WRITTEN_FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_BLOCK = re.compile(r"^<!-- run -->\n```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
SHIPPED = (
    *(f"custom/{name}.py" for name in ("env_wrapper", "env_dataset", "reward_manager", "tiny_model")),
    *(f"custom/{folder}/" for folder in ("gym", "examples")),
)


def runs_of_main(text: str) -> list[list[str]]:
    """The arguments of every `python main.py …` in the blocks that are run."""
    code = "\n".join(code for language, code in RUN_BLOCK.findall(text) if language == "sh")
    commands = [shlex.split(line) for line in code.replace("\\\n", " ").splitlines()]
    return [command[2:] for command in commands if command[:2] == ["python", "main.py"]]


def without_users(files: list[str]) -> list[str]:
    """Returns our own among `files`, paths from the root: of custom/, which users fill, what SHIPPED names."""
    return [file for file in files if not file.startswith("custom/") or file.startswith(SHIPPED)]


def shipped_modules(*folders: str) -> list[Path]:
    """All Python files of ours in the `folders` of the root."""
    files = [path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [ROOT / file for file in sorted(without_users(files))]
