"""Rewards as users write them, in files of their own: how they are called, where scores land, what is refused."""

import asyncio
import gc
import os
import re
import reprlib
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import training.reward
from configs.errors import ConfigError
from configs.extras import has
from configs.import_utils import load_extern_object
from configs.schema import RewardConfig, RewardFunctionConfig, ScoringConfig
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto, object_array
from data.types import NotScored
from training.reward import add_scores, concat_scored, load_reward_manager, reward_metrics, reward_view
from training.reward_function import FunctionReward

TOKENIZER = build_tokenizer()
HERE = {"in_process": True} if has("optional", "scorers") else {}  # functions are called in this process
ALONE = DataProto.from_single_dict({"responses": ["answer: 42", "no idea"], "ground_truths": ["42", "42"]})

PER_SAMPLE = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return float(solution_str.split()[-1] == ground_truth) * kwargs.get("weight", 1.0)
"""
PER_SAMPLE_ASYNC = """
import asyncio
async def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    await asyncio.sleep(0)
    return {"score": float(solution_str.split()[-1] == ground_truth) * weight, "length": len(solution_str)}
"""
PER_BATCH = """
import torch
def compute_reward(data, tokenizer=None, weight=1.0, **kwargs):
    assert len(data.batch) == len(data.responses) and data.meta_info is not None
    truths = data.get("ground_truths", [None] * len(data.batch))
    return torch.tensor([weight * (text.split()[-1] == truth) for text, truth in zip(data.responses, truths)])
"""
PER_BATCH_IN_A_LOOP = """
import torch
def compute_reward(data, tokenizer=None, weight=1.0):
    truths, rewards = data.get("ground_truths"), torch.zeros(len(data.batch), device=data.device)
    for i, text in enumerate(data.responses):
        truth = truths[i] if truths else None
        rewards[i] = weight * (text.split()[-1] == truth)
    return rewards
"""
PER_BATCH_ASYNC = PER_BATCH.replace("def compute", "async def compute")
PER_LISTS = """
def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    assert all(type(given) is list for given in (data_sources, solution_strs, ground_truths, extra_infos))
    weight = kwargs.get("weight", 1.0)
    return [weight * (text.split()[-1] == truth) for text, truth in zip(solution_strs, ground_truths, strict=True)]
"""
PER_LISTS_ASYNC = PER_LISTS.replace("def compute", "async def compute")
PER_TEXT = """
def compute_reward(prompt: str, response: str, ground_truth: str | None, weight: float = 1.0) -> float:
    return weight * (response.split()[-1] == ground_truth)
