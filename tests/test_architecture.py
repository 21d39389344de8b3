"""The fences of the house, read off the syntax trees of all modules: who imports whom, how large things are, what is
not written here; and the tour of docs/tour.md fits an afternoon. Each fence catches a violation, or what it exempts."""

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from configs.extras import PAIRS
from tests.pages import shipped_modules, without_users

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ["configs", "data", "training", "workers", "main", "extras"]  # a module imports from its own and those before
MAX_MODULE, MAX_FUNCTION, MAX_POSITIONAL = 450, 50, 6  # lines, lines, parameters
MAX_TOUR = 2400  # lines to read of the files in docs/tour.md: one afternoon

UPSTREAM = "workers/upstream.py"
PRIVATE_NAMES = (UPSTREAM, "extras/sharding/private_names.py")

Finding = tuple[str, str]  # (what an exemption would name: module or module:function, what is wrong)

DOOR = (
    *("workers/group.py:all", "workers/group.py:_deal", "extras/overlap/fully_async.py:take_finished"),
    *("extras/overlap/fully_async.py:begin", "extras/overlap/fully_async.py:update_weights"),
    *("extras/overlap/pools.py:link", "extras/overlap/pools.py:together"),
    *(f"workers/ray_group.py:{function}" for function in ("_wait", "close", "result", "_look_for_deaths")),
)
THREADS = ("extras/overlap/fully_async.py:collect", "extras/overlap/one_step_off.py:sync")
IN_WORKERS = (
    *(f"extras/overlap/{function}" for function in ("generator.py:take", "generator.py:reload", "pools.py:broadcast")),
    *(f"workers/engine_pump.py:{function}" for function in ("run_until", "_pump")),
    *("workers/agents/user_code.py:by_deadline", "workers/model_checkpoint.py:save"),
    "workers/model_checkpoint.py:is_saved",
)
EXEMPT: dict[str, dict[str, str]] = {  # by fence: the place, and the reason; one that nobody needs fails
    "patches": {
        "workers/forward_check.py": "no kernel, but log-probs need it: a rope that is the same in every batch",
        "extras/sharding/fsdp2.py": "no kernel, but gradients need it: embeddings return float32, as it is added up",
    },
    "layers": {},
    "size": {
        "configs/schema.py": "every setting, once",
        "workers/hf_rollout.py": "one engine: its loop, and the rows that it runs",
        "extras/sft/dataset.py": "rows and conversations, and what is learnt of each",
    },
    "waits": {
        **dict.fromkeys(DOOR, "the door: what the call returned is waited for by Wait, or is there"),
        **dict.fromkeys(THREADS, "of a thread, whose own waits for workers end by Wait"),
        **dict.fromkeys(IN_WORKERS, "in a worker's process, which gets no further then: who waits for it sees it"),
        "workers/agents/user_code.py:_serve": "a thread of the user's code, until there is some",
    },
    "broad except": {
        "configs/errors.py": "the boundary of the commands: an error in one sentence",
        "custom/gym/world.py": "names the state in which a user's environment raised",
        "configs/import_utils.py": "names the user's file that failed to load",
        "training/reward.py": "names the line of the user's reward",
        "extras/imitate/demonstrations.py": "names the state in which a user's player raised",
        "extras/loggers/trackers.py": "a service that does not start, each by errors of its own, is said in one line",
        "extras/overlap/generator.py": "hands on to whoever waits what a change of weights has raised",
        "extras/rules/reasoning_gym.py": "an answer that breaks the scorer of a task is none",
        "extras/sandbox/child.py": "what a policy's program raises is its output",
        "extras/scorers/program.py": "answers what the user's reward raised, in a process of its own",
        "workers/agents/user_code.py": "hands on to whoever waits what the user's code raised in a thread",
        "extras/tools/shared_loop.py": "hands on to whoever waits what the user's code raised in the loop",
        "extras/tools/toolbox.py": "what a tool raises is an answer to the policy, counted and logged",
        "workers/agents/episode.py": "an environment or a tool that raises ends its episode, counted and shown",
    },
    "print": {
        "configs/errors.py": "says on stderr why the run ended",
        "configs/loader.py": "--cfg job, and notices before logging exists",
        "custom/tiny_model.py": "a command",
        "data/rows.py": "says what became of the rows of files",
        "extras/completion/__main__.py": "lines for bash",
        "extras/imitate/look.py": "a command",
        "workers/launch.py": "the batch arithmetic, at the start of a run",
        "extras/dry_run/dry_run.py": "says that nothing has changed",
        "extras/imitate/__main__.py": "says where the rows are",
        "extras/evaluation/main_generation.py": "says what it answers, and where the answers are",
        "extras/server/__main__.py": "says where it serves",
        "extras/cluster/__main__.py": "shows what the machines have",
        "extras/images/tiny_model.py": "a command",
        "extras/merge/__main__.py": "says where the model is",
        "training/ray_trainer.py": "says what a validation found",
        "extras/best/best.py": "names the best checkpoint at the end",
        "extras/report/observer.py": "says how to make a page of the run",
        "extras/report/__main__.py": "says where the report is",
        "training/run.py": "says that nothing is left to do, and what a run leaves",
        "extras/sft/trainer.py": "says where its workers are, and where its files go",
        "training/tracking.py": "the console logger",
        "extras/sweep/sweep.py": "names the run that starts, and lists all at the end",
        "extras/verl/compat.py": "DataProto.print_size, which code for verl calls to see sizes",
        "workers/model_worker.py": "the memory of its GPU, which main.py must not touch",
    },
    "private": {
        "configs/loader.py": "OmegaConf's nodes, for which setting an error names",
        "configs/settings.py": "OmegaConf's nodes: what was set, by whom, and whether it is a reference",
        "custom/env_wrapper.py": "gymnasium tells nobody else where the cliff of CliffWalking is",
        "data/concurrency.py": "asyncio's connection, in a layer below",
    },
    "introspection": {"extras/sharding/private_names.py": "what torch 2.11 lacks"},
    "environment": {
        "configs/process.py": "sets what torch reads when it is loaded, and Hydra's switch, and keys to servers",
        "extras/verl/__main__.py": "a script for verl reads the variables of whoever starts it, and sets others",
        "workers/vllm_setup.py": "vLLM takes settings from it, and its changes are put back",
        "workers/vllm_rollout_spmd.py": "sets what vLLM finds when it starts",
        "extras/sessions/host.py": "hands the environment on to programs",
        "workers/models.py": "CUDA_VISIBLE_DEVICES may hide the GPU on purpose",
        "workers/ray_group.py": "hands the environment on to worker processes",
        "workers/resources.py": "RAY_ADDRESS names a cluster",
        "extras/many_rows/prompt_lengths.py": "lets tokenizers use all threads, and puts that back",
    },
}


