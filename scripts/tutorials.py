"""Follows the tutorials of the docs that promise a figure to their end, on several seeds of model and run.

    python -m scripts.tutorials [--seeds 0,1,2] [--only treasure,sums]

Each runs in a copy of the repository, with the files and by the command of its page. Prints the table that
docs/environments.md shows, and ends with 1 if a run ends below the figure.
"""

import argparse
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module

from configs.paths import ROOT
from data.files import read_metrics

WRITTEN_FILE = re.compile(r"^`([\w./]+)`:\n\n```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)  # path, content
CODE = ("configs", "custom", "data", "extras", "main.py", "training", "workers")


@dataclass(frozen=True)
class Tutorial:
    """Says which command of a page trains, by its beginning, and the `figure` that a metric has at the end, or more.

    `metric`: the end of the metric's name."""

    page: str
    command: str
    metric: str
    figure: float


TUTORIALS = {
    "treasure": Tutorial("docs/environments.md", "python main.py --config-name treasure\n", "/acc/mean@1", 1.0),
    "sums": Tutorial("README.md", "python main.py data.train_files=sums.jsonl", "critic/score/mean", 0.9),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2", help="joined by commas")
    parser.add_argument("--only", default=",".join(TUTORIALS), help="names, joined by commas; all of them")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    arguments = parser.parse_intermixed_args()
    seeds, rows, missed = arguments.seeds.split(","), [], 0
    for name in arguments.only.split(","):
        tutorial, began = TUTORIALS[name], time.monotonic()
        ends = [follow(tutorial, seed, arguments.overrides) for seed in seeds]
        missed += sum(end < tutorial.figure for end in ends)
        seconds = (time.monotonic() - began) / len(seeds)
        found = ", ".join(f"{end:.2f}" for end in ends)
        rows.append(f"| {name} ({tutorial.page}) | {tutorial.figure:.2f} | {found} | {seconds:.0f} |")
    print(f"| tutorial | promised | seeds {', '.join(seeds)} | seconds |", "|---|---|---|---|", *rows, sep="\n")
    return int(missed > 0)


def follow(tutorial: Tutorial, seed: str, overrides: list[str]) -> float:
    """Trains as the page says, with a model and a run of this seed; returns the last value of the tutorial's metric."""
    text = (ROOT / tutorial.page).read_text()
    with tempfile.TemporaryDirectory(prefix="tutorial_") as name:
        folder = Path(name)
        for part in CODE:
            copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
            copy(ROOT / part, folder / part)
        for path, content in WRITTEN_FILE.findall(text):
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(content)
        run(folder, "-m", "custom.tiny_model", "outputs/tiny_model", "--seed", seed)
        own = [f"trainer.seed={seed}", "trainer.default_local_dir=outputs/run", *overrides]
        run(folder, *command_of(text, tutorial.command)[1:], *own)
        record = read_metrics(folder / "outputs/run/metrics.jsonl")
    return [value for entry in record for name, value in entry["data"].items() if name.endswith(tutorial.metric)][-1]


def command_of(text: str, beginning: str) -> list[str]:
    """Returns the words of the one command of a page that begins so."""
    assert text.count(beginning) == 1, f"the page has no command, or several, that begin with {beginning!r}"
    command, _, _ = text[text.index(beginning) :].replace("\\\n", " ").partition("\n")
    return shlex.split(command)


def run(folder: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, *arguments], cwd=folder, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