"""
FILES = {
    "per sample": ("compute_score", PER_SAMPLE),
    "per sample, async": ("compute_score", PER_SAMPLE_ASYNC),
    "per batch": ("compute_reward", PER_BATCH),
    "per batch, in a loop": ("compute_reward", PER_BATCH_IN_A_LOOP),
    "per batch, async": ("compute_reward", PER_BATCH_ASYNC),
    "per lists": ("compute_score", PER_LISTS),
    "per lists, async": ("compute_score", PER_LISTS_ASYNC),
    "per text": ("compute_reward", PER_TEXT),
}


def load(folder: Path, text: str, name: str, **reward_kwargs) -> FunctionReward:
    file = folder / "my_reward.py"
    file.write_text(text)
    function = RewardFunctionConfig(str(file), name, reward_kwargs)
    return load_reward_manager(RewardConfig(function, **HERE), TOKENIZER, None)


def rollout(*responses: str, width: int = 8, **columns: list) -> DataProto:
    """Rollouts as an engine returns them; in a response, [text in brackets] is not the policy's."""
    ids = torch.full((len(responses), width), TOKENIZER.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(responses):
        spoken, own = [], True
        for character in text:
            own = own and character != "["
            spoken += [(character, int(own))] if character not in "[]" else []
            own = own or character == "]"
        for place, (character, bit) in enumerate(spoken):
            ids[row, place], mask[row, place] = TOKENIZER.convert_tokens_to_ids(character), bit
    prompts = [TOKENIZER.encode("2+2=") for _ in responses]
    return DataProto.from_single_dict(
        {"responses": ids, "response_mask": mask, "raw_prompt_ids": prompts, "uid": list(range(len(ids))), **columns}
    )


def score(result, batch: DataProto) -> torch.Tensor:
    return add_scores(batch, lambda data: result, TOKENIZER).token_level_scores


@pytest.mark.parametrize("form", FILES)
def test_every_form_works_alone_and_in_a_run_and_is_given_its_kwargs(tmp_path, form):
    name, text = FILES[form]
    reward = load(tmp_path, text, name, weight=0.5)
    alone = [result["score"] if isinstance(result, dict) else float(result) for result in reward(ALONE)]
    assert alone == [0.5, 0.0]
    labels = [{"style": "rule", "ground_truth": "4"}] * 2
    batch = rollout("4", "5", reward_model=labels, data_source=["sums"] * 2, extra_info=[{}] * 2)
    assert training.reward.compute_reward(ALONE, reward.function).tolist() == [1.0, 0.0], "without a run"
    assert training.reward.compute_reward_async(batch, reward, tokenizer=TOKENIZER).result().tolist() == [0.5, 0.0]
    scores = add_scores(batch, reward, TOKENIZER).token_level_scores
    assert scores.sum(1).tolist() == [0.5, 0.0]


def test_without_a_run_scores_of_tokens_are_summed_and_what_is_not_scored_is_nan():
    of_tokens = training.reward.compute_reward(rollout("4", "5"), lambda data: torch.ones(2, 8), TOKENIZER)
    assert of_tokens.tolist() == [8.0, 8.0]
    scores = training.reward.compute_reward(ALONE, lambda response: None if "no" in response else 2)
    assert scores[0] == 2 and scores[1].isnan()

    async def awaited(reward):
        return await asyncio.wrap_future(training.reward.compute_reward_async(ALONE, reward))

    assert asyncio.run(awaited(lambda response: 3.0)).tolist() == [3.0, 3.0]
    with pytest.raises(RuntimeError, match=rf"raised ZeroDivisionError.*{re.escape(__file__)}"):
        asyncio.run(awaited(lambda response: 1 / 0))


A, B, HELPER = (f"def {name}(response): return 1.0\n" for name in ("a", "b", "_helper"))
NO_FORM, IMPORTED = "def c(text): return 1.0\n", "from examples.reversal import compute_score\n"


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        (A + HELPER + NO_FORM, "a"),
        (A + "def compute_reward(prompt, response): return 0.0", "compute_reward"),
        (IMPORTED + A, "compute_score"),
        (A + B + HELPER + NO_FORM, r"has no compute_score: set reward.custom_reward_function.name to one .*, a, b\."),
        (NO_FORM, r"has no compute_score: set reward.custom_reward_function.name to one of its functions, c\."),
    ],
)
def test_a_file_alone_gives_its_only_reward_or_lists_its_functions(tmp_path, capfd, text, chosen):
    (tmp_path / "mine.py").write_text(text)
    config = RewardConfig(RewardFunctionConfig(str(tmp_path / "mine.py")), **HERE)
    if "set reward" in chosen:
        with pytest.raises(ConfigError, match=chosen):
            load_reward_manager(config, TOKENIZER, None)
        return
    assert load_reward_manager(config, TOKENIZER, None).function.__name__ == chosen
    is_told = f"its function {chosen} scores (reward.custom_reward_function.name={chosen})" in capfd.readouterr().err
    assert is_told == (chosen != "compute_score")


def test_a_function_is_given_what_it_names_and_verls_four_by_kwargs():
    given = []
    columns = {"prompts": ["p"], "responses": ["r"], "ground_truths": ["g"], "data_source": ["d"], "extra_info": [{}]}
    data = DataProto.from_single_dict(columns)

    def short(solution_str, split):
        given.append({"solution_str": solution_str, "split": split})
        return 0.0

    def long(response, **kwargs):
        given.append({"response": response, **kwargs})
        return 0.0

    FunctionReward(short)(data)
    data.meta_info["validate"] = True
    FunctionReward(short)(data)
    FunctionReward(long)(data)
    verl = {"data_source": "d", "solution_str": "r", "ground_truth": "g", "extra_info": {}}
    assert given == [
        {"solution_str": "r", "split": "train"},
        {"solution_str": "r", "split": "val"},
        {"response": "r"} | verl,
    ]


