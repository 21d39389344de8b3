"""Whole episodes: every token as it was sampled, every reward on its turn, and whatever fails counted and left out."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Barrier, get_ident
from time import sleep
from types import SimpleNamespace
from typing import Any, ClassVar

import gymnasium as gym
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from configs.schema import ModelConfig
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import TextEnv, make_env
from data.chat import ChatFormat
from data.protocol import DataProto
from data.types import Completion, Reply, Request
from tests import episodes
from tests.engines import Scripted
from tests.episodes import SAMPLED, TOKENIZER, Counting, counting, episodes_config, game_of, played, row_text, starts
from training.advantage import Estimator
from training.environment import EnvSetup
from workers.agent_loop import AgentLoop
from workers.agents.episode import Limits, SingleAnswer
from workers.hf_rollout import HFRollout
from workers.models import load_causal_lm
from workers.rollout import Rollout, build_rollout

LAKE = {"is_slippery": False, "random_maps": True, "instruction": ""}


def real_engine(folder: Path, config: Any) -> HFRollout:
    device, dtype = torch.device("cpu"), torch.float32
    module = load_causal_lm(ModelConfig(path=str(folder)), device, dtype, longest=500)
    return build_rollout(HFRollout, config.actor_rollout_ref.rollout, AutoTokenizer.from_pretrained(folder), module)


def said(config: Any, game: EnvSetup, answers: str, seeds: Sequence[int]) -> DataProto:
    """Plays episodes in which the policy says the letters of `answers` in turn, wherever it is in the same state."""
    engine = Scripted(config, TOKENIZER, lambda text, times: answers[times % len(answers)])
    return played(config, game, engine, [*seeds])


@pytest.mark.parametrize("history", ["transcript", "turns"])
def test_an_episode_by_hand(history: str):
    config, game = counting(f"env.history={history}")
    answers = iter(["2", "?", "1", "2"])
    batch = played(config, game, Scripted(config, TOKENIZER, lambda text, times: next(answers)), [11])
    turns = [f"<|user|>{shown}<|end|><|assistant|>{answer}<|end|>" for shown, answer in ("02", "2?", "21", "32")]
    whole = "".join([*turns[:2], turns[2].replace("2", "That was no legal action.\n2", 1), turns[3]])
    assert [row_text(batch, row) for row in range(len(batch))] == ([whole] if history == "transcript" else turns)
    policy = [TOKENIZER.decode(ids[mask == 1]) for ids, mask in zip(batch.responses, batch.response_mask, strict=True)]
    assert "".join(policy) == "2<|end|>?<|end|>1<|end|>2<|end|>"
    paid = batch.token_level_scores[batch.response_mask == 1].tolist()
    assert paid == [0, 2, 0, 0, 0, 1, 0, 2] and batch.token_level_scores.sum() == 5
    assert batch.turn_ids[batch.response_mask == 1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    whole = {"episode_return": 5.0, "__num_turns__": 4, "invalid_actions": 1, "end_reason": "terminated"}
    for name, value in (whole | {"success": None, "failure": None}).items():
        assert set(batch.non_tensor_batch[name]) == {value}, name
    assert len(set(batch.episode)) == 1 and set(batch.uid) == {"11"}


def test_ids_are_the_engines_where_encoding_their_text_gives_others():
    vocabulary = {"<end>": 0, "1": 1, "0": 2, "2": 3, "3": 4, "00": 5, "<user>": 6, "<assistant>": 7, "4": 8}
    merged = Tokenizer(models.BPE(vocabulary, [("0", "0")]))
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )
    marks = {"additional_special_tokens": ["<user>", "<assistant>"], "eos_token": "<end>", "pad_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=merged, chat_template=template, **marks)
    assert tokenizer.encode(tokenizer.decode([2, 2, 1])) != [2, 2, 1]

    class Split(Rollout):
        """Says 001 with the two zeros apart, each time."""

        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            return [Completion(one.id, [2, 2, 1, 0], [-0.5, -0.25, -2.0, -1.0], "stop", 3) for one in requests]

    config, game = counting(tokenizer=tokenizer, max_turns=6)
    engine = Split(config.actor_rollout_ref.rollout, tokenizer, None)
    batch = played(config, game, engine, [11, 12])
    for row in range(2):
        mask = batch.response_mask[row] == 1
        assert batch.responses[row][mask].tolist() == [2, 2, 1, 0] * 5
        assert batch.rollout_log_probs[row][mask].tolist() == [-0.5, -0.25, -2.0, -1.0] * 5
        assert not batch.rollout_log_probs[row][~mask].any()


def test_a_cut_answer_has_its_end_written_for_it_and_room_ends_the_episode():
    config, game = counting("actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=1")
    batch = said(config, game, "1", [11])
    assert row_text(batch, 0).startswith("<|user|>0<|end|><|assistant|>1<|end|><|user|>1<|end|><|assistant|>1<|end|>")
    assert batch.response_mask.sum() == 5 and batch.end_reason[0] == "terminated"
    # a turn is 2 tokens and what follows it 4
    of_width = {8: (8, "max_tokens"), 7: (7, "max_tokens"), 6: (2, "context_full"), 2: (2, "max_tokens")}
    for width, (tokens, reason) in of_width.items():
        batch = said(*counting(f"data.max_response_length={width}"), "1", [11])
        assert (batch.attention_mask[0, -width:].sum(), batch.end_reason[0]) == (tokens, reason), width


def test_draws_depend_on_the_row_alone_and_both_histories_pay_the_same(tiny_model: Path):
    config, game = counting("actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=3")
    engine = real_engine(tiny_model, config)
    batch = played(config, game, engine, [11, 11, 12, 13])
    assert not torch.equal(batch.responses[0], batch.responses[1]), "two samples of one start"
    loop = AgentLoop(config, TOKENIZER, engine, game)
    for row, seed in enumerate([11, 11, 12, 13]):
        alone = loop.generate_sequences(starts(game, [seed]), SAMPLED, seed=7, first_row=row)
        for name in ("input_ids", "response_mask", "turn_ids", "token_level_scores"):
            assert torch.equal(alone.batch[name][0], batch.batch[name][row]), name


def test_rewards_and_ends_are_those_of_the_environment_alone():
    config, _ = counting()
    environment = make_env("FrozenLake-v1", max_turns=9, **LAKE)
    game = game_of(config, TOKENIZER, environment)
    batch = said(config, game, "DRRDLURDDR", range(20, 28))
    for row, seed in enumerate(range(20, 28)):
        alone = environment.clone()
        alone.reset(seed)
        for part in split_turns(batch, row):
            *_, info = alone.step(TOKENIZER.decode(part).removesuffix("<|end|>"))
        assert info["return"] == batch.episode_return[row] == batch.token_level_scores[row].sum()
        turns = batch.non_tensor_batch["__num_turns__"][row]
        assert (info["end_reason"], info["turns"]) == (batch.end_reason[row], turns)


def split_turns(batch: DataProto, row: int) -> list[list[int]]:
    own = batch.response_mask[row] == 1
    turns = batch.turn_ids[row][own]
    return [batch.responses[row][own][turns == turn].tolist() for turn in turns.unique()]


@pytest.fixture
def trouble(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, str]]:
    found: dict[int, str] = {}
    monkeypatch.setattr(Counting, "trouble", found)
    episodes.stop_hanging.clear()
    yield found
    episodes.stop_hanging.set()


def test_what_raises_hangs_or_says_nonsense_is_left_out_and_the_others_are_as_without_it(trouble: dict[int, str]):
    trouble |= {102: "raises", 105: "hangs", 107: "garbage"}
    config, game = counting("env.timeout=1.0", "env.history=transcript")
    batch = said(config, game, "21", sorted([*range(100, 108)] * 2))
    assert Counter(batch.end_reason) == {"terminated": 10, "env_error": 4, "timeout": 2}
    failed = torch.tensor(batch.end_reason != "terminated")
    assert not batch.response_mask[failed].any() and not batch.token_level_scores[failed].any()
    reasons = dict(zip(batch.uid, batch.failure, strict=True))
    assert "OSError: the board fell" in reasons["102"] and "episodes.py:" in reasons["102"]
    way = "Counting-v0, after reset(seed=105) and actions [1, 1]"  # of "21" the last is read
    assert reasons["105"] == f"{way}: not done after 1 seconds (env.timeout)"
    assert "TypeError: no number: object" in reasons["107"]
    assert reasons["100"] is None
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    columns, alone = (Estimator(config.algorithm)(part) for part in (batch, batch.select_idxs(~failed)))
    assert torch.equal(columns["advantages"][~failed], alone["advantages"])


def test_one_that_raises_once_is_played_again_from_its_seed(trouble: dict[int, str], monkeypatch: pytest.MonkeyPatch):
    raised: list[int] = []

    def step(self: Counting, action: int) -> tuple:
        if self.seed == 102 and not raised:
            raised.append(self.seed)
            raise OSError("once")
        return plain_step(self, action)

    plain_step = Counting.step
    monkeypatch.setattr(Counting, "step", step)
    batch = said(*counting(), "2", [101, 102])
    assert raised and list(batch.end_reason) == ["terminated"] * 2 and list(batch.episode_return) == [6.0, 6.0]


def test_all_environments_step_at_once(monkeypatch: pytest.MonkeyPatch):
    """Each of 64 environments waits in its step for all: one after the other, they would reach their deadline."""
    config, game = counting("env.timeout=30")
    together, plain_step = Barrier(64), Counting.step

    def step(self: Counting, action: int) -> tuple:
        together.wait()
        return plain_step(self, action)

    monkeypatch.setattr(Counting, "step", step)
    batch = said(config, game, "2", range(64))
    assert set(batch.end_reason) == {"terminated"}


def test_an_engine_that_raises_ends_the_rollout_with_its_own_error():
    class Broken(Rollout):
        def generate(self, requests: Sequence[Request]) -> list[Completion]:
            raise FloatingPointError("the policy's logits are NaN")

    config, game = counting()
    engine = Broken(config.actor_rollout_ref.rollout, TOKENIZER, None)
    with pytest.raises(FloatingPointError, match="logits are NaN"):
        played(config, game, engine, [11, 12])


def test_a_prompt_beyond_the_models_positions_is_refused_and_not_taken_for_a_failure(tiny_model: Path):
    config, game = counting("data.max_response_length=4000")
    engine = real_engine(tiny_model, config)
    with pytest.raises(ValueError, match=r"max_tokens=4000 are more than 2048, the model's positions"):
        played(config, game, engine, [11])
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("cut", "reason", "how"),
    [([], "aborted", "aborted"), ([70, 71], "aborted", "aborted"), ([], "stop", "answered without a token")],
    ids=["nothing said", "cut in the middle", "a stop without a token"],
)
@pytest.mark.parametrize("aborted_turn", [0, 1])
def test_a_request_that_the_engine_does_not_answer_ends_its_episode(aborted_turn, cut, reason, how):
    """An episode without its answer teaches nothing, and its `step` does not see what was cut off."""

    class Nodding(SingleAnswer):
        async def step(self, answer: str) -> Reply:
            assert answer == "ab"
            return Reply([{"role": "user", "content": "go on"}], reward=1.0)

    async def answer(prompt_ids: list[int], most: int, turn: int) -> Completion:
        ids, end = (cut, reason) if turn == aborted_turn else (TOKENIZER.encode("ab"), "length")
        return Completion(turn, ids, [-1.0] * len(ids), end, 0)

    episode, limits = Nodding({"raw_prompt_ids": [1, 2]}), Limits(response=40, answer=2)
    [sample] = asyncio.run(episode.play(SimpleNamespace(answer=answer), ChatFormat(TOKENIZER, {}), limits))
    assert (sample.end_reason, sample.extras["__num_turns__"]) == ("aborted", aborted_turn)
    assert not any(sample.policy_mask) and not any(sample.rewards)
    assert sample.token_ids[len(sample.token_ids) - len(cut) :] == cut
    assert sample.extras["failure"] == f"the engine {how} the request of turn {aborted_turn}"


class Held(Counting):
    """An environment that only the thread that made it may use, as with sqlite and GL; `opened` has those left open."""

    opened: ClassVar[list[int]] = []

    def __init__(self) -> None:
        self.home = get_ident()
        self.opened.append(self.home)

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        assert get_ident() == self.home, "another thread"
        return super().step(action)

    def close(self) -> None:
        self.opened.remove(self.home)
        if self.home != get_ident():
            raise OSError("the door is in another thread")


gym.register("Held-v0", Held)


def held(*overrides: str) -> tuple[EnvSetup, AgentLoop]:
    Held.opened.clear()
    config = episodes_config(*overrides)
    game = game_of(config, TOKENIZER, TextEnv("Held-v0", episodes.as_text, instruction="", max_turns=8))
    engine = Scripted(config, TOKENIZER, lambda text, times: "21"[times % 2])
    return game, AgentLoop(config, TOKENIZER, engine, game)


def test_an_episode_keeps_its_thread_and_what_failed_is_closed_there(trouble: dict[int, str], caplog: Any):
    """Twelve generations of eight episodes, a quarter of which raise, leave no environment open."""
    trouble |= {102: "raises", 107: "raises"}
    game, loop = held()
    for number in range(12):
        batch = loop.generate_sequences(starts(game, [*range(100, 108)]), SAMPLED, seed=number, first_row=0)
        assert Counter(batch.end_reason)["env_error"] == 2, [*batch.failure]
        assert "another thread" not in str([*batch.failure])
        assert len(Held.opened) <= 8 + 1  # one is the game's own
    loop.close()
    assert not Held.opened and "could not be closed" not in caplog.text


def wait_for(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        sleep(0.005)
    raise AssertionError("it never held")


def test_calls_that_never_end_are_counted_said_and_bounded(
    trouble: dict[int, str], monkeypatch: pytest.MonkeyPatch, caplog: Any
):
    trouble |= {102: "hangs", 105: "hangs"}
    stuck = set()  # without those of other tests, which may hang for ever
    for module in ("workers.agent_loop", "workers.agents.user_code"):
        monkeypatch.setattr(f"{module}.stuck", stuck)
    monkeypatch.setattr("workers.agent_loop.MOST_STUCK", 3)
    game, loop = held("env.timeout=0.5")
    batch = loop.generate_sequences(starts(game, [101, 102, 105]), SAMPLED, seed=1, first_row=0)
    assert Counter(batch.end_reason) == {"terminated": 1, "timeout": 2}
    assert "calls of environments or tools that hang, each in a thread: 2." in caplog.text
    assert "env.processes=4" in caplog.text
    with pytest.raises(RuntimeError, match=r"calls .* that hang, each in a thread: 4, more than 3\. .*env.processes=4"):
        loop.generate_sequences(starts(game, [102, 105]), SAMPLED, seed=1, first_row=0)
    open_ones = len(Held.opened)
    episodes.stop_hanging.set()
    wait_for(lambda: not stuck)
    assert len(Held.opened) == open_ones - 4, "each is closed when its call is over"


@pytest.mark.parametrize("text", ["half \udc80", None, 5, [{"type": "text", "text": "a"}]])
def test_a_reply_that_cannot_be_encoded_is_its_episodes_failure(monkeypatch: pytest.MonkeyPatch, text):
    monkeypatch.setattr(CustomEnvDataset, "turn_messages", lambda self, state: [{"role": "user", "content": text}])
    batch = said(*counting(), "2", [101])
    assert batch.end_reason[0] == "env_error" and "the user says" in batch.failure[0]
    assert ("that cannot be encoded: '\\udc80' at place 5" if text == "half \udc80" else "no text") in batch.failure[0]