@cache
def sources() -> dict[str, ast.Module]:
    files = [ROOT / "main.py", *shipped_modules(*LAYERS[:4], "extras", "custom")]
    files = [path for path in files if "tests" not in path.relative_to(ROOT).parts]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names of every import, lazy ones too; `from a import b` counts as both a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; the root is on the path, so name the module"
            yield from (name for alias in node.names for name in (node.module, f"{node.module}.{alias.name}"))


def is_above(file: str, name: str) -> bool:
    layer = file.removesuffix(".py").split("/")[0]
    above = LAYERS[LAYERS.index(layer) + 1 :] if layer in LAYERS else ["workers", "main", "extras"]
    return name.split(".")[0] in above


def is_no_pair(file: str, name: str) -> bool:
    if not (file.startswith("extras/") and name.startswith("extras.")):
        return False
    own, other = file.split("/")[1], name.split(".")[1]
    return own != other and (own, other) not in PAIRS


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


QUARANTINE = {
    "ray": [UPSTREAM],
    f"{module_of(UPSTREAM)}.ray": ["workers/ray_group.py", "workers/resources.py"],
    "vllm": [
        *(UPSTREAM, "workers/vllm_rollout_spmd.py"),
        *("extras/openai/vllm_weights.py", "extras/openai/weight_transfer.py"),
    ],
    "sglang": ["extras/sglang/rollout.py"],
}


PATCHING = re.compile(r"register_\w*hook|AttentionInterface|AttentionMaskInterface")