ADDS = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return sum(extra_info['turn_scores'])"
)


@pytest.mark.parametrize(("text", "tools", "scores", "told"), [
    ("def compute_score(solution_str): return 0.0", [0.5], [], "tool_rewards are not 0"),
    ("def compute_score(solution_str): return 0.0", [0.0], [0.0, 0.25], "turn_scores are not 0"),
    ("def compute_score(solution_str): return 0.0", [1], [1], "tool_rewards and turn_scores are not 0"),
    ("def compute_score(solution_str): return 0.0", [0.0, 0], [], None),
    (ADDS, [], [0.5], None), (ADDS, [0.5], [0.5], "tool_rewards are not 0"),
    ("def compute_score(solution_str, turn_scores): return 0.0", [], [0.5], None),
])  # fmt: skip
def test_what_tools_and_users_pay_and_a_function_does_not_name_is_told_once(
    tmp_path, monkeypatch, capsys, text, tools, scores, told
):
    monkeypatch.setattr("configs.errors.noticed", set())
    (tmp_path / "mine.py").write_text(text)
    columns = {"prompts": ["p"] * 2, "responses": ["r"] * 2, "data_source": ["d"] * 2, "ground_truths": ["g"] * 2}
    paid = {"tool_rewards": [None, tools], "turn_scores": [[], scores]}
    data = DataProto.from_single_dict(columns | paid | {"extra_info": [{"turn_scores": []}] * 2})
    reward = FunctionReward(load_extern_object(str(tmp_path / "mine.py"), "compute_score"))
    for _ in range(2):
        reward(data)
    assert re.findall("notice: (.*?),", capsys.readouterr().err) == ([told] if told else [])


def test_a_function_of_lists_is_called_once_with_what_it_names():
    given = []
    columns = {"prompts": ["p", "q"], "responses": ["r", "s"], "ground_truths": ["g", "h"]}
    data = DataProto.from_single_dict(columns | {"data_source": ["d", "d"], "extra_info": [{}, {"a": 1}]})

    def short(responses, prompts, split):
        given.append({"responses": responses, "prompts": prompts, "split": split})
        return [{"score": 1.0}, {"score": 0.0}]

    def long(solution_strs, **kwargs):
        given.append({"solution_strs": solution_strs, **kwargs})
        return torch.ones(2)

    assert FunctionReward(short)(data) == [{"score": 1.0}, {"score": 0.0}]
    assert torch.equal(FunctionReward(long)(data), torch.ones(2))
    verl = {"data_sources": ["d", "d"], "ground_truths": ["g", "h"], "extra_infos": [{}, {"a": 1}]}
    assert given == [
        {"responses": ["r", "s"], "prompts": ["p", "q"], "split": "train"},
        {"solution_strs": ["r", "s"]} | verl,
    ]
    assert FunctionReward(lambda data, responses=None: len(data))(data) == 2  # of a DataProto, whatever else it names
    assert FunctionReward(lambda solution_strs, ground_truths: []).needed == {"ground_truths"}
    assert not FunctionReward(lambda solution_strs, ground_truths=None: []).needed


TRLS = """
import re

def format_reward(completions, **kwargs):
    assert kwargs["level"] == [1, 2] and len(kwargs["prompts"]) == len(kwargs["completion_ids"]) == 2
    assert not {"prompt", "raw_prompt", "raw_prompt_ids", "uid", "responses", "__messages__"} & kwargs.keys()
    texts = [completion[-1]["content"] for completion in completions]
    return [1.0 if re.fullmatch(r"<[0-9]+>", text) else 0.0 for text in texts]

def accuracy_reward(completions, ground_truth, **kwargs):
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [1.0 if truth in text else 0.0 for text, truth in zip(texts, ground_truth)]

async def of_the_easy(prompts, completions, level):
    assert prompts == ["p", "q"] and completions == ["<4>", "5"]
    return [1.0 if number == 1 else None for number in level]
"""


