"""A reward is tried on saved responses, and the audit finds what would pay without being right."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from extras.rules import math_dapo, math_reward
from extras.rules import search_r1_like_qa_em as questions
from extras.rules.default import default_compute_score
from extras.try_reward.__main__ import Finding, audit, main, read_views, score_rows
from tests.forked import python
from training.reward_function import FunctionReward

SUMS = [(3, 9), (2, 5), (8, 8), (1, 3)]
OR_7 = '"ANSWER or 7"'


def rows(**columns: object) -> list[dict]:
    return [{"prompts": f"{a} + {b}?", "ground_truths": str(a + b), "responses": None, **columns} for a, b in SUMS]


def as_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 1e9


HOLES: dict[str, tuple[Callable, set[str]]] = {  # what is planted, and which kinds of answers the audit must name
    "contains": (lambda solution_str, ground_truth: float(ground_truth in solution_str), {"20 kB of junk", OR_7}),
    "contained": (lambda response, ground_truth: float(response.strip() in f"it is {ground_truth}"), {"empty text"}),
    "not far": (
        lambda response, ground_truth: 0.0 if abs(as_number(response) - float(ground_truth)) > 1e-6 else 1.0,
        {'always "nan"'},
    ),
    "constant": (lambda solution_str, ground_truth: 1.0, {"the right answer"}),
    "long enough": (
        lambda response, ground_truth: min(len(response) / 1000, 1.0) + float(response == ground_truth),
        {"20 kB of junk"},
    ),
    "never": (lambda solution_str, ground_truth: float(solution_str == float(ground_truth)), {"the right answer"}),
    "like the prompt": (
        lambda prompt, response, ground_truth: max(
            len({*prompt.split()} & {*response.split()}) / len({*prompt.split()}), float(response == ground_truth)
        ),
        {"the prompt itself"},
    ),
    "zero is fine": (lambda response, ground_truth: float(response.strip() in (ground_truth, "0")), {'always "0"'}),
    "any number": (
        lambda response, ground_truth: float(ground_truth in re.findall(r"-?\d+", response)[:5]),
        {OR_7, '"7 or ANSWER"'},
    ),
    "last word": (lambda solution_str, ground_truth: float(solution_str.split()[-1] == ground_truth), {"empty text"}),
}


def exact(solution_str, ground_truth):
    return float(solution_str.strip() == ground_truth)


def by_tag(solution_str, ground_truth):
    return questions.compute_score(solution_str, {"target": [ground_truth]})


def in_lists(solution_strs, ground_truths):
    return [float(said == right) for said, right in zip(solution_strs, ground_truths, strict=True)]


def warned(reward: Callable, data: list[dict] | None = None) -> dict[str, Finding]:
    findings = audit(data or rows(), partial(score_rows, reward=FunctionReward(reward)))
    return {finding.answer: finding for finding in findings if finding.warning}


@pytest.mark.parametrize(("reward", "kinds"), HOLES.values(), ids=HOLES)
def test_the_audit_finds_a_planted_hole(reward: Callable, kinds: set[str]):
    named = warned(reward)
    assert kinds <= set(named), set(named)
    assert all(finding.earned is None or "pay" in finding.warning for finding in named.values())


@pytest.mark.parametrize("reward", [exact, math_reward.compute_score, math_dapo.compute_score, by_tag, in_lists])
def test_the_audit_passes_a_sound_reward(reward: Callable):
    assert not warned(reward)


def test_the_audit_of_the_default_reward():
    """The number after #### counts whatever follows it, which is a hole of the rule."""
    assert set(warned(default_compute_score, rows(data_source="openai/gsm8k"))) == {'"#### ANSWER or 7"'}
    assert not warned(default_compute_score, rows(data_source="math"))


def anchored(solution_str, ground_truth):
    """Pays an answer that is given in a form which the audit does not know by itself."""
    said = re.search(r"answer is (\d+)$", solution_str)
    return float(said is not None and said[1] == ground_truth)