def is_patch(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        sets_class = node.attr == "__class__" and isinstance(node.ctx, ast.Store)
        return sets_class or bool(PATCHING.fullmatch(node.attr))
    return isinstance(node, ast.alias) and bool(PATCHING.fullmatch(node.name))


def cycles(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """No module imports itself through others, not even lazily."""
    modules = {module_of(file): file for file in trees}
    edges = {file: {modules[name] for name in imported(tree) if name in modules} for file, tree in trees.items()}
    for file in trees:
        reached, frontier = set(), [file]
        while frontier:
            step = frontier.pop()
            new = edges[step] - {step} - reached
            reached |= new
            frontier += new
        if file in reached:
            yield file, "imports itself through others"


def size(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """Modules and functions that fit a head and a screen."""
    for file, tree in trees.items():
        if (lines := max((node.end_lineno for node in tree.body), default=0)) > MAX_MODULE:
            yield file, f"has {lines} lines"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                positional = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
                count = len(positional) - (positional[:1] in (["self"], ["cls"]))
                if (lines := node.end_lineno - node.lineno + 1) > MAX_FUNCTION:
                    yield f"{file}:{node.name}", f"has {lines} lines"
                if count > MAX_POSITIONAL:
                    yield f"{file}:{node.name}", f"has {count} positional parameters"


def waits_for_ever(node: ast.AST) -> bool:
    """Says whether a call names no seconds: ray.get, wait of a module or by itself, and of an object result, join, get
    and wait, which without an argument are those of a thread, a process, a queue or a future."""
    if not isinstance(node, ast.Call) or any(keyword.arg == "timeout" for keyword in node.keywords):
        return False
    module, _, name = ast.unparse(node.func).rpartition(".")
    if module in ("ray", "asyncio", "") and name in ("get", "wait"):
        return len(node.args) < 2
    return bool(module) and name in ("result", "join", "get", "wait") and not node.args


def endless_waits(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """A wait names its seconds; for workers the one door is workers/deadlines.py, which tells who gets no further."""
    for file, tree in trees.items():
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for function in functions if file.startswith(("workers/", "extras/overlap/")) else []:
            lines = [node.lineno for node in ast.walk(function) if waits_for_ever(node)]
            yield from ((f"{file}:{function.name}", f"line {line}") for line in lines)


PUBLIC = ("_asdict", "_replace", "_exit", "_current_frames")  # documented, for all their name
PRIVATE = re.compile(r"([A-Za-z]\w*\.)+_[A-Za-z][\w.]*")  # a dotted name with a private part


def private_names(trees: dict[str, ast.Module]) -> Iterator[Finding]:
    """Private names of other packages are used in files for them alone; what we define, or set, is ours."""
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    ours |= {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")
    }
    for file in trees.keys() - {*PRIVATE_NAMES}:
        names = {*imported(trees[file])}
        roots = {name.split(".")[0] for name in names} - {*LAYERS, "custom"}
        nodes = [node for node in ast.walk(trees[file]) if isinstance(node, ast.Attribute | ast.Constant)]
        names |= {ast.unparse(node).strip("'") for node in nodes}  # of loggers, too
        others = {node.attr for node in nodes if isinstance(node, ast.Attribute)}.difference(ours, PUBLIC)
        yield from ((file, name) for name in others if PRIVATE.fullmatch(f"x.{name}"))
        others = (name for name in names if name.split(".")[0] in roots and name.split(".")[-1] not in PUBLIC)
        yield from ((file, name) for name in others if PRIVATE.fullmatch(name))


Fence = Callable[[dict[str, ast.Module]], Iterator[Finding]]


def no_import(rule: str, is_forbidden: Callable[[str, str], bool]) -> Fence:
    def fence(trees: dict[str, ast.Module]) -> Iterator[Finding]:
        for file, tree in trees.items():
            yield from ((file, f"imports {name}") for name in imported(tree) if is_forbidden(file, name))

    fence.__doc__ = rule
    return fence


def unwanted(rule: str, pattern: Callable[[ast.AST], bool], but_in: str = "-") -> Fence:
    def fence(trees: dict[str, ast.Module]) -> Iterator[Finding]:
        for file, tree in trees.items():
            if not file.startswith(but_in):
                yield from ((file, f"line {node.lineno}") for node in ast.walk(tree) if pattern(node))

    fence.__doc__ = rule
    return fence


def calls(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names


def catches_everything(node: ast.AST) -> bool:
    if not isinstance(node, ast.ExceptHandler):
        return False
    kinds = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else {"Exception"}
    return bool(kinds & {"Exception", "BaseException"})


FENCES = {
    "layers": no_import(
        "configs < data < training < workers < main.py; the core and users' files in custom/ import no extra.", is_above
    ),
    "pairs": no_import("An extra imports no other, but for the pairs that the table names.", is_no_pair),
    "quarantine": no_import(
        "Ray is imported by one file and used in two, vLLM is known to four, SGLang to one.",
        lambda file, name: file not in (QUARANTINE.get(name) or QUARANTINE.get(name.split(".")[0], [file])),
    ),
    "private": private_names,
    "custom": no_import(
        "The user's files are found by path from the config, never imported.",
        lambda file, name: name.split(".")[0] == "custom" and not file.startswith("custom/"),
    ),
    "patches": unwanted(
        "Classes are exchanged, hooks set and attention registered inside extras/kernels/.", is_patch, "extras/kernels/"
    ),
    "cycles": cycles,
    "size": size,
    "waits": endless_waits,
    "broad except": unwanted("Only what can happen is caught: no except Exception.", catches_everything),
    "print": unwanted("Modules do not print.", lambda node: calls(node, "print")),
    "environment": unwanted(
        "Environment variables are not read or set.",
        lambda node: isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"),
    ),
    "introspection": unwanted(
        "No hasattr, no getattr with a default: what an object has is known.",
        lambda n: calls(n, "hasattr") or (calls(n, "getattr") and len(n.args) > 2),
    ),
}


@pytest.mark.parametrize("name", FENCES)
def test_the_tree_keeps_the_fence_and_every_exemption_is_needed(name):
    rule, findings, exempt = FENCES[name].__doc__, [*FENCES[name](sources())], EXEMPT.get(name, {})
    broken = [f"{place} {what}" for place, what in findings if place not in exempt]
    assert not broken, f"{rule} Against it: {'; '.join(broken)}. Make it fit, or give the reason in EXEMPT[{name!r}]."
    idle = exempt.keys() - {place for place, _ in findings}
    assert not idle, f"{rule} EXEMPT[{name!r}] names {idle}, which keep it: take them out."


VIOLATIONS = [  # of the others an exemption is found, which is needed
    ("layers", {"data/x.py": "from training import core_algos"}),
    ("layers", {"training/x.py": "def f():\n    import workers.engine"}),
    ("layers", {"custom/x.py": "import extras.gym"}),
    ("pairs", {"extras/a/x.py": "from extras.b import y"}),
    ("quarantine", {"training/x.py": "def f():\n    from ray.util import placement_group"}),
    ("cycles", {"workers/k/__init__.py": "from workers.k.a import f", "workers/k/a.py": "from workers.k import g"}),
    ("cycles", {"data/a.py": "import data.b", "data/b.py": "from data import c", "data/c.py": "import data.a"}),
    ("custom", {"training/x.py": "from custom.env_wrapper import make_env"}),
    ("waits", {"workers/x.py": "def f():\n    ray.get(call)"}),
    ("waits", {"workers/x.py": "def f():\n    [done], pending = ray.wait(pending)"}),
    ("waits", {"extras/overlap/x.py": "async def f():\n    await asyncio.wait(tasks, return_when=FIRST_COMPLETED)"}),
    ("private", {"data/x.py": "import torch\ntorch._dynamo.reset()"}),
    ("private", {"data/x.py": "def f(tensor):\n    tensor._is_view()"}),
    ("private", {"data/x.py": "def f():\n    from ray._private.utils import get_ray_address_file"}),
    ("private", {"data/x.py": "import torch, logging\nlogging.getLogger('torch._library.triton')"}),
    ("private", {"data/x.py": "import torch\nclass A:\n    def _c(self): torch._c()"}),
    ("quarantine", {"training/x.py": "from workers.upstream import ray"}),
    ("introspection", {"data/x.py": "getattr(x, 'y', None)"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "planted"), VIOLATIONS)
def test_the_fence_catches_a_violation(name, planted):
    assert list(FENCES[name]({file: ast.parse(text) for file, text in planted.items()}))


def test_a_users_own_files_in_custom_are_held_to_no_rule():
    users = ["custom/my_env.py", "custom/rewards/mine.py"]
    assert without_users(["custom/env_wrapper.py", *users, "data/rows.py"]) == ["custom/env_wrapper.py", "data/rows.py"]


TOUR_STOP = re.compile(r"^\d+\. \[([\w/]+\.py)\]\(\.\./\1\)(.*?)(?=^\d+\. |^$)", re.MULTILINE | re.DOTALL)


def lines_to_read(source: str, words: str) -> int:
    """Counts the lines of a stop's file; where its `words` say "Read only", those of the entries that they name."""
    if "Read only" not in words:
        return len(source.splitlines())
    entries = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return sum(node.end_lineno - node.lineno + 1 for node in entries if f"`{node.name}`" in words)


def test_the_tour_fits_an_afternoon():
    stops = TOUR_STOP.findall((ROOT / "docs/tour.md").read_text())
    lines = {file: lines_to_read((ROOT / file).read_text(), words) for file, words in stops}
    assert len(lines) >= 5 and all(lines.values()), "a numbered list of files, with what to read of some"
    assert sum(lines.values()) <= MAX_TOUR, f"{sum(lines.values())} lines: make a file simpler, not the tour"
