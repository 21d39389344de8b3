"""CONTRIBUTING.md is enough: its examples train exactly as they stand, and what can be forgotten is named."""

import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import pytest
import torch

import main
from custom.env_wrapper import ENVIRONMENTS
from tests.pages import SECTION, WRITTEN_FILE, runs_of_main
from tests.runs import ROOT, learning_metrics
from training.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY, get_adv_estimator_fn

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
FILES = {title: dict(WRITTEN_FILE.findall(text)) for title, text in SECTION.findall(PAGE)}
COMMANDS = {title: runs_of_main(text) for title, text in SECTION.findall(PAGE)}
ADDED = ["An estimator", "A policy loss", "A recipe", "An engine", "An environment", "A reward", "A logger"]
REGISTRIES = (ADV_ESTIMATOR_REGISTRY.data, POLICY_LOSS_REGISTRY.data, ENVIRONMENTS, gym.registry)


@pytest.fixture
def users_folder(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with the page's files and model; what they register and import is forgotten afterwards."""
    for name, text in WRITTEN_FILE.findall(PAGE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "custom").symlink_to(ROOT / "custom")
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/tiny_model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(main, "start_command", lambda config: None)  # this process is pytest's
    modules, registered = set(sys.modules), [dict(registry) for registry in REGISTRIES]
    yield tmp_path
    for name in set(sys.modules) - modules:
        if str(vars(sys.modules[name]).get("__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    for registry, before in zip(REGISTRIES, registered, strict=True):
        registry.clear()
        registry.update(before)


def test_the_page_has_an_example_of_everything_it_says_how_to_add():
    assert [*COMMANDS] == [*ADDED, "Managers, formats and settings", "An extra", "Where a line belongs", "How we work"]
    assert all(FILES[title] and len(COMMANDS[title]) == 1 for title in ADDED)


@pytest.mark.parametrize("title", ADDED)
def test_an_example_is_one_short_file_and_trains_two_steps(users_folder: Path, title: str):
    assert all(len(text.splitlines()) < 30 for text in FILES[title].values())
    assert len(FILES[title]) == (2 if title == "A recipe" else 1)  # it needs a yaml that names it
    main.main(COMMANDS[title][0])
    [folder] = [path.parent for path in users_folder.glob("outputs/*/metrics.jsonl")]
    metrics = learning_metrics(folder)
    assert list(metrics) == [1, 2]
    assert all(step["actor/grad_norm"] >= 0 and step["actor/skipped_updates"] == 0 for step in metrics.values())
    if title == "A reward":
        assert "reward/is_move/mean" in metrics[2]
    if title == "A logger":
        rows = (folder / "metrics.csv").read_text().splitlines()
        assert {row.split(",")[0] for row in rows} == {"1", "2"} and len(rows) > 50


def test_the_estimator_by_hand(users_folder: Path):
    """The rows are scores 1, 0, 0.5 of one prompt, with mean 0.5, and a failed row of another."""
    exec(compile(FILES["An estimator"]["my_estimator.py"], "my_estimator.py", "exec"), {"__name__": "by_hand"})
    rewards = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.5, 0.0], [9.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0]])
    advantages, returns = get_adv_estimator_fn("sign")(rewards, mask, index=["a", "a", "a", "b"])
    assert advantages.tolist() == [[1, 1], [-1, -1], [0, 0], [0, 0]] and returns is advantages


# Each: the section, what is changed in its file or its command and into what, and what the message must hold.
MISTAKES = {
    "no decorator": (
        "An estimator", '@register_adv_est("sign")\n', "",
        "algorithm.adv_estimator=sign: ", "stands under @register_adv_est('sign')", "my_estimator.py",
    ),
    "a decorator without a name": (
        "An estimator", '@register_adv_est("sign")', "@register_adv_est",
        "my_estimator.py", "@register_adv_est needs the name by which the config finds the function",
    ),
    "another name in the config": (
        "An estimator", "adv_estimator=sign", "adv_estimator=sing",
        "algorithm.adv_estimator=sing: ", "'sign'", "'grpo'", "my_estimator.py",
    ),
    "a file that nobody imports": (
        "An estimator", "actor_rollout_ref.model.external_lib=my_estimator.py", "trainer.seed=0",
        "algorithm.adv_estimator=sign", "actor_rollout_ref.model.external_lib names; it names none",
    ),
    "a recipe by another name": (
        "A recipe", "recipe: centred", "recipe: centered", "centered", "my_recipe.yaml cannot be read",
    ),
    "a recipe for one section": (
        "A recipe", "# @package _global_\n", "", "'# @package _global_' must be its first line",
    ),
    "two engines in one file": (
        "An engine", "class PlainRollout(Rollout):", "class Other(Rollout): generate = 1\nclass PlainRollout(Rollout):",
        "exactly one subclass", "['Other', 'PlainRollout']",
    ),
    "a class that is no engine": (
        "An engine", "class PlainRollout(Rollout):", "class PlainRollout:",
        "my_engine.py", "exactly one subclass of workers.rollout.Rollout, it defines []",
    ),
    "an id that nobody registers": (
        "An environment", 'gym.register("Lamps-v0", Lamps)\n', "",
        "env.id=my_lamps:Lamps-v0", "my_lamps has no gym.register('Lamps-v0'",
    ),
    "an id without its module": (
        "An environment", "env.id=my_lamps:Lamps-v0", "env.id=Lamps-v0",
        "Name what registers it, as in env.id=my_module:MyGame-v0",
    ),
    "a misspelt entry": (
        "An environment", '"observation_to_text"', '"observation_to_txt"',
        "ENVIRONMENTS['Lamps-v0'] has ['observation_to_txt']: an entry may hold observation_to_text, text_to_action",
    ),
    "a logger that is not there": (
        "A logger", "my_logger.py:CsvLogger]", "my_logger.py:CsvLoger]", "my_logger.py has no 'CsvLoger'",
    ),
    "a logger whose package is missing": (
        "A logger", "import csv", "import cvs", "my_logger.py", "No module named 'cvs'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_was_forgotten_is_named(users_folder: Path, capsys: pytest.CaptureFixture, mistake: str):
    title, old, new, *says = MISTAKES[mistake]
    files = {name: text.replace(old, new) for name, text in FILES[title].items()}
    argv = [part.replace(old, new) for part in COMMANDS[title][0]]
    assert files != FILES[title] or argv != COMMANDS[title][0]
    for name, text in files.items():
        (users_folder / name).write_text(text)
    with pytest.raises((SystemExit, ValueError, AssertionError, RuntimeError)) as ended:
        main.main(argv)
    message = capsys.readouterr().err + "".join(traceback.format_exception_only(ended.value))
    assert not [part for part in says if part not in message], message
