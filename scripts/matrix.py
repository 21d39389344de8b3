"""Installs sets of versions that requirements.txt allows, and runs the fast tests with each: python -m scripts.matrix

It ends with a table, and with 1 if pip or a test failed. An environment takes up to 7 GB, in outputs/matrix, where it
stays for the next time; a set whose Python is not on this machine is left out.
"""

import argparse
import shlex
import shutil
import subprocess
import sys
import time
from xml.etree import ElementTree

from configs.paths import ROOT

FOLDER = ROOT / "outputs" / "matrix"
PINNED = ("--constraint", "constraints.txt")
SETS = {  # name: Python, and what pip is told beside requirements-dev.txt
    "pinned-3.12": ("python3.12", PINNED),
    "pinned-3.13": ("python3.13", PINNED),
    "newest": ("python3.13", ("torch==2.14.*", "transformers==5.23.*")),
    "oldest": ("python3.12", ("torch==2.11.*", "transformers==5.17.*")),
}
FAST = "-m 'not slow' --numprocesses 2 --dist loadfile"
SHOWS = "import platform as p, torch, transformers as t; print(p.python_version(), torch.__version__, t.__version__)"
EMPTY = {"tests": "0", "failures": "0", "errors": "1", "skipped": "0"}  # of pytest, where it did not get to its end


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m scripts.matrix", description=__doc__)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}; without one: all")
    parser.add_argument("--python", help="for all sets, in place of their own")
    parser.add_argument("--pytest", default=FAST, metavar="ARGUMENTS", help=FAST)
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.sets) - SETS.keys():
        parser.error(f"no set {', '.join(sorted(unknown))}: {', '.join(SETS)}")
    lines, failed = ["| set | Python, torch, transformers | passed | failed | skipped | minutes |", "|---" * 6 + "|"], 0
    for name in arguments.sets or SETS:
        started = time.monotonic()
        python = arguments.python or SETS[name][0]
        cells, bad = test_set(name, python, arguments.pytest) if is_there(python) else ([f"no {python} here"], 0)
        cells = [name, *cells, *["-"] * (4 - len(cells)), f"{(time.monotonic() - started) / 60:.0f}"]
        failed += bad
        lines.append(f"| {' | '.join(cells)} |")
    print("", *lines, sep="\n")
    return int(failed > 0)


def is_there(python: str) -> bool:  # pyenv has a script of that name for versions that are not chosen
    return shutil.which(python) is not None and not subprocess.run([python, "-V"], capture_output=True).returncode


def test_set(name: str, python: str, tests: str) -> tuple[list[str], int]:
    """Installs a set, unless it is there, and runs the tests; returns cells of its row, and how many failed."""
    run, ready, report = (FOLDER / name / file for file in ("bin/python", "ready.txt", "tests.xml"))
    packages = SETS[name][1]
    files = [file.read_text() for file in sorted(ROOT.glob("*.txt"))]
    wanted = "\n".join([python, *packages, *files])
    if not ready.exists() or ready.read_text() != wanted:
        subprocess.run([python, "-m", "venv", "--clear", FOLDER / name], check=True)
        pip = [run, "-m", "pip", "install", "--quiet", "--requirement", "requirements-dev.txt", *packages]
        if subprocess.run(pip, cwd=ROOT).returncode:
            return ["pip failed"], 1
        ready.write_text(wanted)
    versions = subprocess.run([run, "-c", SHOWS], capture_output=True, text=True, check=True).stdout.split()
    report.unlink(missing_ok=True)
    subprocess.run([run, "-m", "pytest", "--junitxml", report, *shlex.split(tests)], cwd=ROOT)
    suite = ElementTree.parse(report).getroot().find("testsuite").attrib if report.exists() else EMPTY
    total, failures, errors, skipped = (int(suite[count]) for count in EMPTY)
    counts = total - failures - errors - skipped, failures + errors, skipped
    return [", ".join(versions), *map(str, counts)], failures + errors


if __name__ == "__main__":
    sys.exit(main())
