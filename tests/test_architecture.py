"""The fences of the house, read off the syntax trees of all modules: who imports whom, how large things are, what is
not written here. Each fence is also shown to catch a violation, and an exemption that nobody needs fails."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ["configs", "data", "training", "workers", "main"]  # a module imports from its own layer and those before it
MAX_MODULE, MAX_FUNCTION, MAX_POSITIONAL = 300, 50, 6  # lines, lines, parameters

Finding = tuple[str, str]  # (what an exemption would name: module or module:function, what is wrong)

EXEMPT = {
    "layers": {
        "training/sft_trainer.py": "an entry point of its own, like main.py: it wires the engine that the actor uses",
    },
    "quarantine": {},
    "kernels": {},
    "patches": {},
    "cycles": {},
    "custom": {},
    "size": {
        "configs/schema.py": "every setting, once",
        "custom/text_env.py": "one class, and its parts know each other's state",
        "data/protocol.py": "verl's DataProto with all its operations",
        "training/core_algos.py": "a catalogue of algorithms",
        "training/metric_utils.py": "a catalogue of metrics",
    },
    "broad except": {
        "configs/errors.py": "the boundary of the commands: an error in one sentence",
        "custom/text_env.py": "names the state in which a user's environment raised",
        "data/import_utils.py": "names the user's file that failed to load",
        "training/reward.py": "names the line of the user's reward",
    },
    "print": {
        "configs/errors.py": "says on stderr why the run ended",
        "configs/loader.py": "--cfg job, and notices before logging exists",
        "custom/tiny_model.py": "a command",
        "main.py": "the batch arithmetic, at the start of a run",
        "training/ray_trainer.py": "says what a run resumes from",
        "training/tracking.py": "the console logger",
    },
    "environment": {
        "configs/process.py": "sets what torch reads when it is loaded",
        "workers/worker_group.py": "hands the environment on to worker processes",
    },
    "introspection": {},
}


def sources() -> dict[str, ast.Module]:
    files = [ROOT / "main.py", *(path for folder in [*LAYERS[:-1], "custom"] for path in (ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(files)}


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names of every import, lazy ones too; `from a import b` counts as both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; the root is on the path, so name the module"
            yield from (name for alias in node.names for name in (node.module, f"{node.module}.{alias.name}"))


def layers(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """configs < data < training < workers < main.py."""
    for file, tree in trees.items():
        layer = file.removesuffix(".py").split("/")[0]
        above = LAYERS[LAYERS.index(layer) + 1 :] if layer in LAYERS else ["workers", "main"]
        yield from ((file, f"imports {name}") for name in imported(tree) if name.split(".")[0] in above)


def quarantine(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """Ray is known to two files and vLLM to one, so that everything else runs without them."""
    allowed = {"ray": ["main.py", "workers/worker_group.py"], "vllm": ["workers/vllm_rollout_spmd.py"]}
    for file, tree in trees.items():
        tops = {name.split(".")[0] for name in imported(tree)}
        yield from ((file, f"imports {top}") for top in tops if file not in allowed.get(top, [file]))


def custom(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """The user's files are found by path from the config, never imported."""
    for file, tree in trees.items():
        if not file.startswith("custom/"):
            yield from ((file, f"imports {name}") for name in imported(tree) if name.split(".")[0] == "custom")