def test_trls_functions_are_given_texts_for_texts_messages_for_messages_and_all_columns(tmp_path):
    labels = [{"ground_truth": "4"}, {"ground_truth": "7"}]
    batch = rollout("<4>", "5", level=[1, 2], reward_model=labels, raw_prompt=["p", "q"])

    def scores(name):
        scored = add_scores(batch.clone(), load(tmp_path, TRLS, name), TOKENIZER)
        return [*zip(scored.reward_outcome, scored.token_level_scores.sum(1).tolist(), strict=True)]

    assert scores("accuracy_reward") == [("ok", 1.0), ("ok", 0.0)]
    assert scores("of_the_easy") == [("ok", 1.0), ("error", 0.0)]
    chat = [{"role": "user", "content": "p"}]
    said = [*chat, {"role": "assistant", "content": "<7>"}]
    batch.non_tensor_batch |= {"raw_prompt": object_array([chat, chat]), "__messages__": object_array([said, said])}
    assert scores("format_reward") == [("ok", 1.0), ("ok", 1.0)]
    assert scores("accuracy_reward") == [("ok", 0.0), ("ok", 1.0)]
    del batch.non_tensor_batch["__messages__"]
    assert scores("accuracy_reward") == [("ok", 1.0), ("ok", 0.0)]
    assert FunctionReward(lambda completions, ground_truth: []).needed == {"ground_truth"}


def test_async_rewards_run_side_by_side_no_more_than_so_many_at_once_even_inside_a_running_loop():
    under_way, most = set(), []

    async def compute_score(solution_str):
        under_way.add(solution_str)
        most.append(len(under_way))
        for _ in range(3):
            await asyncio.sleep(0)
        under_way.remove(solution_str)
        return float(solution_str)

    async def notebook():
        return FunctionReward(compute_score)(answers)

    answers = DataProto.from_single_dict({"responses": [str(row) for row in range(50)]})
    limits = ScoringConfig(max_concurrent=7)
    assert FunctionReward(compute_score, config=limits)(answers) == [float(row) for row in range(50)]
    assert max(most) == 7
    most.clear()
    assert asyncio.run(notebook()) == [float(row) for row in range(50)]
    assert max(most) == 50 <= RewardConfig.max_concurrent


def test_an_async_reward_that_takes_too_long_ends_the_run_and_names_row_and_key():
    """A call's time counts from its own start: the rows before it may take as long as they like in all."""
    cancelled = []

    async def compute_score(solution_str):
        try:
            await asyncio.sleep(30 if solution_str == "stuck" else 0)
        except asyncio.CancelledError:
            cancelled.append(solution_str)
            raise
        return 1.0

    answers = rollout("one", "stuck", "two", width=5)
    message = r"raised TimeoutError: the call for response 1 was not done after reward.timeout=0.2 seconds: raise it"
    with pytest.raises(RuntimeError, match=message):
        limits = ScoringConfig(max_concurrent=1, timeout=0.2)
        add_scores(answers, FunctionReward(compute_score, config=limits), TOKENIZER)
    assert cancelled == ["stuck"]


@pytest.mark.filterwarnings("error")  # a coroutine that was never awaited
def test_the_first_failure_ends_all_calls_begun_and_waiting():
    begun, cancelled = [], []

    async def compute_score(solution_str):
        begun.append(solution_str)
        if solution_str == "0":
            await asyncio.sleep(0.01)
            raise ValueError("no score")
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(solution_str)
            raise

    answers = DataProto.from_single_dict({"responses": [str(row) for row in range(5)]})
    with pytest.raises(ValueError, match="no score"):
        FunctionReward(compute_score, config=ScoringConfig(max_concurrent=2))(answers)
    gc.collect()
    assert begun[:2] == ["0", "1"] and sorted(cancelled) == begun[1:]


