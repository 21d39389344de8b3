"""Runs what scripts/create_reward_template.py writes: it pays for right answers alone, and trains."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from configs import extras
from examples import reward_math, reward_qa
from extras.sandbox import child
from extras.sandbox.run import fences
from extras.try_reward.__main__ import main as try_reward
from scripts import create_reward_template
from tests.runs import ROOT
from tests.test_user_contracts import STEPS, Desk

in_sandbox = pytest.mark.skipif(not child.is_closed(fences()), reason="programs run in a closed sandbox alone")


def run(folder: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True)


@pytest.mark.parametrize("task", ["math", pytest.param("code", marks=in_sandbox), "qa", "custom"])
def test_a_template_scores_its_two_answers_in_any_folder(task: str, tmp_path: Path):
    made = run(tmp_path, str(ROOT / "scripts/create_reward_template.py"), "--task", task, "--output", "mine.py")
    assert made.returncode == 0 and f"reward.custom_reward_function.path={tmp_path}/mine.py" in made.stdout
    done = run(tmp_path, "mine.py")
    assert done.returncode == 0 and done.stdout.startswith("1.0 for ") and done.stdout.count("\n") == 2, done.stderr
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(text.replace(", 1.0)", ", 0.75)", 1))
    assert run(tmp_path, "mine.py").returncode == 1


@pytest.mark.parametrize("output", ["old.py", "absent/mine.py", "math.py", "mine.py"])
def test_what_is_not_to_be_written_is_refused_in_one_line(output, tmp_path, monkeypatch, capsys):
    (tmp_path / "old.py").write_text("kept")
    monkeypatch.chdir(tmp_path)
    if output == "mine.py":
        monkeypatch.setattr(extras, "FOLDER", tmp_path)  # where no extra is
    with pytest.raises(SystemExit) as stop:
        create_reward_template.main(["--task", "math", "--output", output])
    key, refusal = "--task=math" if output == "mine.py" else f"--output={tmp_path / output}", capsys.readouterr().err
    assert stop.value.code == 2 and refusal.startswith(f"error: {key}: ") and refusal.count("\n") == 1
    assert [file.read_text() for file in tmp_path.iterdir()] == ["kept"]


MATH = [
    (r"\boxed{-\frac{1}{2}}", "-0.5", 1), (r"\boxed{\frac12}", 0.5, 1), (r"\boxed{1{,}200}", "So 1200.\n#### 1,200", 1),
    ("#### $1,200.", "1200", 1), (r"\boxed{5\text{ cm}}", "5", 1), (r"\boxed{\text{May}}", "May", 1),
    (r"\boxed{\sqrt{\frac{1}{4}+x}}", r"\sqrt{x+0.25}", 1), (r"\boxed{2}, no: \boxed{3}", "3", 1),
    (r"\boxed{5}", "-5", 0), (r"\boxed{(1,200)}", "1200", 0), (r"\boxed{18 or 7}", "18", 0), (r"\boxed{6*7}", "42", 0),
    (r"\boxed{1/0}", "9", 0), (r"\boxed{" + "9" * 5000 + "}", "9", 0), ("42", "42", 0),
]  # fmt: skip
QA = [
    ("so\nThe answer is The U.S.", ["USA", "us"], 1), ("<answer>-1,200.5</answer>", -1200.5, 1), ("5", "-5", 0),
    ("<answer>Rome</answer> or <answer>Oslo</answer>", "Rome", 0), ("A", {"target": "a"}, 1), ("!", "?", 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "response", "truth", "score"),
    [*((reward_math, *case) for case in MATH), *((reward_qa, *case) for case in QA)],
)
def test_answers_pay_for_what_they_mean(module, response, truth, score):
    assert module.compute_score("mine", response, truth)["score"] == score


@pytest.mark.parametrize(
    ("task", "truths"), [("math", ["72", "-1/2", "x^2+1"]), ("qa", ["Paris", ["B", "The b"], "3"])]
)
def test_the_audit_finds_nothing_cheap(task, truths, write):
    rows = write("rows.jsonl", "\n".join(json.dumps({"prompt": "Which?", "ground_truth": truth}) for truth in truths))
    assert try_reward([str(ROOT / f"examples/reward_{task}.py"), "--data", rows, "--audit"]) == 0


def test_the_template_of_math_trains(tiny_model: Path, tmp_path: Path):
    desk = Desk(tmp_path, tiny_model)
    (tmp_path / "my_reward.py").unlink()
    create_reward_template.main(["--task", "math", "--output", str(tmp_path / "my_reward.py")])
    metrics = desk.train()
    assert [*metrics] == [1, STEPS] and metrics[STEPS]["reward/answered/mean"] == metrics[STEPS]["reward/error"] == 0
