"""Says what this machine has for a run, and what it lacks: python -m scripts.check_env

A line begins with ✓, with – (a run does without it, or its version is outside the range that works), or with ✗ and the
remedy (every run needs it). Ends with 1 if there is a ✗.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (which what is imported below ends at)
    raise SystemExit(f"✗ Python {sys.version.split()[0]}: 3.11 or newer is needed. make PYTHON=python3.11 setup")

from configs.process import available_cores, memory_and_disk  # isort: skip

import argparse
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import metadata
from itertools import chain
from pathlib import Path

from configs.paths import ROOT

Line = tuple[str, str]  # a mark, and what it is set to
LARGE = ("torch", "transformers", "ray")  # they may be there and broken, so they are imported


def main(argv: list[str] | None = None) -> int:
    argparse.ArgumentParser("python -m scripts.check_env", description=__doc__).parse_args(argv)
    marks = []
    for mark, text in chain(packages(), optional(), machine()):
        print(mark, text, flush=True)
        marks.append(mark)
    print("What a run needs is not all here." if "✗" in marks else "A run can start: `make quickstart`.")
    return int("✗" in marks)


def packages() -> Iterator[Line]:
    """Yields lines for Python, for the large packages, and for each other that is missing or outside its range."""
    yield "✓", f"Python {sys.version.split()[0]}: {sys.executable}"
    present = {str(one.name).lower().replace("_", "-"): one.version for one in metadata.distributions()}
    for name, versions in allowed_versions("requirements.txt").items():
        result = result_of(f"import {name}; print({name}.__version__)") if name in LARGE else None
        works, text = result or (name in present, present.get(name, "it is not installed"))
        line = judge(name, works, text, versions, "✗", f"`make setup`, or `pip install '{name}{versions}'`")
        if result or line[0] != "✓":
            yield line


def allowed_versions(file: str) -> dict[str, str]:
    """Reads the ranges in a file of requirements; in a wheel, which has no such files, those that it requires."""
    path = ROOT / file
    text = path.read_text() if path.exists() else "\n".join(metadata.requires("nano-verl") or [])
    return dict(re.findall(r"^([\w-]+)(?:\[.*?\])?([<>=][^;\s]*)(?!.*extra ==)", text, re.MULTILINE))


def is_allowed(version: str, versions: str) -> bool:
    """Says whether a version is in a range such as >=2.11,<2.15 or ==2.60.*"""
    parts = numbers(version)
    rules = [(rule.strip("0123456789.*"), numbers(rule)) for rule in versions.split(",") if rule]
    signs = {">=": parts.__ge__, "<": parts.__lt__, "==": lambda limit: parts[: len(limit)] == limit}
    return all(signs[sign](limit) for sign, limit in rules)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def result_of(program: str) -> tuple[bool, str]:
    """Runs a program in a process of its own, as it may crash; returns whether it succeeds, and its last line."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return done.returncode == 0, lines[-1] if lines else f"it ends with status {done.returncode}"


def judge(name: str, works: bool, text: str, versions: str, mark: str, remedy: str) -> Line:
    """Marks a package by its version `text`; with `mark` if it does not work, `text` being the reason."""
    if works and is_allowed(text, versions):
        return "✓", f"{name} {text}"
    return ("–", f"{name} {text}, outside {versions}: {remedy}") if works else (mark, f"{name}: {text}. {remedy}")


def optional() -> Iterator[Line]:
    versions = allowed_versions("requirements-vllm.txt").get("vllm", "")
    vllm = result_of("import vllm; print(vllm.__version__)")
    yield judge("vLLM (optional: rollout.name=vllm)", *vllm, versions, "–", "`make setup-vllm`")
    works, text = result_of("from scripts.check_env import gpu; print(gpu())")
    yield "✓" if works else "–", f"GPU (optional): {text}"


def gpu() -> str:
    """Describes the GPUs of this machine; ends the process with the reason if torch can use none."""
    import torch

    from workers.engine import gpu_has_bfloat16
    from workers.models import gpu_trouble

    if not torch.cuda.is_available():
        raise SystemExit(gpu_trouble() or "none, so runs use the CPU")
    name, bfloat16 = torch.cuda.get_device_name(), "bfloat16" if gpu_has_bfloat16() else "no bfloat16, so float32"
    platform = f"ROCm {torch.version.hip}, untried" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return f"{torch.cuda.device_count()} x {name}, {platform}, {bfloat16}"


def machine() -> Iterator[Line]:
    """Yields lines for the cores, the memory, and the folders that runs write to."""
    yield "✓", "cores: {} ({})".format(*available_cores())
    rooms = [  # where, GB that a small run takes, the mark without them, and what to do
        ("memory", 2, "✗", "end other programs"),
        (str(Path.cwd()), 1, "✗", "runs write here, or to trainer.default_local_dir"),
        (tempfile.gettempdir(), 1, "✗", "Ray and rewards write there, or to TMPDIR"),
        ("/dev/shm", 1, "–", "Ray's workers and vLLM share it; in Docker: --shm-size=8g"),
    ]
    free = {name: shutil.disk_usage(name).free / 1e9 for name, *_ in rooms[1:] if Path(name).exists()}
    if memory := re.match(r"(\S+) of \S+ GB of memory", memory_and_disk(".")):
        free["memory"] = float(memory[1])
    for name, least, mark, remedy in (room for room in rooms if room[0] in free):
        text = f"{name}: {free[name]:.3g} GB free"
        yield ("✓", text) if free[name] >= least else (mark, f"{text}, of {least}: {remedy}")


if __name__ == "__main__":
    sys.exit(main())