@pytest.mark.parametrize("blocks", [False, True])
def test_an_interrupt_ends_an_async_reward_at_once(blocks):
    """Calls that await are cancelled; those that block are left behind."""
    cancelled, ended, release = [], [], threading.Event()

    async def compute_score(solution_str):
        os.kill(os.getpid(), signal.SIGINT)
        if blocks:
            release.wait(30)
            ended.append(solution_str)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.append(solution_str)
            raise

    with pytest.raises(KeyboardInterrupt):
        FunctionReward(compute_score)(DataProto.from_single_dict({"responses": ["a"]}))
    assert cancelled == ([] if blocks else ["a"]) and ended == []
    release.set()


@pytest.mark.parametrize(
    ("function", "reward_kwargs", "message"),
    [
        (lambda text: 1.0, {}, "none of the known forms.*compute_score"),
        (lambda solution, ground_truth: 1.0, {}, "Did you mean 'solution_str'"),
        (
            lambda solution_str, reward_router_address: 1.0,
            {},
            "serve a judge yourself.*reward_router_address=HOST:PORT",
        ),
        (lambda response: 1.0, {"wight": 0.5}, "got an unexpected keyword argument 'wight'.*reward_kwargs"),
    ],
)
def test_a_function_of_another_form_or_other_arguments_is_refused_at_the_start(function, reward_kwargs, message):
    with pytest.raises(ValueError, match=message):
        FunctionReward(function, TOKENIZER, reward_kwargs)


COLUMNS = """
def one(solution_str, level, messages, response_ids, end_reason, group, most=9, hint=None, absent=None):
    assert most == 9 and absent is None and messages[-1] == {"role": "assistant", "content": solution_str}
    return {"score": level, "ids": len(response_ids), "end": end_reason, "best": max(group, key=len), "said": hint}

def all_at_once(solution_strs, level, messages, response_ids, end_reason, group, hint=None):
    rows = zip(solution_strs, level, messages, response_ids, end_reason, group)
    return [one(*row) | {"said": hint[0]} for row in rows]

def needy(solution_str, level, colour): return 1.0
"""


@pytest.mark.parametrize("name", ["one", "all_at_once"])
def test_a_function_names_columns_of_the_data_and_facts_of_the_rollout(tmp_path, name):
    batch = rollout("4", "57[x]", "0", level=[1, 2, 3], hint=["a", "b", "c"], most=[1, 2, 3])
    batch.non_tensor_batch |= {"uid": object_array([0, 0, 1]), "end_reason": object_array(["terminated"] * 3)}
    reward = load(tmp_path, COLUMNS, name)
    scored = add_scores(batch, reward, TOKENIZER)
    assert scored.token_level_scores.sum(1).tolist() == [1, 2, 3] and scored.ids.tolist() == [1, 2, 1]
    assert scored.end.tolist() == ["terminated"] * 3 and scored.best.tolist() == ["57", "57", "0"]
    assert scored.said.tolist() == (["a", "b", "c"] if name == "one" else ["a"] * 3)


def test_a_column_that_a_function_needs_and_the_data_lacks_is_named_before_the_first_step(tmp_path):
    reward = load(tmp_path, COLUMNS, "needy")
    with pytest.raises(ConfigError, match=r"needy .* needs colour, and none of 1 rows .* they have level, prompt"):
        reward.check({0: {"level": 1, "prompt": "x"}})


def test_the_score_lands_on_the_last_token_of_the_policy_and_nowhere_in_failed_rows():
    batch = rollout("ab", "a[tool]b", "ab[to]", "[tool]")
    scores = score([1.0, 2.0, 3.0, 4.0], batch)
    assert scores.dtype == torch.float32 and scores.shape == (4, 8)
    assert scores.nonzero().tolist() == [[0, 1], [1, 5], [2, 1]]
    assert scores[scores != 0].tolist() == [1.0, 2.0, 3.0]


