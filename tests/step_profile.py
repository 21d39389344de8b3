"""Counts what one GRPO step enters of our code, and what its run loads: python -m tests.step_profile [--list]

A FrozenLake step with the tiny model, the second of a run, so that nothing is made for the first time. A function is
counted once, however often it is called; lambdas, comprehensions and functions inside another count as functions, and
their lines as those of the definition that they stand in.
"""

import ast
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
OURS = tuple(f"{ROOT / folder}/" for folder in ("configs", "custom", "data", "training", "workers"))
PROFILED_STEP = 2


@dataclass(frozen=True)
class Entered:
    """Measures what a step enters of ours: the number of functions; by (file, first line), lines and name of each."""

    functions: int
    definitions: dict[tuple[str, int], tuple[int, str]]

    @property
    def files(self) -> int:
        return len({file for file, _ in self.definitions})

    @property
    def lines(self) -> int:
        return sum(lines for lines, _ in self.definitions.values())

    def by_file(self) -> dict[str, list[tuple[int, str]]]:
        found: dict[str, list[tuple[int, str]]] = {}
        for (file, _), function in sorted(self.definitions.items()):
            found.setdefault(file, []).append(function)
        return found


@cache
def definitions(file: str) -> list[tuple[int, int, str]]:
    """Lists first line (or decorator's), last line and name of the functions of `file` that are in no other."""

    def inside(node: ast.AST, prefix: str = "") -> list[tuple[int, int, str]]:
        found = []
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                found.append((first, child.end_lineno, prefix + child.name))
            elif isinstance(child, ast.ClassDef):
                found += inside(child, f"{prefix}{child.name}.")
        return found

    return inside(ast.parse(Path(file).read_text()))


def entered_functions(codes: set[CodeType]) -> Entered:
    """Finds the definitions that hold these code objects; what a class or a module runs is none."""
    found = {}
    for code in codes:
        for first, last, name in definitions(code.co_filename):
            if first <= code.co_firstlineno <= last:
                found[str(Path(code.co_filename).relative_to(ROOT)), first] = (last - first + 1, name)
    return Entered(len(codes), found)


def profile_step(model: Path, folder: Path) -> Entered:
    """Runs FrozenLake for some steps and returns what one of them enters, in all threads that it starts."""
    import main
    from tests.runs import compose, short_run
    from training.ray_trainer import RayPPOTrainer

    codes: set[CodeType] = set()
    step = RayPPOTrainer.step

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            codes.add(frame.f_code)

    def profiled(trainer: RayPPOTrainer) -> Any:
        if trainer.global_step != PROFILED_STEP:
            return step(trainer)
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            return step(trainer)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    with patch.object(RayPPOTrainer, "step", profiled):
        main.run(compose(*short_run(model, folder, f"trainer.total_training_steps={PROFILED_STEP}")))
    return entered_functions(codes)


def loaded_modules() -> int:
    """Counts the modules of the core and of extras that this process has loaded."""
    files = {getattr(module, "__file__", None) or "" for module in sys.modules.values()}
    return sum(file.startswith((*OURS, f"{ROOT}/extras/", f"{ROOT}/main.py")) for file in files)


def main_report() -> None:
    from custom.tiny_model import save_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(Path(folder) / "model", seed=0, hidden_size=32, layers=2)
        entered = profile_step(Path(folder) / "model", Path(folder) / "run")
    if "--list" in sys.argv[1:]:
        files = entered.by_file()
        for file in sorted(files, key=lambda file: sum(lines for lines, _ in files[file])):
            functions = files[file]
            names = ", ".join(f"{name} {lines}" for lines, name in sorted(functions, reverse=True))
            print(f"{file}: {len(functions)} definitions, {sum(lines for lines, _ in functions)} lines: {names}")
    print(f"one GRPO step enters {entered.files} files, {entered.functions} functions, {entered.lines} lines")
    print(f"its run loads {loaded_modules()} modules")


if __name__ == "__main__":
    main_report()
