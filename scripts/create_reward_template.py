"""Writes a reward function to start from: python -m scripts.create_reward_template [--task TASK] [--output FILE]

Tasks: math (boxes and ####; numbers by value, formulas by algebra), code (test cases in a sandbox), qa (short answers,
several right ones), custom (two lines to change). FILE is a copy of examples/reward_TASK.py, which scores two answers
when it is run.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module

from configs.errors import ConfigError, refusals  # isort: skip

import argparse
import json
import re

from configs.extras import absence, is_here
from configs.paths import ROOT


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("math", "code", "qa", "custom"), default="custom", help="custom by default")
    parser.add_argument("--output", default="my_reward.py", metavar="FILE", help="the new file: my_reward.py")
    arguments = parser.parse_args(argv)
    file = Path(arguments.output).expanduser().absolute()
    with refusals():
        create(arguments.task, file)
    print(f"{file} is written. It scores two answers of its own, rows with responses, and a run's:")
    print(f"  python {file}\n  cd {ROOT}")
    print(f"  python -m extras.try_reward {file} --data ROWS  # --audit: what do cheap answers earn?")
    print(f"  python main.py … reward.custom_reward_function.path={file}")


def create(task: str, file: Path) -> None:
    """Writes the template of a task, which finds this repository from any folder.

    Raises:
        ConfigError: it imports an extra that was removed, or there is a reason not to write `file`.
    """
    text = (ROOT / f"examples/reward_{task}.py").read_text()
    for extra in re.findall(r"^from extras\.(\w+)", text, re.MULTILINE):
        if not is_here(f"extras.{extra}"):
            raise ConfigError(f"--task={task}: {absence(extra)} The template imports it; --task=custom imports none.")
    if file.stem in sys.stdlib_module_names:
        raise ConfigError(f"--output={file}: it would hide Python's own module {file.stem}. Name it my_{file.stem}.py.")
    if file.exists():
        raise ConfigError(f"--output={file}: there is such a file, and it is kept. Name another, or remove it.")
    if not file.parent.is_dir():
        raise ConfigError(f"--output={file}: there is no folder {file.parent}. `mkdir -p {file.parent}` makes it.")
    file.write_text(text.replace("str(Path(__file__).resolve().parents[1])", json.dumps(str(ROOT))))


if __name__ == "__main__":
    main()