def test_text_of_the_environment_earns_nothing(tmp_path):
    batch = rollout("[42]", "42[1]", reward_model=[{"ground_truth": "42"}] * 2)
    view = reward_view(batch, TOKENIZER)
    assert [*view.responses] == ["", "42"]
    assert [*view.prompts] == ["2+2="] * 2 and [*view.ground_truths] == ["42"] * 2
    reward = FunctionReward(lambda solution_str, ground_truth: float(ground_truth in solution_str))
    scores = add_scores(batch, reward, TOKENIZER).token_level_scores
    assert scores.sum(1).tolist() == [0.0, 1.0]


def test_answers_of_several_turns_are_not_read_as_one():
    batch = rollout("1[ok]2 of", "12", "[ok]1[ok]2", "[ok]")
    assert [*reward_view(batch, TOKENIZER).responses] == ["1\n2 of", "12", "1\n2", ""]


def test_a_reward_per_token_stays_where_it_is():
    batch = rollout("ab", "a[t]b")
    per_token = torch.rand(2, 8) * batch.response_mask
    scored = add_scores(batch.clone(), lambda data: per_token.double() * data.response_mask, TOKENIZER)
    assert torch.equal(scored.token_level_scores, per_token)
    with pytest.raises(ValueError, match=r"scored 12 tokens that the policy did not .*= \[0, 2\].*response_mask"):
        score(torch.ones(2, 8), batch)


@pytest.mark.parametrize(
    "result",
    [
        [1, 0],
        (True, False),
        [np.bool_(True), np.float32(0)],
        [torch.tensor(1.0), np.array([0.0])],
        np.array([1.0, 0.0]),
        np.array([1, False], dtype=object),
        torch.tensor([1, 0]),
        torch.tensor([1.0, 0.0], requires_grad=True),
        [{"score": 1}, {"score": 0}],
    ],
)
def test_numbers_of_every_kind_are_scores(result):
    scores = score(result, rollout("a", "b"))
    assert scores[:, 0].tolist() == [1.0, 0.0] and not scores.requires_grad


WRONG = [
    (None, "returned None: it must return [2] numbers, one per response, or [2, 8], one per response token"),
    (0.5, "returned 0.5: it must return [2] numbers"),
    ("ab", "returned 'ab': it must return [2] numbers"),
    ({"score": [1.0, 0.0]}, "returned {'score': [1.0, 0.0]}: it must return"),
    ([1.0], "returned scores of shape [1]"),
    ([{"score": 1.0}] * 3, "returned scores of shape [3]"),
    (torch.zeros(3), "returned scores of shape [3]: it must return [2] numbers, one per response, or [2, 8]"),
    (torch.zeros(2, 7), "returned scores of shape [2, 7]"),
    (torch.tensor(1.0), "returned scores of shape []"),
    ([{"score": 1.0, "uid": 0}] * 2, "returned the keys ['uid'], which are columns of the batch already"),
]  # fmt: skip


@pytest.mark.parametrize(("result", "message"), WRONG, ids=range(len(WRONG)))
def test_a_wrong_result_is_refused_and_located(result, message):
    def my_reward(data):
        return result

    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        add_scores(rollout("a", "b"), my_reward, TOKENIZER)
    assert f"my_reward ({__file__})" in str(caught.value)


NAN, NUMBER = float("nan"), "a score is a number, or a dict with it as 'score'"
FINITE = "a score is a finite number below 1e+18"
ONE_BAD = [
    ([1.0, None, 1.0], f"it returned None: {NUMBER}"),
    ([1.0, NAN, 1.0], f"it returned nan: {FINITE}"),
    ([1.0, float("-inf"), 1.0], f"it returned -inf: {FINITE}"),
    ([1.0, 1e300, 1.0], f"it returned 1e+300: {FINITE}"),
    ([1.0, 10**400, 1.0], f"it returned {reprlib.repr(10**400)}: {FINITE}"),
    ([1.0, "1.0", 1.0], f"it returned '1.0': {NUMBER}"),
    ([1.0, [1.0], 1.0], f"it returned [1.0]: {NUMBER}"),
    ([1.0, (1.0, {}), 1.0], f"it returned (1.0, {{}}): {NUMBER}"),
    (np.array([1.0, NAN, 1.0]), f"it returned nan: {FINITE}"),
    (torch.tensor([1.0, NAN, 1.0]), f"it returned nan: {FINITE}"),
    (torch.tensor([[1.0] + [0.0] * 7, [0.0] * 7 + [NAN], [1.0] + [0.0] * 7]), f"it returned nan: {FINITE}"),
    ({"reward_tensor": torch.tensor([1.0, NAN, 1.0])}, f"it returned nan: {FINITE}"),
    ([{"score": 1.0}, {"score": "high"}, {"score": 1.0}], f"it returned 'high': {NUMBER}"),
    ([{"score": 1.0}, {"acc": 1.0}, {"score": 1.0}], "it returned a dict of ['acc']: a dict needs 'score'"),
    ([{"score": 1.0, "acc": 1}, {"score": 0, "ac": 1}, {"score": 1.0, "acc": 1}], "['ac', 'score']: most dicts have"),
]  # fmt: skip


