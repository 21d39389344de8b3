"""What the pages hold for a reader to do: files to write, commands to run.

In a page, a paragraph that is only a path in backticks and a colon names the fenced block below it as a file, and a
fenced block under `<!-- run -->` is run. README's tree says which files are ours.
"""

import re
import shlex
from pathlib import Path

from configs.paths import ROOT

WRITTEN_FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_BLOCK = re.compile(r"^<!-- run -->\n```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
TREE = re.compile(r"^## Where things are$.*?^```text$\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def runs_of_main(text: str) -> list[list[str]]:
    """The arguments of every `python main.py …` in the blocks that are run."""
    code = "\n".join(code for language, code in RUN_BLOCK.findall(text) if language == "sh")
    commands = [shlex.split(line) for line in code.replace("\\\n", " ").splitlines()]
    return [command[2:] for command in commands if command[:2] == ["python", "main.py"]]


def tree_lines(page: str) -> list[str]:
    """The paths in the tree of `page`, one a line, folders with a slash; two spaces deeper is inside."""
    paths, folders = [], []
    for line in TREE.search(page)[1].splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders = [*folders[:depth], name]
        paths.append("".join(folders))
    return paths


def without_users(files: list[str]) -> list[str]:
    """Those of `files`, paths from the root, that are ours: of custom/, which users fill, what README's tree has."""
    ours = tree_lines((ROOT / "README.md").read_text())
    return [file for file in files if not file.startswith("custom/") or file in ours]


def shipped_modules(*folders: str) -> list[Path]:
    """All Python files of ours in the `folders` of the root."""
    files = [path.relative_to(ROOT).as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    return [ROOT / file for file in sorted(without_users(files))]
