"""Evaluation of responses: the estimators by hand and by counting, and the command from file to figures."""

import json
from itertools import combinations
from pathlib import Path

import pytest

from extras.evaluation.main_eval import Graded, compute_evaluation_metrics, evaluate, main, pass_at_k
from training.metric_utils import process_validation_metrics

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str == ground_truth), "pred": solution_str}

def plain(solution_str, ground_truth):
    return 0.5 * (solution_str == ground_truth)

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


def write(folder: Path, rows: list[dict] = ROWS) -> Path:
    (folder / "reward.py").write_text(REWARD)
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(folder: Path, *overrides: str, rows: list[dict] = ROWS) -> dict:
    file = write(folder, rows)
    reward = f"reward.custom_reward_function.path={folder}/reward.py"
    main([f"data.path={file}", reward, f"data.output_path={folder}/out/figures.json", *overrides])
    return json.loads((folder / "out/figures.json").read_text())


def test_without_a_function_the_rule_of_the_data_source_scores(tmp_path: Path):
    rows = [{**ROWS[0], "data_source": "openai/gsm8k", "responses": ["#### 3", "#### 4"]}]
    found = run(tmp_path, "reward.custom_reward_function.path=null", rows=rows)
    assert found["openai/gsm8k"]["mean@2"] == 0.5


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_passed_response(n):
    for passed in range(n + 1):
        for k in range(1, n + 1):
            draws = list(combinations([*[True] * passed, *[False] * (n - passed)], k))
            assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_pass_at_k_of_many_responses_does_not_overflow():
    assert pass_at_k(5000, 1, 2500) == pytest.approx(0.5)


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


def test_a_reward_reads_the_contents_of_a_chat_a_line_each_and_every_column(tmp_path):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2="}]
    rows = [{**ROWS[0], "prompt": chat, "hint": "three"}]
    assert run(tmp_path, "reward.custom_reward_function.name=prompted", rows=rows)["sums"]["mean@4"] == 1.0
    assert run(tmp_path, "reward.custom_reward_function.name=by_data", rows=rows)["sums"]["mean@4"] == 1.0


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


def test_columns_of_other_names_and_a_single_response(tmp_path):
    rows = [{"question": "1+2=", "answers": "3", "from": "mine", "labels": {"ground_truth": "3"}}]
    keys = ["prompt_key=question", "response_key=answers", "data_source_key=from", "reward_model_key=labels"]
    found = run(tmp_path, *(f"data.{key}" for key in keys), rows=rows)
    assert found == {"mine": {"prompts": 1, "responses": 1, "mean@1": 1.0, "pass@1": 1.0, "majority@1": 1.0}}


@pytest.mark.parametrize(
    ("rows", "overrides", "message"),
    [
        (ROWS, ["data.path=null"], "data.path is not set"),
        (ROWS, ["reward.custom_reward_function.path=null"], "nothing scores the responses: set reward.custom_reward"),
        (ROWS, ["data.response_key=answers"], "rows.jsonl, row 0: the responses (column data.response_key=answers)"),
        ([{"prompt": "x", "responses": []}], [], "they must be a string or a list of strings"),
        (ROWS, ["reward.custom_reward_function.name=broken"], "raised KeyError: 'of the user'"),
        (ROWS, ["data.passscore=1"], "unknown key 'data.passscore'. Did you mean 'data.pass_score'"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, capsys, rows, overrides, message):
    with pytest.raises(SystemExit) as refused:
        run(tmp_path, *overrides, rows=rows)
    stderr = capsys.readouterr().err
    assert refused.value.code == 2 and stderr.startswith("error: ") and message in stderr
