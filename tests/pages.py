"""What the pages hold for a reader to do: files to write, commands to run.

In a page, a paragraph that is only a path in backticks and a colon names the fenced block below it as a file, and a
fenced block under `<!-- run -->` is run.
"""

import re
import shlex

WRITTEN_FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN_BLOCK = re.compile(r"^<!-- run -->\n```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def runs_of_main(text: str) -> list[list[str]]:
    """The arguments of every `python main.py …` in the blocks that are run."""
    code = "\n".join(code for language, code in RUN_BLOCK.findall(text) if language == "sh")
    commands = [shlex.split(line) for line in code.replace("\\\n", " ").splitlines()]
    return [command[2:] for command in commands if command[:2] == ["python", "main.py"]]
