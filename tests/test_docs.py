"""The pages are true: their files and commands run, their links, paths and settings exist.

Files are written and commands run (tests/pages.py) in a copy of the repository, page by page and in their order; a
command that trains is composed, checked and prepared. The examples of CONTRIBUTING.md train in a test of their own.
"""

import ast
import compileall
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import groupby
from pathlib import Path

import pytest

from benchmarks.step import measure
from configs.errors import ConfigError
from configs.extras import present
from configs.loader import compose, options
from configs.schema import AGGREGATION_MODES
from extras.rollout_correction.settings import PRESETS
from extras.verl.keys import RECIPES
from scripts import algorithms, architecture, quickstart
from tests.forked import python
from tests.pages import RUN_BLOCK, SECTION, WRITTEN_FILE, runs_of_main, shipped_modules
from tests.runs import ROOT, learning_metrics
from training.core_algos import AdvantageEstimator

RANGE = re.MULTILINE | re.DOTALL
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"} - {"outputs"}
IN_TEXT = re.compile(r"`([^`\n]+)`")
MAKE_MODEL = "python -m custom.tiny_model outputs/tiny_model"
# What trains is composed, checked and prepared; the training itself is that of CONTRIBUTING.md and the user contracts.
UNTRAINED = """
import sys
from importlib import import_module
from unittest.mock import patch

for name in {stopped}:
    patch(name, lambda *_: None).start()
import_module("{module}").main(sys.argv[1:])
"""
TRAINS = {  # (module, what of it is not called), by the words of the command
    ("main.py",): ("main", ["main.Launch.init_workers", "main.Launch.fit"]),
    ("-m", "extras.sft"): ("extras.sft.__main__", ["extras.sft.trainer.train"]),
    ("-m", "scripts.learn"): ("scripts.learn", ["scripts.learn.learn", "scripts.learn.print_summary"]),
}
READS_A_RUN = ("extras.report.show_episodes", "extras.merge.__main__")  # commands that show what training has left


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository whose modules are compiled: each command imports those of its own copy."""
    folder = tmp_path_factory.mktemp("compiled")
    for name in ("configs", "custom", "data", "examples", "extras", "scripts", "training", "workers"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (ROOT / "main.py", ROOT / "verl.py", *ROOT.glob("requirements*.txt")):
        shutil.copy2(file, folder)
    compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.fixture
def copy(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of the repository, as the working directory."""
    shutil.copytree(compiled, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run_command(command: str, folder: Path) -> str:
    """Runs a command of a page and returns its output; a command that trains stops where it would start to."""
    arguments = shlex.split(command)[1:]
    if any(name in arguments for name in READS_A_RUN):
        return ""
    for entry, (module, stopped) in TRAINS.items():
        if tuple(arguments[: len(entry)]) == entry:
            arguments = ["-c", UNTRAINED.format(module=module, stopped=stopped), *arguments[len(entry) :]]
    done = python(*arguments, cwd=folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_block(code: str, folder: Path) -> None:
    """Runs the lines of a shell block in their order: `python …` by `run_command`, those between them by bash."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for is_python, lines in groupby(code.replace("\\\n", " ").splitlines(), lambda line: line.startswith("python ")):
        if is_python:
            for line in lines:
                run_command(line, folder)
        else:
            subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=folder, env=environment, check=True)


@pytest.fixture
def follow(copy: Path, tiny_model: Path) -> Callable[[Path], None]:
    """follow(page) does what a reader does in `copy`, but for training: writes the page's files, runs its commands, and
    its Python in this process. Python that reads what training leaves is compiled."""

    def write_and_run(page: Path) -> None:
        text = page.read_text()
        for path, content in WRITTEN_FILE.findall(text):
            (copy / path).parent.mkdir(exist_ok=True)
            (copy / path).write_text(content)
        for language, code in RUN_BLOCK.findall(text):
            if MAKE_MODEL in code:
                shutil.copytree(tiny_model, copy / "outputs/tiny_model", dirs_exist_ok=True)
                code = code.replace(f"{MAKE_MODEL}\n", "")
            if language == "sh":
                run_block(code, copy)
            elif "global_step_" not in code:
                exec(compile(code, str(page), "exec"), {})

    return write_and_run


FOLLOWED = [page for page in PAGES if RUN_BLOCK.search(page.read_text()) and page.name != "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.name)
def test_the_files_and_commands_of_a_page_work(copy: Path, follow: Callable[[Path], None], page: Path):
    (copy / "outputs").mkdir()
    follow(page)
    if page.name == "environments.md":
        mistakes = dict(re.findall(r"^\| `([\w.]+=\S+)` \| (.+?) \|$", page.read_text(), re.MULTILINE))
        assert len(mistakes) >= 8
        for (override, promised), said in zip(mistakes.items(), refusals(copy, [*mistakes]), strict=True):
            assert promised in said, override
    if page.name == "reward_rules.md":
        assert "pays 100%" in (copy / "outputs/audit.txt").read_text()
    if page.name == "serving.md":
        figures = json.loads((copy / "outputs/figures.json").read_text())["sums"]
        assert figures["prompts"] == 3 and figures["responses"] == 24
        assert {"mean@8", "pass@8", "majority@8"} <= set(figures)


def prepared(page: str, copy: Path) -> str:
    """Writes the files of a page and makes the tiny model, in the copy; returns the page's text."""
    text = (ROOT / page).read_text()
    for path, content in WRITTEN_FILE.findall(text):
        (copy / path).write_text(content)
    run_command(MAKE_MODEL, copy)
    return text


def test_readmes_prompts_and_reward_train_and_the_reward_rises(copy: Path):
    text = prepared("README.md", copy)
    [command] = [arguments for arguments in runs_of_main(text) if "data.train_files=sums.jsonl" in arguments]
    done = python("main.py", *command, cwd=copy)
    assert done.returncode == 0, done.stderr
    scores = [step["critic/score/mean"] for step in learning_metrics(copy / "outputs/sums").values()]
    assert len(scores) == 50 and scores[-1] > 0.8 > 0.2 > scores[0]


@pytest.mark.slow
def test_the_tutorial_of_environments_reaches_the_treasure(copy: Path):
    prepared("docs/environments.md", copy)
    done = python("main.py", "--config-name", "treasure", "trainer.default_local_dir=outputs/treasure", cwd=copy)
    assert done.returncode == 0, done.stderr
    *_, last = learning_metrics(copy / "outputs/treasure").values()
    assert [value for name, value in last.items() if name.endswith("/acc/mean@1")] == [1.0]


def test_the_memory_and_the_levels_of_the_page_on_environments(copy: Path):
    for path, content in WRITTEN_FILE.findall((ROOT / "docs/environments.md").read_text()):
        (copy / path).write_text(content)
    (copy / "look.py").write_text("""
import torch
from custom.env_wrapper import make_env
from custom.tiny_model import build_tokenizer
from custom.treasure_levels import Remembering, Rising
from data.protocol import DataProto

environment = make_env("custom.treasure:Treasure-v0")
state = next(state for state in map(environment.get_state, range(99)) if len(state.actions) == 3)
texts = Remembering(environment).state_to_text(state).split("\\n")
assert len(texts) == 3 and texts[-1] == state.text
assert all(abs(before.index("P") - after.index("P")) <= 1 for before, after in zip(texts, texts[1:]))
rows = Rising(environment, build_tokenizer(), size=200)

def furthest():
    shown = [rows[position]["extra_info"]["state"].text for position in range(len(rows))]
    return max(abs(text.index("P") - text.index("T")) for text in shown)

assert furthest() == 2
for score in (0.5, 1.0):
    rows.on_batch_end(DataProto.from_single_dict({"token_level_scores": torch.full((4, 1), score)}))
assert rows.level == furthest() == 3
""")
    python("look.py", cwd=copy, check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_compiles(page: Path):
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(), RANGE):
        compile(code, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def refusals(copy: Path, overrides: list[str]) -> list[str]:
    """Returns how `python main.py --config-name treasure override` refuses each; all overrides in one process."""
    program = """
import contextlib, io, json, sys
import main

def refusal(override):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main.main(["--config-name", "treasure", override])
    return said.getvalue()

print(json.dumps([refusal(override) for override in sys.argv[1:]]))
"""
    (copy / "refusals.py").write_text(program)
    return json.loads(python("refusals.py", *overrides, cwd=copy, check=True).stdout.splitlines()[-1])


def test_algorithms_page_names_all_there_is_and_has_a_figure_for_every_recipe():
    page = ROOT / "docs/algorithms.md"
    text = page.read_text()
    words = {word for code in IN_TEXT.findall(text) for word in re.findall(r"\w+", code)}
    names = {*AdvantageEstimator, *present("estimator"), *present("policy_loss"), *PRESETS}
    assert names | {word for mode in AGGREGATION_MODES for word in mode.split("-")} <= words
    measured = re.findall(r"^\| (\w+) \| (0\.\d+) \| (0\.\d+) \| \d+\.\d+ \|$", text, re.MULTILINE)
    assert [name for name, *_ in measured] == algorithms.RECIPES
    assert all(float(success) > 0.5 for _, *of_seeds in measured for success in of_seeds)


def test_the_table_of_verls_recipes_says_what_their_refusals_say():
    section = dict(SECTION.findall((ROOT / "docs/algorithms.md").read_text()))["Recipes of verl's"]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    told = {name: here for names, here in rows for name in re.findall(r"`([\w-]+)`", names)}
    shipped = {name for name in told if name in options("recipe")}
    assert told.keys() - shipped == RECIPES.keys() and all("`recipe=`" in told[name] for name in shipped)
    for name, advice in RECIPES.items():
        with pytest.raises(ConfigError, match=re.escape(f"recipe={name}: no such recipe. {advice}. There are cispo,")):
            compose("frozenlake", [f"recipe={name}"])
        named = {*re.findall(r"docs/(\w+\.md)", advice), *re.findall(r"recipe=\w+", advice)} - {"algorithms.md"}
        assert not [part for part in named if part not in told[name]]


def test_the_script_behind_the_algorithms_page_writes_what_it_shows(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """The script trains two recipes for a few steps, and writes their table and curves."""
    monkeypatch.setattr(quickstart, "DEMONSTRATIONS", 256)
    short = ["trainer.total_training_steps=2", "trainer.test_freq=1"]
    small = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "env.val_episodes=4"]
    monkeypatch.setattr(sys, "argv", ["algorithms", "--recipes", "grpo,ppo", *short, *small])
    algorithms.main()
    rows = (copy / "outputs/algorithms/table.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| grpo", "| ppo"]
    assert (copy / "outputs/algorithms/curves.png").stat().st_size > 1000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path):
    text = page.read_text()
    links = {link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link}
    assert not {link for link in links if not (page.parent / link).exists()}
    written = {path for path, _ in WRITTEN_FILE.findall(text)}
    named = {name for name in IN_TEXT.findall(text) if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./]*|\w+\.py", name)}
    assert not {name for name in named - written if not (ROOT / name).exists()}


def test_benchmark_measures_every_phase_of_a_step():
    overrides = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "env.train_size=20"]
    figures = measure(1, overrides)
    assert {"gen", "reward", "old_log_prob", "update_actor", "step"} <= set(figures["seconds"])
    assert figures["tokens_per_second"] == pytest.approx(figures["tokens"] / figures["seconds"]["step"])


def test_evidence_names_only_what_there_is():
    """Each row has a cell of proof, and what a GPU has shown stands there by its figures alone."""
    text = (ROOT / "docs/evidence.md").read_text()
    _, _, *rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    assert len(rows) >= 15
    assert not [row[0] for row in rows if len(row) != 6 or not any("`" in cell for cell in row[1:5])]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)", text)) <= targets
    modules = {name.replace(".", "/") for name in re.findall(r"`python -m ((?!pytest)[\w.]+)", text)}
    assert not [name for name in modules if not (ROOT / f"{name}.py").exists() and not (ROOT / name).is_dir()]


def test_troubleshooting_quotes_messages_that_the_code_says():
    files = shipped_modules("configs", "data", "training", "workers", "extras")
    source = "\n".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in files)
    text = (ROOT / "docs/troubleshooting.md").read_text()
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    quoted = [code for cell in cells for code in IN_TEXT.findall(cell)]
    parts = [part.strip() for code in quoted for part in code.split("…")]
    assert len(quoted) >= 25 and not [part for part in parts if part not in source]


def test_reports_of_runs_are_small_and_those_that_the_pages_name():
    pages = {page.name: page.stat().st_size for page in (ROOT / "docs/runs").glob("*.html")}
    made = set(re.findall(r"docs/runs/(\w+\.html)", (ROOT / "Makefile").read_text()))
    named = set(re.findall(r"`(\w+\.html)`", (ROOT / "docs/report.md").read_text())) - {"report.html"}
    assert set(pages) == made == named
    assert max(pages.values()) <= 1.5e6


def test_the_picture_in_the_tour_is_that_of_the_code():
    assert architecture.block() in (ROOT / "docs/tour.md").read_text()
