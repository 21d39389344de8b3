"""The rules of public data sets pay what they say, case by case (tests/reward_cases.py), and rows find their rule."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from data import http
from tests import reward_cases as cases
from tests.servers import answering
from training.reward_score import (
    KNOWN,
    default_compute_score,
    geo3k,
    gsm8k,
    has_rule,
    math_dapo,
    math_reward,
    prime_code,
    prime_math,
    sandbox_fusion,
    symbolic,
)
from training.reward_score import search_r1_like_qa_em as questions
from training.reward_score.code_cases import first_block, python_block

by_algebra = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs the package math-verify")


def table(rows: list[tuple]) -> pytest.MarkDecorator:
    """A test for each row, which it gets as `case`."""
    return pytest.mark.parametrize("case", rows, ids=[repr(row)[:60] for row in rows])


def test_there_are_at_least_300_cases():
    assert sum(len(rows) for name, rows in vars(cases).items() if name.isupper() and isinstance(rows, list)) >= 300


@table(cases.GSM8K)
def test_gsm8k(case):
    response, truth, strict, flexible = case
    assert gsm8k.compute_score(response, truth, format_score=0.1) == strict
    assert gsm8k.compute_score(response, truth, "flexible", format_score=0.1) == flexible


@table(cases.BOXED)
def test_math_answers(case):
    answer, truth, score = case
    assert math_reward.compute_score(rf"so \boxed{{{answer}}}.", truth) == score


@table(cases.MATH_RESPONSES)
def test_math_responses(case):
    response, truth, score = case
    assert math_reward.compute_score(response, truth) == score


@table(cases.DAPO)
def test_math_dapo(case):
    response, truth, score = case
    result = math_dapo.compute_score(response, truth)
    assert result == {"score": score, "acc": score == 1, "pred": result["pred"]}


@table(cases.DAPO_STRICT)
def test_math_dapo_by_boxes_alone(case):
    response, truth, score, read = case
    result = math_dapo.compute_score(response, truth, strict_box_verify=True)
    assert result == {"score": score, "acc": score == 1, "pred": read}


def test_math_dapo_looks_from_a_pause_token_on():
    response = r"\boxed{5}" + "." * 150
    assert math_dapo.compute_score(response, "5", True, [0, 0, 0, 100])["acc"]
    assert not math_dapo.compute_score(response, "5", True)["acc"]
    with pytest.raises(ValueError, match="has 1 places; the rule of math_dapo wants four"):
        math_dapo.compute_score(response, "5", True, [0])


@table(cases.QUESTIONS)
def test_search_r1(case):
    response, targets, exact, contained = case
    assert questions.compute_score(response, {"target": targets}, format_score=0.1) == exact
    assert questions.compute_score_subem(response, {"target": targets}, format_score=0.1) == contained


@table(cases.PRIME_MATH)
def test_prime_math(case, monkeypatch: pytest.MonkeyPatch):
    """Where algebra has no say."""
    monkeypatch.setattr(prime_math, "symbolically_equal", lambda answer, truth: False)
    response, truth, right = case
    assert prime_math.compute_score(response, truth)[0] is right


@by_algebra
@table(cases.PRIME_MATH_ALGEBRA)
def test_prime_math_by_algebra(case):
    response, truth, right = case
    assert prime_math.compute_score(response, truth)[0] is right


def test_prime_math_says_what_it_read_and_whether_it_was_announced():
    assert prime_math.compute_score("so the answer is 12. Done", "12") == (True, True, "12")
    assert prime_math.compute_score("so the answer is 13", "north") == (False, True, "13")
    assert prime_math.compute_score("who knows", "north") == (False, False, "who knows")


@table(cases.GEOMETRY)
def test_geo3k(case, monkeypatch: pytest.MonkeyPatch):
    """Where algebra has no say."""
    monkeypatch.setattr(geo3k, "symbolically_equal", lambda answer, truth: False)
    response, truth, score = case
    assert geo3k.compute_score(response, truth) == pytest.approx(score)


@by_algebra
@table(cases.GEOMETRY_ALGEBRA)
def test_geo3k_by_algebra(case):
    response, truth, score = case
    assert geo3k.compute_score(response, truth) == pytest.approx(score)


def test_geo3k_of_a_whole_text():
    assert geo3k.compute_score("5", "5", use_boxed=False, format_score=0.5) == 0.5


@by_algebra
def test_algebra_that_takes_too_long_is_no_and_the_next_question_is_answered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(symbolic, "SECONDS", 0.01)
    assert not symbolic.symbolically_equal(r"\frac{9^{9^{9}}}{7}", "2")
    monkeypatch.setattr(symbolic, "SECONDS", 60.0)
    assert symbolic.symbolically_equal("2x+x", "3x")


def test_words_are_no_algebra():
    assert not symbolic.symbolically_equal("on", "no") and not symbolic.symbolically_equal("1" * 1001, "1")


@table(cases.OUTPUTS)
def test_outputs_of_programs(case):
    written, expected, counts = case
    assert prime_code.same_output(written, expected) is counts


@table(cases.VALUES)
def test_results_of_functions(case):
    written, expected, counts = case
    assert prime_code.same_value(written, expected) is counts


@table(cases.BLOCKS)
def test_blocks_of_code(case):
    response, python, first = case
    assert (python_block(response), first_block(response)) == (python, first)


@table(cases.CODE)
def test_prime_code(case):
    response, test_cases, score = case
    assert float(prime_code.compute_score(response, test_cases, continuous=True)[0]) == score


def test_prime_code_without_shares_stops_at_the_first_failure_and_says_what_happened():
    response = "```python\nprint(1 / int(input()))\n```"
    right, results = prime_code.compute_score(response, {"inputs": ["1", "0", "1"], "outputs": ["1.0", "", "1.0"]})
    assert right is False and [result["result"] for result in results] == [True, -1]
    assert "ZeroDivisionError" in results[1]["error"]
    assert prime_code.compute_score("```python\n(\n```", {"inputs": [""], "outputs": [""]})[1][0]["result"] == -2
    assert prime_code.compute_score("pass", {"inputs": [], "outputs": []}) == (False, [])


@table(cases.ROUTES)
def test_a_row_is_scored_by_the_rule_of_its_data_source(case):
    source, response, truth, score = case
    assert has_rule(source)
    found = default_compute_score(source, response, truth, {"index": 0}, more="ignored")
    assert found == score and type(found) is type(score)


@pytest.mark.parametrize("source", ["my_data", "", None, "searchR1_x", "AIME"])
def test_a_data_source_without_a_rule_is_refused_by_name(source):
    assert not has_rule(source)
    with pytest.raises(NotImplementedError, match=f"not implemented for data_source={source!r}. .*{KNOWN[0]}"):
        default_compute_score(source, "5", "5")


OK = {"status": "Success", "run_result": {"status": "Finished", "stdout": "4\n", "return_code": 0}}
ANSWERS = [  # (what the server says, result of the case)
    (OK, True),
    ({"status": "Success", "run_result": {"status": "Finished", "stdout": "5"}}, False),
    ({"status": "Success", "run_result": {"status": "Error"}}, -1),
    ({"status": "SandboxError"}, -1),
    ({"status": "Failed", "compile_result": {"status": "Error"}}, -4),
    ({"status": "Failed", "compile_result": {"status": "TimeLimitExceeded"}}, -4),
    ({"status": "Failed", "compile_result": {"status": "Finished", "return_code": 1}}, -4),
    ({"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}, -3),
    ({"status": "Failed", "run_result": {"status": "Error"}}, -2),
    ({"status": "Failed", "run_result": {"status": "Finished", "return_code": 1}}, -2),
    ({"status": "Failed"}, -1),
    ({}, -1),
]


@table(ANSWERS)
def test_what_a_sandbox_fusion_server_says(case):
    said, result = case
    assert sandbox_fusion.read_result(said, "4") == result


@contextmanager
def fusion_server(*answers: tuple[int, dict]) -> Iterator[tuple[str, list[dict]]]:
    """A server that gives these (status, body) one after the other, the last for ever: (its url, what it was sent)."""
    asked: list[dict] = []

    def answer(method: str, path: str, body: dict) -> tuple[int, dict]:
        asked.append(body)
        return answers[min(len(asked), len(answers)) - 1]

    with answering(answer) as url:
        yield f"{url}/run_code", asked


def test_code_is_run_on_a_sandbox_fusion_server_where_there_is_a_url():
    with fusion_server((200, OK)) as (url, asked):
        test_cases = {"inputs": ["2", "3"], "outputs": ["4", "9"]}
        limits = {"sandbox_fusion_url": url, "concurrent_semaphore": 1, "memory_limit_mb": 128}
        assert default_compute_score("apps", cases.SQUARE, test_cases, **limits) == 0.5
        assert default_compute_score("apps", "no code", test_cases, **limits) == 0.0
    assert sorted(request.pop("stdin") for request in asked) == ["2", "3"]
    assert asked[0] == {
        **{"compile_timeout": 10, "run_timeout": 10, "code": "\nprint(int(input()) ** 2)\n", "memory_limit_MB": 128},
        **{"language": "python", "files": {}, "fetch_files": []},
    }


def test_a_gateway_that_gave_up_is_asked_again_and_other_errors_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.0)
    one = {"inputs": ["2"], "outputs": ["4"]}
    with fusion_server((504, {}), (504, {}), (200, OK)) as (url, asked):
        assert sandbox_fusion.compute_score(url, None, None, cases.SQUARE, one)[0] == 1.0
        assert len(asked) == 3
    with fusion_server((500, {})) as (url, asked):
        score, [result] = sandbox_fusion.compute_score(url, None, None, cases.SQUARE, one)
        assert (score, result["result"], len(asked)) == (0.0, -1, 1) and "500" in result["said"]
    assert sandbox_fusion.compute_score(url, None, None, cases.SQUARE, one)[0] == 0.0  # nobody is there any more


def test_a_program_that_does_not_compile_is_none_for_all_later_cases():
    results = [{"result": True}, {"result": -4}, {"result": True}, {"result": -1}]
    sandbox_fusion.mark_no_program(results)
    assert [result["result"] for result in results] == [True, -4, -4, -4]


def test_a_function_is_called_by_lines_of_json():
    with fusion_server((200, OK)) as (url, asked):
        test_cases = {"inputs": ["2"], "outputs": ["4"], "fn_name": "square"}
        response = "```python\ndef square(x): return x * x\n```"
        assert sandbox_fusion.compute_score(url, None, None, response, test_cases)[0] == 1.0
    [request] = asked
    assert request["stdin"] == "2" and "else square\n" in request["code"]
