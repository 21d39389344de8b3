"""The pages are true: their files and commands run, their links, paths and settings exist.

Files are written and commands run (tests/pages.py) in a copy of the repository, page by page and in their order;
CONTRIBUTING.md has a test of its own.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks import multi_turn, rollout, scoring
from benchmarks.step import measure
from configs.legacy import RENAMED
from configs.loader import known_keys, renamed_key
from configs.recipes import options
from configs.rollout_correction import PRESETS
from configs.schema import AGGREGATION_MODES, Config, SFTConfig
from configs.serving import EvaluationConfig, GenerationConfig, ServerConfig
from scripts import algorithms, quickstart, rollout_drift
from tests.pages import RUN_BLOCK, WRITTEN_FILE
from tests.runs import ROOT
from training.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

RANGE = re.MULTILINE | re.DOTALL
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] not in "._"} - {"outputs"}
IN_TEXT = re.compile(r"`([^`\n]+)`")
MAKE_MODEL = "python -m custom.tiny_model outputs/tiny_model\n"


def shell(code: str, folder: Path) -> str:
    """What `code` prints, in bash, with this Python first on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", code], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of the repository, as the working directory."""
    for name in ("configs", "custom", "data", "scripts", "training", "workers"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "main.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def made_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What MAKE_MODEL makes, a command of four pages."""
    folder = tmp_path_factory.mktemp("docs")
    shell(MAKE_MODEL.replace("outputs", str(folder)), ROOT)
    return folder / "tiny_model"


@pytest.fixture
def follow(copy: Path, made_model: Path) -> Callable[[Path], None]:
    """follow(page) does what a reader does in `copy`: writes its files, runs its commands (Python in this process).
    Where one is MAKE_MODEL, what it makes is taken from the one time that it was run."""

    def write_and_run(page: Path) -> None:
        text = page.read_text()
        for path, content in WRITTEN_FILE.findall(text):
            (copy / path).parent.mkdir(exist_ok=True)
            (copy / path).write_text(content)
        for language, code in RUN_BLOCK.findall(text):
            if MAKE_MODEL in code:
                shutil.copytree(made_model, copy / "outputs/tiny_model")
            if language == "sh":
                shell(code.replace(MAKE_MODEL, ""), copy)
            else:
                exec(compile(code, str(page), "exec"), {})

    return write_and_run


def recorded(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_readme_trains_on_prompts_and_a_reward_and_the_reward_rises(copy: Path, follow: Callable[[Path], None]):
    follow(ROOT / "README.md")
    scores = [entry["data"]["critic/score/mean"] for entry in recorded(copy / "outputs/sums")]
    assert len(scores) == 50
    assert scores[-1] > 0.8 > 0.2 > scores[0]


def test_environments_page_trains_and_its_mistakes_say_what_the_page_says(copy: Path, follow: Callable[[Path], None]):
    page = ROOT / "docs/environments.md"
    follow(page)
    assert [entry["step"] for entry in recorded(copy / "outputs/smoke")] == [0, 1, 2, 3]
    assert [entry["step"] for entry in recorded(copy / "outputs/parts")] == [1, 2]
    mistakes = re.findall(r"^\| `([\w.]+=\S+)` \| (.+?) \|$", page.read_text(), re.MULTILINE)
    assert len(mistakes) >= 8
    for (override, promised), said in zip(mistakes, refusals(copy, [one for one, _ in mistakes]), strict=True):
        assert promised in said, override


def test_multiturn_page_plays_episodes_and_calls_a_tool(copy: Path, follow: Callable[[Path], None]):
    follow(ROOT / "docs/multiturn.md")
    assert [entry["step"] for entry in recorded(copy / "outputs/cart_pole")] == [0, 1, 2]
    [entry] = recorded(copy / "outputs/shop")
    assert entry["data"]["num_turns/mean"] == 1 and entry["data"]["tool_call_counts/mean"] == 0


def test_rewards_page_scores_by_two_functions_and_a_manager(copy: Path, follow: Callable[[Path], None]):
    follow(ROOT / "docs/rewards.md")
    entries = recorded(copy / "outputs/two_rewards")
    assert [entry["step"] for entry in entries] == [1, 2]
    logged = entries[-1]["data"]
    parts = logged["reward/compute_score/mean"] + 0.2 * logged["reward/brevity/mean"]
    assert logged["critic/score/mean"] == pytest.approx(parts, abs=1e-6)
    assert logged["reward/timeout"] == logged["reward/error"] == 0 <= logged["timing_s/reward"]


def test_benchmark_of_scoring_has_the_cost_of_a_row_and_the_share_of_the_serial_time():
    figures = scoring.measure(rows=20, seconds=0.01)
    assert len(figures) == 4 and all(value > 0 for value in figures.values())


def test_sft_page_imitates_conversations_by_lora(copy: Path, follow: Callable[[Path], None]):
    follow(ROOT / "docs/sft.md")
    run = copy / "outputs/reverser"
    losses = {entry["step"]: entry["data"].get("val/loss") for entry in recorded(run)}
    assert [step for step, loss in losses.items() if loss is not None] == [0, 2, 4] and losses[4] < losses[0]
    assert [path.name for path in run.glob("global_step_*")] == ["global_step_4"]
    assert (run / "global_step_4/lora_adapter/adapter_config.json").exists()


def refusals(copy: Path, overrides: list[str]) -> list[str]:
    """What `python main.py --config-name treasure override` says as it refuses; all overrides in one process."""
    (copy / "refusals.py").write_text(
        """
import contextlib, io, json, sys
import main

def refusal(override):
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main.main(["--config-name", "treasure", override])
    return said.getvalue()

print(json.dumps([refusal(override) for override in sys.argv[1:]]))
"""
    )
    return json.loads(shell(f"python refusals.py {shlex.join(overrides)}", copy).splitlines()[-1])


def test_reward_rules_page_tries_and_audits(copy: Path, follow: Callable[[Path], None]):
    (copy / "outputs").mkdir(exist_ok=True)
    follow(ROOT / "docs/reward_rules.md")
    assert "pays 100%" in (copy / "outputs/audit.txt").read_text()


def test_data_page(copy: Path, follow: Callable[[Path], None]):
    follow(ROOT / "docs/data.md")


def test_config_page(copy: Path, follow: Callable[[Path], None]):
    follow(ROOT / "docs/config.md")


def test_serving_page_generates_evaluates_and_serves(copy: Path, follow: Callable[[Path], None]):
    page = ROOT / "docs/serving.md"
    follow(page)
    figures = json.loads((copy / "outputs/figures.json").read_text())["sums"]
    assert figures["prompts"] == 3 and figures["responses"] == 24 and {"mean@8", "pass@8", "maj@8"} <= set(figures)
    blocks = r"^## Serve$.*?^```sh\n(.*?)^```$.*?^```python\n(.*?)^```$"
    command, client = re.search(blocks, page.read_text(), RANGE).groups()
    command = [sys.executable, *shlex.split(command)[1:], "server.port=0"]
    with subprocess.Popen(command, cwd=copy, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().split()[-1]
            said = io.StringIO()
            with contextlib.redirect_stdout(said):
                exec(compile(client.replace("http://127.0.0.1:8000/v1", address), str(page), "exec"), {})
        finally:
            process.terminate()
    assert said.getvalue()


def test_algorithms_page_runs_names_all_there_is_and_has_a_figure_for_every_recipe(
    copy: Path, follow: Callable[[Path], None]
):
    page = ROOT / "docs/algorithms.md"
    follow(page)
    assert [entry["step"] for entry in recorded(copy / "outputs/my_algorithm")] == [1, 2]
    text = page.read_text()
    words = {word for code in IN_TEXT.findall(text) for word in re.findall(r"\w+", code)}
    losses = {name: loss.function for name, loss in POLICY_LOSS_REGISTRY.items()}
    registered = {**ADV_ESTIMATOR_REGISTRY, **losses}
    shipped = {name for name, function in registered.items() if function.__module__ == "training.core_algos"}
    assert shipped | set(PRESETS) | {word for mode in AGGREGATION_MODES for word in mode.split("-")} <= words
    measured = re.findall(r"^\| (\w+) \| (0\.\d+) \| (0\.\d+) \| \d+\.\d+ \|$", text, re.MULTILINE)
    assert [name for name, *_ in measured] == options("recipe")
    assert all(float(after) > 0.5 > float(before) for _, before, after in measured)


def test_the_scripts_behind_the_algorithms_page_write_what_it_shows(copy: Path, monkeypatch: pytest.MonkeyPatch):
    """In little: two recipes and the five runs of the drift, a few steps each."""
    monkeypatch.setattr(quickstart, "DEMONSTRATIONS", 256)
    short = ["trainer.total_training_steps=2", "trainer.test_freq=1"]
    small = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "env.val_episodes=4"]
    monkeypatch.setattr(sys, "argv", ["algorithms", "--recipes", "grpo,ppo", *short, *small])
    algorithms.main()
    rows = (copy / "outputs/algorithms/table.md").read_text().splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == ["| grpo", "| ppo"]
    assert (copy / "outputs/algorithms/curves.png").stat().st_size > 1000

    monkeypatch.setattr(rollout_drift, "ROWS", 256)
    monkeypatch.setattr(sys, "argv", ["rollout_drift", "trainer.total_training_steps=11", "trainer.test_freq=11",
                                      "data.train_batch_size=1", "actor_rollout_ref.rollout.n=2"])  # fmt: skip
    rollout_drift.main()
    folder = copy / "outputs/rollout_drift"
    assert len((folder / "table.md").read_text().splitlines()) == 2 + len(rollout_drift.RUNS)
    drift = {name: recorded(folder / name)[-1]["data"] for name in ("exact_rollouts", "perturbed_bypass_mode")}
    assert "rollout_corr/kl" not in drift["exact_rollouts"]  # one update a step: no old log-probs to compare with
    assert abs(drift["perturbed_bypass_mode"]["rollout_corr/kl"]) > 1e-3


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path):
    text = page.read_text()
    links = {link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link}
    assert not {link for link in links if not (page.parent / link).exists()}
    written = {path for path, _ in WRITTEN_FILE.findall(text)}
    named = {name for name in IN_TEXT.findall(text) if re.fullmatch(rf"(?:{'|'.join(FOLDERS)})/[\w./]*|\w+\.py", name)}
    assert not {name for name in named - written if not (ROOT / name).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_that_a_page_names_exists(page: Path):
    text = re.sub(r"^```(?:python|text)\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    entries = (Config, SFTConfig, GenerationConfig, EvaluationConfig, ServerConfig)
    schemas = [OmegaConf.structured(schema) for schema in entries]
    sections = {*chain(*schemas), *(key.partition(".")[0] for key in RENAMED)}
    named = set(re.findall(rf"(?<![\w/.])(?:{'|'.join(sections)})(?:\.[a-z_]\w*)+(?![\w/([])", text))
    assert named
    known = {key for schema in schemas for key in known_keys(schema)} | {"reward_model.ground_truth"}  # a column
    known |= {".".join(key.split(".")[:depth]) for key in known for depth in range(1, key.count(".") + 1)}
    free_form = ("env.kwargs.", "reward.custom_reward_function.reward_kwargs.", "rollout.engine_kwargs.")
    assert not {key for key in named - known if not key.startswith(free_form) and not renamed_key(key)}


def test_readme_names_every_make_target():
    text = (ROOT / "README.md").read_text()
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    targets = {line.split()[0] for line in listed.splitlines()} - {"help"}
    assert set(re.findall(r"`make ([\w-]+)`", text)) == targets


def test_benchmark_measures_every_phase_of_a_step():
    overrides = ["data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "env.train_size=20"]
    figures = measure(1, overrides)
    assert {"gen", "reward", "old_log_prob", "update_actor", "step"} <= set(figures["seconds"])
    assert figures["tokens_per_second"] == pytest.approx(figures["tokens"] / figures["seconds"]["step"])


def test_benchmark_compares_engines_by_turns():
    size = "--size 1m --rows 4 --samples 1 2 --responses 3 --prompt-tokens 5 --ragged"
    figures = rollout.measure(rollout.read_arguments(f"{size} --repeats 2 --engines hf generate".split()))
    assert [(case["rows"], case["samples"], case["response_tokens"]) for case in figures["cases"]] == [
        (4, 1, 3),
        (4, 2, 3),
    ]
    for case in figures["cases"]:
        hf, generate = case["seconds"]["hf"], case["seconds"]["generate"]
        assert case["tokens_per_second"]["hf"] == pytest.approx((12 / hf[0] + 12 / hf[1]) / 2)
        assert case["hf_to"] == {"generate": pytest.approx((generate[0] / hf[0] + generate[1] / hf[1]) / 2)}
        assert {"prompts", "steps", "sampling"} <= set(case["hf_phases"]) and sum(case["hf_phases"].values()) < sum(hf)
    assert rollout.table(figures).splitlines()[0].endswith("| hf, tokens/s | generate, tokens/s | hf : generate |")


def test_benchmark_of_turns_prefills_what_is_new():
    """Of 4 episodes: prompts of 6, 11 and 16 tokens, or the first, and then twice 3 told and the last of an answer."""
    sizes = "--episodes 4 --turns 3 --prompt-tokens 6 --answer 2 --told 3 --repeats 1"
    arguments = multi_turn.read_arguments(sizes.split())
    engine = multi_turn.start_engine(arguments)
    for pauses in (1, 5):
        seconds, prefilled = multi_turn.measure(engine, arguments, pauses)
        assert prefilled == {False: 4 * (6 + 11 + 16), True: 4 * (6 + 2 * (3 + 1))}
        assert [len(seconds[keeps]) for keeps in (False, True)] == [1, 1]
