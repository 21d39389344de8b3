"""Installs sets of versions that requirements.txt allows, and runs the fast tests with each: python -m scripts.matrix

Prints a table, and ends with 1 if pip or a test failed. An environment takes up to 7 GB, in outputs/matrix, where it
stays for the next time; a set whose Python is not on this machine is left out.
"""

import argparse
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from xml.etree import ElementTree

from configs.paths import ROOT

FOLDER = ROOT / "outputs" / "matrix"
SETS = {  # name: Python, and what pip is told beside requirements-dev.txt
    "pinned-3.12": ("python3.12", ["--constraint", "constraints.txt"]),
    "pinned-3.13": ("python3.13", ["--constraint", "constraints.txt"]),
    "newest": ("python3.13", ["torch==2.14.*", "transformers==5.23.*"]),
    "oldest": ("python3.12", ["torch==2.11.*", "transformers==5.17.*"]),
}
FAST = "-m 'not slow' --numprocesses 2 --dist loadfile"
SHOWS = "import platform as p, torch, transformers as t; print(p.python_version(), torch.__version__, t.__version__)"
EMPTY = {"tests": "1", "failures": "0", "errors": "1", "skipped": "0"}  # counts of a pytest that did not end


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m scripts.matrix", description=__doc__)
    parser.add_argument("sets", nargs="*", metavar="SET", help=f"of {', '.join(SETS)}; without one: all")
    parser.add_argument("--python", help="for all sets, in place of their own")
    parser.add_argument("--pytest", default=FAST, metavar="ARGUMENTS", help=f'"{FAST}"')
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.sets) - SETS.keys():
        parser.error(f"no set {', '.join(sorted(unknown))}: {', '.join(SETS)}")
    lines, bad = ["| set | Python, torch, transformers | passed | failed | skipped | minutes |", "|---" * 6 + "|"], 0
    for name in arguments.sets or SETS:
        started = time.monotonic()
        cells, failed = try_set(name, arguments.python or SETS[name][0], arguments.pytest)
        minutes, bad = f"{(time.monotonic() - started) / 60:.0f}", bad + failed
        lines.append(f"| {' | '.join([name, *cells, *['-'] * (4 - len(cells)), minutes])} |")
    print("", *lines, sep="\n")
    return int(bad > 0)


def try_set(name: str, python: str, tests: str) -> tuple[list[str], int]:
    """Installs a set, unless it is there, and runs the tests; returns cells of its row, and how many failed."""
    run, ready, report = (FOLDER / name / file for file in ("bin/python", "ready.txt", "tests.xml"))
    wanted = "\n".join([python, *SETS[name][1], *(file.read_text() for file in sorted(ROOT.glob("*.txt")))])
    if not ready.exists() or ready.read_text() != wanted:
        if not succeeds(python, "-m", "venv", "--clear", FOLDER / name):
            return [f"no {python} here"], 0
        packages = ["--requirement", "requirements-dev.txt", *SETS[name][1]]
        if not succeeds(run, "-m", "pip", "install", "--quiet", *packages):
            return ["pip failed"], 1
        ready.write_text(wanted)
    versions = subprocess.run([run, "-c", SHOWS], capture_output=True, text=True, check=True).stdout.split()
    report.unlink(missing_ok=True)
    succeeds(run, "-m", "pytest", "--junitxml", report, *shlex.split(tests))
    suite = ElementTree.parse(report).getroot().find("testsuite").attrib if report.exists() else EMPTY
    total, failures, errors, skipped = (int(suite[count]) for count in EMPTY)
    failed = failures + errors
    return [", ".join(versions), *map(str, (total - failed - skipped, failed, skipped))], failed


def succeeds(*command: object) -> bool:
    with suppress(FileNotFoundError):
        return not subprocess.run(command, cwd=ROOT).returncode
    return False


if __name__ == "__main__":
    sys.exit(main())
