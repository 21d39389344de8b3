"""Runs main.py as the command `nano-verl`, where this repository is installed (pyproject.toml)."""

import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Trains: our folders stand first on the path, so that no other `data` or `configs` stands in for them."""
    folder = Path(__file__).resolve().parent
    home = folder if (folder / "main.py").is_file() else folder.parents[1]  # as pip install -e has it
    sys.path[:1] = [str(home), os.getcwd()]  # in place of bin/
    runpy.run_module("main", run_name="__main__")  # which parses, helps and refuses before its slow imports
