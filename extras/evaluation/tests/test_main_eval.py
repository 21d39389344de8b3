"""Evaluation of responses: the estimators by hand and by counting, and the command from file to figures."""

import json
import sys
from itertools import combinations
from pathlib import Path

import pytest

from extras.evaluation.main_eval import Graded, compute_evaluation_metrics, evaluate, main, pass_at_k
from training.metric_utils import process_validation_metrics

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "pred": solution_str}

def prompted(prompt, response, ground_truth):
    return float(prompt == "Be brief.\\n1+2=")

def by_data(data):
    return [float(hint == "three") for hint in data.get("hint")]

def broken(solution_str, ground_truth):
    raise KeyError("of the user")
"""
ROWS = [
    {"prompt": "1+2=", "data_source": "sums", "ground_truth": "3", "responses": ["3", "3", "4", "5"]},
    {"prompt": "2+2=", "data_source": "sums", "ground_truth": "4", "responses": ["5", "5", "4", "5"]},
    {"prompt": "2*3=", "data_source": "products", "reward_model": {"ground_truth": "6"}, "responses": ["6"]},
]


def run(folder: Path, *overrides: str, rows: list[dict] = ROWS) -> dict:
    (folder / "reward.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = f"data.path={folder}/rows.jsonl", f"data.output_path={folder}/out/figures.json"
    main([*settings, f"reward.custom_reward_function.path={folder}/reward.py", *overrides])
    return json.loads((folder / "out/figures.json").read_text())


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_passed_response(n):
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5), "without an overflow"
    for passed in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([*[True] * passed, *[False] * (n - passed)], k))
            assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [("abb", [1.0, 0.0, 0.0], 0.0), ("abba", [1.0, 0.0, 0.0, 1.0], 1.0), ("baba", [0.25, 1.0, 0.25, 1.0], 0.25)],
)
def test_the_most_frequent_answer_counts_and_of_equals_the_first(answers, scores, expected):
    found = compute_evaluation_metrics([Graded("a", scores, list(answers))], 1.0)
    assert found[f"majority@{len(answers)}"] == expected


def test_the_majority_of_an_evaluation_and_the_bootstrapped_one_of_a_validation_have_two_names():
    answers, scores = ["a", "a", "b", "c"], [1.0, 1.0, 0.0, 0.0]
    evaluated = compute_evaluation_metrics([Graded("s", scores, answers)], 1.0)
    validated = process_validation_metrics(["s"] * 4, ["p"] * 4, {"reward": scores, "pred": answers})["s"]["reward"]
    assert evaluated["majority@4"] == 1.0 and 0 < validated["maj@4/mean"] < 1
    assert not any(name.startswith("maj@") for name in evaluated)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_k_is_each_power_of_two_and_the_number_itself(n):
    found = compute_evaluation_metrics([Graded("a", [1.0] * n)], 1.0)
    expected = {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [1, 2, 4], 6: [1, 2, 4, 6]}[n]
    assert [name for name in found if name.startswith("pass")] == [f"pass@{k}" for k in expected]


def test_figures_by_hand():
    found = compute_evaluation_metrics([Graded("a", [1, 0, 0, 1]), Graded("a", [0, 0, 0, 0.5])], pass_score=1)
    assert found["prompts"] == 2 and found["responses"] == 8
    assert found["mean@4"] == pytest.approx((0.5 + 0.125) / 2)
    assert found["mean@4/stderr"] == pytest.approx(abs(0.5 - 0.125) / 2)  # of two values
    assert found["pass@1"] == pytest.approx(0.25)
    assert found["pass@2"] == pytest.approx((1 - 1 / 6) / 2)  # one of six pairs has none
    assert found["pass@4"] == 0.5 and not any(name.startswith("maj") for name in found)


def test_sources_are_apart_and_together_and_k_is_what_every_prompt_has():
    found = evaluate([Graded("a", [1.0] * 4), Graded("a", [0.0] * 3), Graded("b", [0.0])], 1.0)
    assert [*found] == ["a", "b", "all"]
    assert found["a"]["pass@3"] == 0.5 and "pass@4" not in found["a"] and "pass@2" not in found["all"]
    assert found["all"]["mean@1"] == pytest.approx(1 / 3) and "pass@1/stderr" not in found["b"]


def test_the_command_goes_from_responses_to_figures(tmp_path, capsys):
    found = run(tmp_path)
    assert found["sums"]["mean@4"] == pytest.approx((0.5 + 0.25) / 2)
    assert found["sums"]["majority@4"] == 0.5 and found["sums"]["pass@4"] == 1
    assert found["sums"]["pass@2"] == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    assert found["products"] == {"prompts": 1, "responses": 1, "mean@1": 1.0, "pass@1": 1.0, "majority@1": 1.0}
    shown = capsys.readouterr().out
    assert "sums" in shown and "products" in shown and "0.375" in shown


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2="}]
ASKED = [{**ROWS[0], "prompt": CHAT, "hint": "three"}]
BY_RULE = [{**ROWS[0], "data_source": "openai/gsm8k", "responses": ["#### 3", "#### 4"]}]
RENAMED = [{"question": "1+2=", "answers": "3", "from": "mine", "labels": {"ground_truth": "3"}}]
NAMES = "data.prompt_key=question data.response_key=answers data.data_source_key=from data.reward_model_key=labels"
FUNCTION = "reward.custom_reward_function"


@pytest.mark.parametrize(
    ("rows", "overrides", "source", "mean"),
    [
        (ASKED, f"{FUNCTION}.name=prompted", "sums", {"mean@4": 1.0}),  # contents of a chat, a line each
        (ASKED, f"{FUNCTION}.name=by_data", "sums", {"mean@4": 1.0}),  # every column
        (BY_RULE, f"{FUNCTION}.path=null", "openai/gsm8k", {"mean@2": 0.5}),
        (RENAMED, NAMES, "mine", {"mean@1": 1.0, "pass@1": 1.0, "majority@1": 1.0, "prompts": 1, "responses": 1}),
    ],
)
def test_a_reward_reads_rows_of_every_form(tmp_path, rows, overrides, source, mean):
    figures = run(tmp_path, *overrides.split(), rows=rows)[source]
    assert {name: figures[name] for name in mean} == mean


@pytest.mark.parametrize(
    ("rows", "override", "message"),
    [
        (ROWS, f"{FUNCTION}.path=null", "nothing scores the responses: set reward.custom_reward"),
        (ROWS, "data.response_key=answers", "rows.jsonl, row 0: the responses (column data.response_key=answers)"),
        ([{"prompt": "x", "responses": []}], "", "they must be a string or a list of strings"),
        (ROWS, f"{FUNCTION}.name=broken", "raised KeyError: 'of the user'"),
        (None, "data.path=null", "data.path is not set"),
        (None, "data.path=nowhere.jsonl", "data.path=nowhere.jsonl: there is no such file"),
        (None, "data.path=conftest.py", "conftest.py: unknown ending '.py', not of .parquet, .json, .jsonl, .csv"),
        (None, "data.passscore=1", "unknown key 'data.passscore'. Did you mean 'data.pass_score'"),
        (None, f"{FUNCTION}.path=nowhere.py", f"{FUNCTION}.path=nowhere.py: there is no file"),
        (None, f"{FUNCTION}.path=README.md", f"{FUNCTION}.path=README.md: SyntaxError"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, capsys, monkeypatch, rows, override, message):
    if not rows:  # nor is imported what takes seconds
        monkeypatch.setitem(sys.modules, "extras.evaluation.main_eval", None)
    with pytest.raises(SystemExit) as refused:
        run(tmp_path, override, rows=rows or ROWS)
    stderr = capsys.readouterr().err
    assert refused.value.code == 2 and stderr.startswith("error: ") and message in stderr