@pytest.mark.parametrize(("result", "said"), ONE_BAD, ids=range(len(ONE_BAD)))
def test_one_bad_value_is_the_failure_of_its_row_alone(result, said, caplog):
    def my_reward(data):
        return result

    batch = rollout("a", "b", "c", end_reason=["terminated"] * 3)
    found = add_scores(batch.clone(), my_reward, TOKENIZER, ScoringConfig())
    assert [*found.reward_outcome] == ["ok", "error", "ok"] and found.end_reason[1] == "reward_error"
    assert found.token_level_scores.sum(1).tolist() == [1, 0, 1] and not found.batch["response_mask"][1].any()
    assert said in caplog.messages[0] and f"my_reward ({__file__})" in caplog.messages[0]
    found = add_scores(batch.clone(), my_reward, TOKENIZER, ScoringConfig(on_failure="score", failure_score=-0.5))
    assert found.token_level_scores.sum(1).tolist() == [1, -0.5, 1]
    with pytest.raises(RuntimeError, match=re.escape(said)):
        add_scores(batch, my_reward, TOKENIZER, ScoringConfig(max_failed_fraction=0.0))


def test_a_number_beside_dicts_is_a_score_that_says_nothing_more():
    batch = add_scores(rollout("a", "b"), lambda data: [{"score": 1.0, "acc": 0.5, "pred": "a"}, 0.25], TOKENIZER)
    assert batch.token_level_scores.sum(1).tolist() == [1, 0.25] and [*batch.acc] == [0.5, None]
    assert reward_metrics(batch)["reward/acc/mean"] == 0.5
    fewer = [{"score": 0.0}, {"score": 0.0, "pred": "b"}, {"score": 0.0}, {"score": 1.0, "acc": 0.5, "pred": "a"}]
    less = add_scores(rollout(*"abcd"), lambda data: fewer, TOKENIZER)
    assert {*less.reward_outcome} == {"ok"} and less.token_level_scores.sum(1).tolist() == [0, 0, 0, 1]
    assert [*less.acc] == [None, None, None, 0.5] and [*less.pred] == [None, "b", None, "a"]
    numbers = add_scores(rollout("c"), lambda data: [0.75], TOKENIZER)
    batch.non_tensor_batch["notes"] = batch.acc  # as a tool keeps them in agent_data.extra_fields
    joined = concat_scored([batch, numbers])
    assert [*joined.notes] == [0.5, None, None]
    assert [*joined.pred] == ["a", None, None] and joined.meta_info["reward_extra_keys"] == ["acc", "pred"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_that_raises_is_located_in_the_users_file(tmp_path, asynchronous):
    text = "import json\ndef compute_score(solution_str):\n    value = json.loads(solution_str)\n    return value"
    name = "compute_score"
    reward = load(tmp_path, text.replace("def ", "async def ") if asynchronous else text, name)
    message = rf"compute_score \({tmp_path}/my_reward.py\) raised JSONDecodeError: .*\(at {tmp_path}/my_reward.py:3\)"
    with pytest.raises(RuntimeError, match=message) as caught:
        add_scores(rollout("a"), reward, TOKENIZER)
    assert "JSONDecodeError" in str(type(caught.value.__cause__))


def test_what_a_dict_says_beside_the_score_becomes_columns_and_metrics_of_the_rows_that_did_not_fail():
    results = [
        {"score": 1.0, "acc": True, "pred": "4", "steps": np.int64(2)},
        {"score": 0.0, "acc": False, "pred": "5", "steps": np.int64(4)},
        {"score": 9.0, "acc": True, "pred": "6", "steps": np.int64(99)},
    ]
    batch = add_scores(rollout("4", "5", "[x]"), lambda data: results, TOKENIZER)
    assert [*batch.pred] == ["4", "5", "6"] and batch.token_level_scores.sum(1).tolist() == [1.0, 0.0, 0.0]
    metrics = reward_metrics(batch)
    assert {name for name in metrics if "steps" in name} == {
        f"reward/steps/{how}" for how in ("mean", "std", "min", "max")
    }
    assert metrics["reward/steps/mean"] == 3 and metrics["reward/steps/std"] == 1 and metrics["reward/steps/max"] == 4
    assert metrics["reward/acc/mean"] == 0.5 and not any("pred" in name for name in metrics)


@pytest.mark.parametrize(
    ("signature", "reward_kwargs", "needs"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", {}, True),
        ("data_source, solution_str, ground_truth, extra_info=None", {"ground_truth": "4"}, False),
        ("data_source, solution_str, ground_truth=None", {}, False),
        ("solution_str, ground_truth: str", {}, True),
        ("solution_str, ground_truth: str | None", {}, False),
        ("solution_str, **kwargs", {}, False),
        ("data, tokenizer=None", {}, False),
    ],
)
def test_a_signature_says_whether_there_must_be_a_ground_truth(tmp_path, signature, reward_kwargs, needs):
    reward = load(tmp_path, f"def compute_score({signature}):\n    return 0.0\n", "compute_score", **reward_kwargs)
    assert ("ground_truth" in reward.needed) == needs


# Rows that could not be scored

RESULTS = {
    "good": {"score": 1.0, "pred": "good", "size": 4},
    "bad": NotScored("error", "KeyError: 'lost' (at mine.py:7)", "its traceback"),
    "slow": NotScored("timeout", "it was not done"),
}


def fails(data: DataProto) -> list:
    return [RESULTS[response] for response in data.responses]


def test_rows_that_could_not_be_scored_are_masked_out_counted_and_said(caplog):
    config = ScoringConfig(max_failed_fraction=0.7)
    batch = rollout("good", "bad", "slow", end_reason=["terminated"] * 3)
    batch = add_scores(batch, fails, TOKENIZER, config)
    assert batch.batch["response_mask"].sum(1).tolist() == [4, 0, 0]
    assert batch.token_level_scores.sum(1).tolist() == [1.0, 0.0, 0.0]
    assert [*batch.end_reason] == ["terminated", "reward_error", "reward_timeout"]
    metrics = reward_metrics(batch)
    assert (metrics["reward/error"], metrics["reward/timeout"]) == (1, 1)
    assert metrics["reward/size/mean"] == 4 and [*batch.pred] == ["good", None, None]
    [said] = [record.getMessage() for record in caplog.records]
    assert "2 of 3 responses could not be scored (1 error, 1 timeout), and are left out: " in said


@pytest.mark.parametrize(("answers", "limit", "counts"), [
    (["bad", "good"], 0.0, "1 of 2 .*1 error"), (["bad", "good", "bad", "bad"], 0.5, "3 of 4 .*3 error"),
])  # fmt: skip
def test_too_many_of_them_end_the_run_at_the_users_line(answers, limit, counts):
    config = ScoringConfig(max_failed_fraction=limit)
    said = f"{counts}), more than reward.max_failed_fraction={limit:g}".replace(")", r"\)")
    message = rf"raised KeyError: 'lost' \(at mine.py:7\)\. {said}"
    with pytest.raises(RuntimeError, match=message):
        add_scores(rollout(*answers), fails, TOKENIZER, config)