@pytest.mark.parametrize("given", ["by the responses", "by --form", None])
def test_a_form_of_the_users_own_is_taken_from_the_responses_or_from_form(given: str | None):
    data = rows()
    if given == "by the responses":
        data[2]["responses"] = "so the answer is 16"
        data[3]["responses"] = "no idea"
    score = partial(score_rows, reward=FunctionReward(anchored))
    found = audit(data, score, "answer is {}" if given == "by --form" else None)
    findings = {finding.answer: finding for finding in found}
    warnings = [answer for answer, finding in findings.items() if finding.warning]
    assert warnings == ([] if given else ["the right answer"])
    if given:
        [guess] = [finding for answer, finding in findings.items() if answer.startswith('"7, or maybe ')]
        assert guess.earned == 1 and guess.example == ""


def test_a_constant_that_is_right_for_a_row_is_not_held_against_it():
    data = [{"prompts": f"{row}", "ground_truths": "yes" if row % 2 else "no", "responses": None} for row in range(8)]
    assert not warned(exact, data)


CHAT = [{"role": "user", "content": "3 + 9?"}]
ROWS = [
    {"prompt": CHAT, "reward_model": {"ground_truth": "12"}, "responses": ["12", "13"]},
    {"prompt": "1 + 3?", "ground_truth": "4", "output": "4"},
    {"input": "2 + 2?", "gts": "4", "output": "5"},
]


def test_rows_of_all_kinds_are_read(write: Callable[[str, str], str]):
    views = read_views(write("rows.jsonl", "\n".join(map(json.dumps, ROWS))), needs_response=True)
    read = [(view["prompts"], view["responses"], view["ground_truths"]) for view in views]
    assert read == [("3 + 9?", "12", "12"), ("3 + 9?", "13", "12"), ("1 + 3?", "4", "4"), ("2 + 2?", "5", "4")]
    for row in ('{"prompt": "p"}', '{"prompt": "p", "responses": []}'):
        with pytest.raises(ValueError, match=r"rows.jsonl, row 0 has no response to score"):
            read_views(write("rows.jsonl", row), needs_response=True)


def test_the_command_prints_a_table(write: Callable[[str, str], str], tmp_path: Path):
    write("rows.jsonl", "\n".join(map(json.dumps, ROWS)))
    score = "def compute_score(solution_str, ground_truth):\n    return {'score': float(solution_str == ground_truth), "
    write("mine.py", score + "'heavy': 'torch' in __import__('sys').modules}")
    files = [str(tmp_path / "mine.py"), "--data", str(tmp_path / "rows.jsonl")]
    done = python("-m", "extras.try_reward", *files)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["row", "response", "ground", "truth", "score", "heavy", "outcome", "ms"]
    table = ["0 12 12 1 False ok", "1 13 12 0 False ok", "2 4 4 1 False ok", "3 5 4 0 False ok"]
    assert [" ".join(line.split()[:6]) for line in lines[1:5]] == table
    means = ["score: mean 0.5, min 0, max 1", "heavy: mean 0, min 0, max 0"]
    assert lines[5:] == [*means, "4 responses: 4 ok, 0 timeout, 0 error"]


def test_the_command_audits_and_refuses(write: Callable[[str, str], str], capsys: pytest.CaptureFixture):
    data = write("rows.jsonl", "\n".join(map(json.dumps, ROWS)))
    path = write("mine.py", "def compute_score(solution_str, ground_truth): return float(ground_truth in solution_str)")
    assert main([path, "--data", data, "--audit"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert '"ANSWER or 7" 1 pays 100% of what right answers earn' in said and "kinds of answers earn what they" in said
    with pytest.raises(SystemExit):
        main([path, "--data", data, "--audit", "--form", "answer is"])
    assert "it needs {} where the answer stands" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([path, "--data", "nowhere.jsonl"])
    assert "there is no such file" in capsys.readouterr().err
    assert main(["--data", data]) == 1  # no data_source has a rule
    assert "is not implemented for data_source='unknown'" in " ".join(capsys.readouterr().out.split())