def kernels(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """What is inside workers/kernels/ is known to its door alone."""
    inside = {module_of(file) for file in trees if file.startswith("workers/kernels/")} - {"workers.kernels"}
    for file, tree in trees.items():
        if not file.startswith("workers/kernels/"):
            yield from ((file, f"imports {name}") for name in imported(tree) if name in inside)


def patches(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """Classes are exchanged, hooks set and attention registered inside workers/kernels/ alone."""
    for file, tree in trees.items():
        if not file.startswith("workers/kernels/"):
            yield from ((file, f"line {node.lineno}") for node in ast.walk(tree) if is_patch(node))


def is_patch(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        sets_class = node.attr == "__class__" and isinstance(node.ctx, ast.Store)
        return sets_class or is_patching_name(node.attr)
    return isinstance(node, ast.alias) and is_patching_name(node.name)


def is_patching_name(name: str) -> bool:
    sets_hook = name.startswith("register_") and name.endswith("hook")
    return sets_hook or name in ("AttentionInterface", "AttentionMaskInterface")


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def cycles(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """No module imports itself through others, not even lazily."""
    modules = {module_of(file): file for file in trees}
    edges = {file: {modules[name] for name in imported(tree) if name in modules} for file, tree in trees.items()}
    for file in trees:
        reached, frontier = set(), [file]
        while frontier:
            new = edges[frontier.pop()] - reached
            reached |= new
            frontier += new
        if file in reached:
            yield file, "imports itself through others"


def size(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """Modules and functions that fit a head and a screen."""
    for file, tree in trees.items():
        if (lines := max(node.end_lineno for node in tree.body)) > MAX_MODULE:
            yield file, f"has {lines} lines"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                positional = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
                count = len(positional) - (positional[:1] in (["self"], ["cls"]))
                if (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION:
                    yield f"{file}:{node.name}", f"has {lines} lines"
                if count > MAX_POSITIONAL:
                    yield f"{file}:{node.name}", f"has {count} positional parameters"


def unwanted(pattern: Callable[[ast.AST], bool]) -> Callable[[dict[str, ast.Module]], Iterator[Finding]]:
    def fence(trees: dict[str, ast.Module]) -> Iterator[Finding]:
        for file, tree in trees.items():
            yield from ((file, f"line {node.lineno}") for node in ast.walk(tree) if pattern(node))

    return fence


def calls(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def catches_everything(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    kinds = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else {"Exception"}
    return bool(kinds & {"Exception", "BaseException"})


FENCES = {
    "layers": layers,
    "quarantine": quarantine,
    "kernels": kernels,
    "patches": patches,
    "cycles": cycles,
    "custom": custom,
    "size": size,
    "broad except": unwanted(catches_everything),
    "print": unwanted(lambda node: calls(node, "print")),
    "environment": unwanted(lambda node: isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")),
    "introspection": unwanted(lambda n: calls(n, "hasattr") or (calls(n, "getattr") and len(n.args) > 2)),
}


@pytest.mark.parametrize("name", FENCES)
def test_the_tree_keeps_the_fence_and_every_exemption_is_needed(name):
    findings = [*FENCES[name](sources())]
    broken = [finding for finding in findings if finding[0] not in EXEMPT[name]]
    assert not broken, f"{FENCES[name].__doc__ or name} Make it fit, or add it to EXEMPT with the reason."
    idle = EXEMPT[name].keys() - {place for place, _ in findings}
    assert not idle, "exemptions that nothing needs any more"


VIOLATIONS = [
    ("layers", {"data/x.py": "from training import core_algos"}),
    ("layers", {"training/x.py": "def f():\n    import workers.engine"}),
    ("layers", {"workers/x.py": "import main"}),
    ("layers", {"custom/x.py": "from workers.engine import TrainEngine"}),
    ("quarantine", {"training/x.py": "def f():\n    from ray.util import placement_group"}),
    ("quarantine", {"workers/hf/rollout.py": "import vllm"}),
    ("kernels", {"workers/x.py": "from workers.kernels.norms import rms_norm", "workers/kernels/norms.py": "x = 1"}),
    ("kernels", {"workers/x.py": "from workers.kernels import norms", "workers/kernels/norms.py": "x = 1"}),
    ("kernels", {"main.py": "def f():\n    import workers.kernels.norms", "workers/kernels/norms.py": "x = 1"}),
    ("patches", {"workers/x.py": "layer.__class__ = Faster"}),
    ("patches", {"workers/x.py": "layer.name, layer.__class__ = name, Faster"}),
    ("patches", {"workers/x.py": "module.register_forward_pre_hook(f)"}),
    ("patches", {"workers/x.py": "from torch.optim.optimizer import register_optimizer_step_post_hook"}),
    ("patches", {"workers/x.py": "from transformers import AttentionInterface"}),
    ("patches", {"workers/x.py": "import transformers\ntransformers.AttentionMaskInterface.register(name, mask)"}),
    ("cycles", {"workers/k/__init__.py": "from workers.k.a import f", "workers/k/a.py": "from workers.k import g"}),
    ("cycles", {"data/a.py": "import data.b", "data/b.py": "def f():\n    from data.a import g"}),
    ("cycles", {"data/a.py": "import data.b", "data/b.py": "from data import c", "data/c.py": "import data.a"}),
    ("custom", {"training/x.py": "from custom.env_wrapper import make_env"}),
    ("size", {"data/x.py": "x = 1\n" * 301}),
    ("size", {"data/x.py": "def f():\n" + "    x = 1\n" * 50}),
    ("size", {"data/x.py": "class A:\n    def f(self, a, b, c, d, e, f, g): ..."}),
    ("broad except", {"data/x.py": "try:\n    f()\nexcept Exception as error:\n    pass"}),
    ("broad except", {"data/x.py": "try:\n    f()\nexcept (OSError, BaseException):\n    pass"}),
    ("broad except", {"data/x.py": "try:\n    f()\nexcept:\n    pass"}),
    ("print", {"data/x.py": "print(1)"}),
    ("environment", {"data/x.py": "import os\nos.environ['A'] = '1'"}),
    ("introspection", {"data/x.py": "hasattr(x, 'y')"}),
    ("introspection", {"data/x.py": "getattr(x, 'y', None)"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "planted"), VIOLATIONS)
def test_the_fence_catches_a_violation(name, planted):
    assert list(FENCES[name]({file: ast.parse(text) for file, text in planted.items()}))


ALLOWED = {
    "training/x.py": "from data.protocol import DataProto\nimport configs.schema\nimport training.advantage",
    "training/advantage.py": "import torch",
    "main.py": "import ray\nfrom workers.engine import TrainEngine",
    "data/protocol.py": "def f(self, a, b, *, c, d, e, g, h):\n    return getattr(self, a)",
    "workers/x.py": "from workers.kernels import prepare\nassert layer.__class__ is Linear",
    "workers/kernels/__init__.py": "from workers.kernels.norms import use_fast_norms",
    "workers/kernels/norms.py": "layer.__class__ = Faster\nmodule.register_forward_hook(f)",
    "custom/x.py": "from custom.y import z",
    "custom/y.py": "try:\n    f()\nexcept ValueError:\n    raise",
}


@pytest.mark.parametrize("name", FENCES)
def test_what_is_allowed_passes(name):
    assert not list(FENCES[name]({file: ast.parse(text) for file, text in ALLOWED.items()}))
