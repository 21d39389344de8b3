"""The rules of public data sets pay what they say, case by case (reward_cases.py), and rows find their rule."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import takewhile
from types import SimpleNamespace

import numpy as np
import pytest

from configs import errors
from configs.errors import ConfigError
from configs.paths import ROOT
from configs.schema import RewardConfig
from data.protocol import DataProto
from extras.http import http
from extras.rules import geo3k, gsm8k, math_dapo, math_reward, prime_code, prime_math, sandbox_fusion, symbolic
from extras.rules import search_r1_like_qa_em as questions
from extras.rules.default import KNOWN, default_compute_score, find_rule
from extras.rules.prime_code import first_block, python_block
from extras.rules.reward import RuleReward, load
from extras.rules.settings import SandboxFusionConfig
from extras.rules.tests import reward_cases as cases
from extras.sandbox import run as sandbox
from extras.sandbox.run import Finished
from tests.servers import answering
from training.reward import RewardRun, load_reward_manager

by_algebra = pytest.mark.skipif(find_spec("math_verify") is None, reason="needs the package math-verify")


def table(rows: list[tuple]) -> pytest.MarkDecorator:
    """A test for each row, which it gets as `case`."""
    return pytest.mark.parametrize("case", rows, ids=[repr(row)[:60] for row in rows])


@table(cases.GSM8K)
def test_gsm8k(case):
    response, truth, strict, flexible = case
    assert gsm8k.compute_score(response, truth, format_score=0.1) == strict
    assert gsm8k.compute_score(response, truth, "flexible", format_score=0.1) == flexible


@table([*((rf"so \boxed{{{answer}}}.", *rest) for answer, *rest in cases.BOXED), *cases.MATH_RESPONSES])
def test_math(case):
    response, truth, score = case
    assert math_reward.compute_score(response, truth) == score


@table([*((*row, False) for row in cases.DAPO), *((*row, True) for row in cases.DAPO_STRICT)])
def test_math_dapo(case):
    response, truth, score, *read, strict = case
    result = math_dapo.compute_score(response, truth, strict_box_verify=strict)
    assert result == {"score": score, "acc": score == 1, "pred": read[0] if read else result["pred"]}


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


@pytest.fixture
def no_algebra(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prime_math, geo3k):
        monkeypatch.setattr(module, "symbolically_equal", lambda answer, truth: False)


def check_formula(case: tuple) -> None:
    response, truth, score = case
    if isinstance(score, bool):
        assert prime_math.compute_score(response, truth)[0] is score
    else:
        assert geo3k.compute_score(response, truth) == pytest.approx(score)


@table([*cases.PRIME_MATH, *cases.GEOMETRY])
def test_formulas_where_algebra_has_no_say(case, no_algebra):
    check_formula(case)


@by_algebra
@table([*cases.PRIME_MATH_ALGEBRA, *cases.GEOMETRY_ALGEBRA])
def test_formulas_by_algebra(case):
    check_formula(case)


def pairs() -> list[tuple[str, ...]]:
    """The table of docs/reward_rules.md: (rule, answer, truth, verdicts of a person, of ours and of verl 0.9.1)."""
    lines = (ROOT / "docs/reward_rules.md").read_text().partition("| rule | answer |")[2].splitlines()[2:]
    rows = takewhile(lambda line: line.startswith("|"), lines)
    return [tuple(cell.strip().strip("`") for cell in row.strip("|").split("|")) for row in rows]


@by_algebra
@table(pairs())
def test_pairs_of_answer_and_truth_are_paid_as_the_page_says(case):
    rule, answer, truth, _, ours, _ = case
    results = {
        "prime_math": lambda: prime_math.compute_score(rf"The answer is \boxed{{{answer}}}", truth)[0],
        "geo3k": lambda: geo3k.compute_score(rf"\boxed{{{answer}}}", truth, format_score=0.0),
        "math_reward": lambda: math_reward.compute_score(rf"\boxed{{{answer}}}", truth),
        "math_dapo": lambda: math_dapo.compute_score(f"Answer: {answer}", truth)["acc"],
    }
    assert float(results[rule]()) == float(ours)


def test_the_page_has_forty_pairs_and_ours_is_wrong_only_where_verl_is():
    assert len(pairs()) >= 40
    assert all(ours in (person, verl) for *_, person, ours, verl in pairs())


def test_prime_math_says_what_it_read_and_whether_it_was_announced():
    assert prime_math.compute_score("so the answer is 12. Done", "12") == (True, True, "12")
    assert prime_math.compute_score("so the answer is 13", "north") == (False, True, "13")
    assert prime_math.compute_score("who knows", "north") == (False, False, "who knows")


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


@table([*(("same_output", *row) for row in cases.OUTPUTS), *(("same_value", *row) for row in cases.VALUES)])
def test_what_a_program_wrote(case):
    rule, written, expected, counts = case
    assert getattr(prime_code, rule)(written, expected) is counts


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
    assert re.search(r"line 2, in <module>\nZeroDivisionError", results[1]["error"])
    assert prime_code.compute_score("```python\n(\n```", {"inputs": [""], "outputs": [""]})[1][0]["result"] == -2
    assert prime_code.compute_score("pass", {"inputs": [], "outputs": []}) == (False, [])


ASSERTS = {"assert_case": ["assert f() == 3", "assert f() == 4"]}
PRINTS = {"assert_case": ["print(5)\nassert f() == 3"], "inputs": ["1"], "outputs": ["4\n5"]}
NONE = {"fn_name": "f", "inputs": ["1"], "outputs": [None]}
UNLIKE = [  # (program, cases, its share): left before the asserts; None that was not returned; numbers, no lists
    ("import os; os._exit(0)", ASSERTS, 0),
    ("raise SystemExit", ASSERTS, 0),
    ("def f(): import os; os._exit(0)", ASSERTS, 0),
    ("print(int(input()) + 3)\ndef f(): return 3", PRINTS, 1),
    ("import os; os._exit(0)", NONE, 0),
    ("def f(x): return x", NONE | {"outputs": ["null"]}, 0),
    ("def f(x): pass", NONE | {"outputs": [[None]]}, 1),
    ("print(int(input()) + 1)", {"inputs": [3, "4", ["5"]], "outputs": [4, "5", ["6"]]}, 1),
    ("def f(x): return x + 1", {"fn_name": "f", "inputs": [3], "outputs": [4]}, 1),
    ("print(5)", {"inputs": 5, "outputs": 5}, 0),
    ("print(5)", {"inputs": ["1"], "outputs": ["2"], "fn_name": 5}, 0),
]


@table(UNLIKE)
def test_cases_of_all_shapes(case):
    code, test_cases, share = case
    score, results = prime_code.compute_score(f"```python\n{code}\n```", test_cases, continuous=True)
    assert score == share and (test_cases is not PRINTS or len(results) == 1), "asserts and prints are one case"


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1000)"])
def test_a_program_without_an_end_is_wrong_and_only_its_first_case_is_run(code, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prime_code, "CPU_SECONDS_ALONE", 1.0)
    test_cases = {"inputs": [""] * 12, "outputs": ["5"] * 12}
    score, results = prime_code.compute_score(code, test_cases, continuous=True, budget=2.0)
    assert score == 0 and [result["result"] for result in results] == [prime_code.TOO_SLOW]


def test_all_cases_of_a_response_have_one_budget_below_the_row_s(monkeypatch: pytest.MonkeyPatch):
    """A program that was not run in time is not passed: the row is scored."""
    found = []
    monkeypatch.setattr(prime_code, "run_python", lambda *given, seconds, **limits: found.append(seconds) or DONE)
    now = itertools.count(step=10)
    monkeypatch.setattr(prime_code, "time", SimpleNamespace(monotonic=lambda: next(now)))  # other threads have time's
    test_cases = {"inputs": [""] * 10, "outputs": ["5"] * 10}
    assert default_compute_score("apps", "print(5)", test_cases, timeout=60.0) == 0.2
    assert found == [28.0, 8.0]  # of 48, at 10, 20 …


DONE = Finished(0, "5\n", "")


def test_a_flood_of_output_is_compared_as_a_text_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(prime_code, "words_of_lines", None)
    flood = "1\n" * 2_000_000
    assert not prime_code.same_output(flood, "1") and prime_code.same_output(flood, flood + "\n")


def loaded(**settings) -> RuleReward:
    return load(RewardConfig(**settings), RewardRun(None, None))


def test_programs_run_in_no_more_processes_than_there_are_cores(monkeypatch: pytest.MonkeyPatch):
    pool = pytest.importorskip("extras.scorers.pool")
    monkeypatch.setattr(pool, "available_cores", lambda: (6, "a test"))
    assert loaded(num_workers=16).caller.most == 6
    assert loaded(sandbox_fusion=SandboxFusionConfig("http://none/run_code"), num_workers=16).caller.most == 16


UNREADABLE = [  # (data source, response, ground truth): each raised, or took seconds
    ("numina_olympiads", "the answer is " + "1" * 5000, "5"),
    ("numina_olympiads", "1" * 32_000 + "x", "5"),
    ("numina_olympiads", r"\boxed{" + "9" * 5000 + "}", "5"),
    ("hiyouga/geometry3k", "<think>" + r"</think>\boxed{" * 2200, "5"),
    ("lighteval/MATH", r"\boxed{" * 4000, "5"),
    ("lighteval/MATH", r"\boxed{" + r"\frac" * 6000 + "}", "5"),
    ("openai/gsm8k", "#### " + "1" * 5000, "5"),
    ("searchR1_nq", "<answer>" * 4000, {"target": "5"}),
    ("countdown", "<answer>" + "(" * 150 + "</answer>", {"target": 5, "numbers": [5]}),
    ("countdown", "<answer>1\0+2</answer>", {"target": 5, "numbers": [5]}),
    ("apps", "x = 1\0", {"inputs": ["\0"], "outputs": ["5"]}),
    ("apps", "print('\ud800')", {"inputs": ["\ud800"], "outputs": ["5"]}),
    ("apps", "(" * 10_000, {"inputs": [""], "outputs": ["5"]}),
]


@table(UNREADABLE)
def test_what_a_rule_cannot_read_is_a_wrong_answer(case):
    source, response, truth = case
    result = default_compute_score(source, response, truth)
    assert result <= 0.1


@pytest.mark.parametrize("truth", [72, np.float64(72)])
def test_references_may_be_numbers(truth):
    responses = {
        "openai/gsm8k": "#### 72",
        "lighteval/MATH": r"\boxed{72}",
        "math_dapo": "Answer: 72",
        "numina_olympiads": "the answer is 72",
        "hiyouga/geometry3k": r"<think></think>\boxed{72}",
        "searchR1_nq": "<answer>72</answer>",
        "searchR1_popqa": "<answer>72</answer>",
    }
    for source, response in responses.items():
        right = {"target": [truth, "x"]} if source == "searchR1_nq" else truth
        for said, score in ((response, 1.0), (response.replace("72", "73"), 0.1)):
            result = default_compute_score(source, said, right)
            result = result["score"] if isinstance(result, dict) else result
            assert result == 1.0 if score == 1.0 else result <= score, source
    assert default_compute_score("searchR1_nq", "<answer>72</answer>", {"target": truth}) == 1.0
    assert math_reward.compute_score(r"\boxed{0.25}", 0.25) == 1.0


@table(cases.ROUTES)
def test_a_row_is_scored_by_the_rule_of_its_data_source(case):
    source, response, truth, score = case
    assert find_rule(source) is not None
    found = default_compute_score(source, response, truth, {"index": 0}, more="ignored")
    assert found == score and type(found) is type(score)


@pytest.mark.parametrize("source", ["my_data", "", None, "searchR1_x", "AIME"])
def test_a_data_source_without_a_rule_is_refused_by_name(source):
    assert find_rule(source) is None
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
    assert sandbox.run_python(asked[0].pop("code"), "3").output == "9\n"
    assert asked[0] == {
        **{"compile_timeout": 10, "run_timeout": 10, "memory_limit_MB": 128},
        **{"language": "python", "files": {}, "fetch_files": []},
    }


def test_a_gateway_that_gave_up_is_asked_again_and_other_errors_are_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.0)
    one = {"inputs": ["2"], "outputs": ["4"]}
    with fusion_server((504, {}), (504, {}), (200, OK)) as (url, asked):
        assert sandbox_fusion.compute_score(url, None, None, cases.SQUARE, one)[0] == 1.0
        assert len(asked) == 3
    with fusion_server((500, {})) as (url, asked):
        with pytest.raises(http.RequestRefused, match="status 500"):
            sandbox_fusion.compute_score(url, None, None, cases.SQUARE, one)
        assert len(asked) == 1
    with fusion_server((413, {})) as (url, asked):  # this program is too large
        score, [result] = sandbox_fusion.compute_score(url, None, None, cases.SQUARE, one)
        assert (score, result["result"]) == (0.0, -1) and "413" in result["answer"]
    with pytest.raises(http.ServerError, match="Check that the server runs"):  # nobody is there any more
        sandbox_fusion.compute_score(url, None, None, cases.SQUARE, one)


@pytest.mark.parametrize(("answer", "problem"), [((200, OK), "answers .*prints 42"), ((404, {}), "status 404")])
def test_the_url_of_a_server_is_tried_at_the_start(answer, problem, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http, "FIRST_WAIT", 0.0)
    right = {"status": "Success", "run_result": {"status": "Finished", "stdout": "42\n"}}
    with fusion_server((200, right)) as (url, asked):
        reward = loaded(sandbox_fusion=SandboxFusionConfig(url))
        reward.check(rows("openai/gsm8k"))
        assert not asked
        reward.check(rows("apps"))
        assert asked[0]["code"] == "print(6 * 7)"
    with fusion_server(answer) as (url, asked), pytest.raises(ConfigError, match=rf"sandbox_fusion.url=.*{problem}"):
        sandbox_fusion.try_server(url)
    with pytest.raises(ConfigError, match=r"sandbox_fusion.url=http://127.0.0.1:1/run_code runs no programs.*leave it"):
        sandbox_fusion.try_server("http://127.0.0.1:1/run_code")


def test_a_server_believes_only_programs_that_reach_the_end_of_their_asserts():
    one = {"assert_case": ["assert square(2) == 4"]}
    with fusion_server((200, OK)) as (url, asked):  # it did not print the secret
        assert sandbox_fusion.compute_score(url, None, None, cases.SQUARE, one)[0] == 0.0
    assert re.search(r"assert square\(2\) == 4\n\nprint\('(\w{32})'\)$", asked[0]["code"])
    assert sandbox_fusion.read_result(OK, None, secret="4") is True


def test_programs_are_held_or_it_is_said_and_required_fences_refuse_the_run(monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sandbox, "fences", lambda: ("no capabilities",))
    monkeypatch.setattr(errors, "noticed", set())
    loaded().check(rows("openai/gsm8k"))
    assert not capsys.readouterr().err
    with pytest.raises(ConfigError, match=r"reward\.sandbox=closed: the sandbox is open: on this machine programs are"):
        loaded().check(rows("openai/gsm8k", "apps"))
    tried = rows("apps", "apps")
    tried[0]["reward_model"] = {"ground_truth": '{"assert_case": ["assert f() == 3"]}'}
    load_reward_manager(RewardConfig(sandbox="open"), None, None).check(tried)
    said = capsys.readouterr().err
    assert "the sandbox is open" in said and "1 of 2 rows check programs by assert_case" in said
    with pytest.raises(ConfigError, match=r"reward\.sandbox=required"):
        RewardConfig(sandbox="required").check(None, "reward")


def rows(*sources: str) -> dict[int, dict[str, str]]:
    return {position: {"data_source": source} for position, source in enumerate(sources)}


def test_a_function_is_called_by_lines_of_json():
    with fusion_server((200, OK)) as (url, asked):
        test_cases = {"inputs": ["2"], "outputs": ["4"], "fn_name": "square"}
        response = "```python\nfrom __future__ import annotations\ndef square(x: Optional[int]): return x * x\n```"
        assert sandbox_fusion.compute_score(url, None, None, response, test_cases)[0] == 1.0
    [request] = asked
    assert request["stdin"] == "2" and sandbox.run_python(request["code"], "2").output == "4\n"
    assert "line 3" in sandbox.run_python(request["code"], '"a"').errors  # of the block, whose first line is empty


def test_without_any_reward_the_rules_of_public_data_sets_score():
    """Public data sets are scored by their rules where no reward is set; the config says where programs are run."""
    config = RewardConfig(sandbox_fusion=SandboxFusionConfig("http://none/run_code", 3, 128))
    reward = load_reward_manager(config, None, None)
    limits = {"sandbox_fusion_url": "http://none/run_code", "concurrent_semaphore": 3, "memory_limit_mb": 128}
    limits |= {"timeout": 60.0, "sandbox": "closed"}
    assert reward.function is default_compute_score and reward.reward_kwargs == limits
    sources = ["openai/gsm8k", "lighteval/MATH"]
    columns = {"responses": ["#### 5", r"\boxed{5}"], "ground_truths": ["5", "6"], "data_source": sources}
    assert reward(DataProto.from_single_dict(columns)) == [1.0, 0.0]
