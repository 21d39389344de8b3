"""Draws the architecture from the code: which module of the core reaches which extras, and by which kind of the table.

    python -m scripts.architecture [--write]

Prints a picture in Mermaid's form, which GitHub shows; --write puts it into docs/tour.md, below its mark.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()

import argparse
import ast
import re
from itertools import compress
from pathlib import Path

from configs.extras import TABLE
from configs.paths import ROOT

LAYERS = ("configs", "data", "training", "workers", "custom", "main.py")  # each imports from those before it
LOOKS_UP = ("find", "asked_for", "present", "Registry")  # an object by its kind
PAGE, MARK = ROOT / "docs/tour.md", "<!-- python -m scripts.architecture --write -->"
BLOCK = re.compile(rf"{re.escape(MARK)}\n```mermaid\n.*?\n```\n", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the picture into docs/tour.md")
    if parser.parse_args().write:
        PAGE.write_text(BLOCK.sub(lambda _: block(), PAGE.read_text()))
    else:
        print(picture())


def block() -> str:
    """Returns the picture as it stands in the page."""
    return f"{MARK}\n```mermaid\n{picture()}\n```\n"


def picture() -> str:
    """Returns a flowchart: a box of modules for each layer of the core, and an arrow for each kind."""
    lines, targets = ["flowchart LR"], {}
    for layer in LAYERS:
        path = ROOT / layer
        files = [path] if path.is_file() else sorted(path.rglob("*.py"))
        kinds = {file.relative_to(ROOT): kinds_in(file) for file in files if file.name != "extras.py"}
        lines.append(f'  subgraph in_{layer.partition(".")[0]}["{layer}"]')
        lines += [f'    {node_of(module)}["{module.name}"]' for module, names in kinds.items() if names]
        lines.append("  end")
        targets |= {(module, kind): folders for module, names in kinds.items() for kind, folders in names.items()}
    for number, ((module, kind), folders) in enumerate(targets.items()):
        lines.append(f'  {node_of(module)} -- {kind} --> to{number}(["{", ".join(folders)}"])')
    return "\n".join(lines)


def kinds_in(file: Path) -> dict[str, list[str]]:
    """Returns the folders of extras/ that a module reaches, by kind: all that have an entry of it, or of what is
    optional those whose names stand in the module."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    texts = {node.value for node in nodes if is_text(node)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args]
    looked_up = {ast.literal_eval(call.args[0]) for call in calls if call.func.id in LOOKS_UP and is_text(call.args[0])}
    folders = {}
    for kind in sorted(looked_up):
        is_named = [
            kind != "optional" or not texts.isdisjoint({name, "".join(name.rpartition(".")[:2]) or name})
            for name in TABLE[kind]
        ]
        paths = [path.partition(":")[0].split(".") for path in compress(TABLE[kind].values(), is_named)]
        folders[kind] = list(dict.fromkeys(path[1] for path in paths if path[0] == "extras"))
    return {kind: names for kind, names in folders.items() if names}


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def node_of(module: Path) -> str:
    return re.sub(r"\W", "_", str(module.with_suffix("")))


if __name__ == "__main__":
    main()
