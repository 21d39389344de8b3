"""Agent loops and episodes of the user's: what they return becomes rows like those of our own episodes."""

import asyncio
from contextlib import nullcontext
from pathlib import Path
from threading import Event
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from configs.import_utils import load_extern_object
from configs.schema import AgentConfig, ModelConfig
from custom.tiny_model import build_tokenizer
from data.chat import ChatFormat, encode_prompt
from data.protocol import DataProto
from data.tool_parsers import ParsedAnswer, ToolCall, ToolParser
from data.tools import function_tool
from data.types import Completion, SamplingParams
from extras.tools.shared_loop import Asked
from extras.verl.agents import _agent_loop_registry, register
from extras.verl.users_loop import AgentLoopBase, AgentLoopOutput, sample_of, sampling_of
from tests.engines import Scripted
from tests.pages import WRITTEN_FILE
from tests.runs import compose
from tests.test_chat import TEMPLATES, tokenizer_with
from training.environment import begin_episodes, load_agents
from training.metric_utils import compute_data_metrics
from training.preparation import rows_to_score
from training.reward import add_scores
from training.reward_function import FunctionReward
from workers.agent_loop import AgentLoop
from workers.agents.episode import Limits
from workers.hf_rollout import HFRollout
from workers.models import load_causal_lm
from workers.rollout import build_rollout

TOKENIZER = build_tokenizer()
SAMPLED = SamplingParams(True, 1.0, -1, 1.0, 24, stop_token_ids=tuple(range(0, 60, 3)))
WIDTH = 24
FORMS = Path(__file__).parent / "verl_forms"
MESSAGES = [{"role": "user", "content": "1+1=?"}]
TOOLS = "actor_rollout_ref.rollout.multi_turn"


@pytest.fixture(autouse=True)
def _no_names_left():
    before = dict(_agent_loop_registry)
    yield
    _agent_loop_registry.clear()
    _agent_loop_registry.update(before)


def settings(*overrides: str) -> Any:
    rows = ["env.id=null", "data.train_files=x.jsonl", "data.max_prompt_length=32", f"data.max_response_length={WIDTH}"]
    return compose(*rows, *overrides)


def prompts(agent: str, count: int = 1, **columns: Any) -> DataProto:
    rows = {"raw_prompt": [MESSAGES] * count, "raw_prompt_ids": [encode_prompt(MESSAGES, TOKENIZER)] * count}
    rows |= {"data_source": ["sums"] * count, "extra_info": [{"index": place} for place in range(count)]}
    return begin_episodes(DataProto.from_single_dict(rows | columns), agent)


def played(
    agent: str, count: int = 1, config: Any = None, engine: type[Scripted] = Scripted, **columns: Any
) -> DataProto:
    config = config or settings()
    loop = AgentLoop(config, TOKENIZER, engine(config, TOKENIZER, lambda text, times: "12"), None)
    return loop.generate_sequences(prompts(agent, count, **columns), SAMPLED, seed=7, first_row=0)


def output(prompt: list[int], ids: list[int], mask: list[int] | None = None, **fields: Any) -> AgentLoopOutput:
    return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=mask or [1] * len(ids), **fields)


class Looker(load_extern_object(str(FORMS / "38_agent_loop_two_turns.py"), "Looker")):
    """The form's, which answers, is told how long the answer was, and answers again."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        result = await super().run(sampling_params, **kwargs)
        if len(result.response_ids) % 2:
            result.response_logprobs = None  # then they are found
        return result


@function_tool
def look(text: str) -> str:
    """Counts the characters of a text."""
    return f"you said {len(text)} characters"


@ToolParser.register("always")
class Always(ToolParser):
    def parse(self, text: str, schemas: Any) -> ParsedAnswer:
        text = TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True)
        return ParsedAnswer(text, [ToolCall("look", {"text": text})], [])

    def write(self, call: ToolCall) -> str:
        return call.arguments["text"]


def test_a_loop_with_a_tool_and_two_turns_makes_the_rows_of_our_own_episode(tiny_model: Path, monkeypatch):
    """Equal draws of a real engine, by the numbers of turns: ids, masks, log-probs, turns and end reasons are equal."""
    monkeypatch.setattr(Asked, "number", lambda self, prompt: self.update(requests=1) or self["requests"] - 1)
    register("looker")(Looker)
    more = (f"{TOOLS}.function_tool_path={__file__}", f"{TOOLS}.format=always", f"{TOOLS}.max_assistant_turns=2")
    config = settings(f"{TOOLS}.enable=true", "data.max_response_length=64", *more)
    module = load_causal_lm(ModelConfig(path=str(tiny_model)), torch.device("cpu"), torch.float32, longest=500)
    engine = build_rollout(
        HFRollout, config.actor_rollout_ref.rollout, AutoTokenizer.from_pretrained(tiny_model), module
    )
    loop = AgentLoop(config, TOKENIZER, engine, None)
    ours, theirs = (  # each row alone: what shares a forward pass with it changes last digits
        DataProto.concat([loop.generate_sequences(prompts(agent), SAMPLED, seed=3, first_row=row) for row in range(6)])
        for agent in ("tool_agent", "looker")
    )
    for name in ("input_ids", "attention_mask", "response_mask", "rollout_log_probs", "turn_ids", "weight_versions"):
        assert torch.equal(ours.batch[name], theirs.batch[name]), name
    assert (ours.turn_ids.max(1).values == 1).sum() >= 3 and (ours.response_mask.sum(1) > 2).any()
    assert set(theirs.failure) == {None} and set(theirs.non_tensor_batch["__num_turns__"]) == {4}


def test_messages_behind_an_answer_are_those_of_our_own_episodes():
    """verl's arithmetic lost headers (Phi 3), left `<s>` within rows (Mistral) and lost the \\n behind `<|im_end|>`."""
    tokenizer, again = tokenizer_with(*TEMPLATES["ChatML, as Qwen and SmolLM2"]), [{"role": "user", "content": "b"}]

    async def told() -> list[list[int]]:
        loop = AgentLoopBase(settings(), SimpleNamespace(answers={}), tokenizer)
        return [
            await loop.after_answer(again, stopped=False),
            await loop.apply_chat_template(again, remove_system_prompt=True),
        ]

    assert asyncio.run(told()) == [ChatFormat(tokenizer, {}).increment(again, stopped) for stopped in (False, True)]


@pytest.mark.parametrize("limit", [16, 2], ids=["an answer that stops", "one that is cut"])
def test_the_loop_of_the_page_makes_the_tokens_of_the_whole_conversation(tmp_path: Path, limit: int):
    page = (Path(__file__).parents[3] / "docs/multiturn.md").read_text()
    (tmp_path / "my_loop.py").write_text(dict(WRITTEN_FILE.findall(page))["my_loop.py"])
    tokenizer = tokenizer_with(*TEMPLATES["ChatML, as Qwen and SmolLM2"])
    tokenizer.pad_token = "<s>"
    more = (f"{TOOLS}.max_tokens_per_turn={limit}", "data.max_prompt_length=128", "data.max_response_length=128")
    config = settings(f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/my_loop.py:TwiceAsked", *more)
    loop = AgentLoop(config, tokenizer, Scripted(config, tokenizer, lambda text, times: "four"), None)
    batch = begin_episodes(
        DataProto.from_single_dict(
            {"raw_prompt": [MESSAGES], "raw_prompt_ids": [encode_prompt(MESSAGES, tokenizer)], "uid": ["a"]}
        ),
        f"{tmp_path}/my_loop.py:TwiceAsked",
    )
    batch = loop.generate_sequences(batch, SAMPLED, seed=7, first_row=0)
    answer = {"role": "assistant", "content": "four"[:limit]}
    whole = encode_prompt([*MESSAGES, answer, {"role": "user", "content": "Sure?"}], tokenizer)
    row = batch.input_ids[0][batch.attention_mask[0].bool()].tolist()
    assert row[: len(whole)] == whole and set(batch.failure) == {None}
    assert "".join(tokenizer.convert_ids_to_tokens(row[len(whole) :])) == ("four<|im_end|>" if limit > 4 else "fo")


class Seeded(Scripted):
    """Draws an answer by the seed alone."""

    def generate(self, requests: list[Any]) -> list[Completion]:
        completions = []
        for request in requests:
            self.answer = lambda text, times, seed=request.seed: str(seed % 1000)
            completions.append(self.completion(request))
        return completions


def test_what_is_asked_at_once_is_drawn_by_what_is_asked():
    """Two loops ask two prompts, one of them twice, in another order; each row has draws of its own."""

    def rows_of(order: list[str]) -> list[Any]:
        @register(f"asks {order}")
        class Asking(AgentLoopBase):
            async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
                asked = [(text, TOKENIZER.encode(text)) for text in order]
                done = await asyncio.gather(*(self.server_manager.generate("", prompt_ids=ids) for _, ids in asked))
                return [output(ids, list(said)) for said, (_, ids) in zip(done, asked, strict=True)]

        batch = played(f"asks {order}", 2, engine=Seeded)
        assert set(batch.failure) == {None}
        rows = [tuple(ids) for ids in batch.input_ids.tolist()]
        assert len(set(rows)) == 6
        return [sorted(rows[:3]), sorted(rows[3:])]

    assert rows_of(["x", "y", "x"]) == rows_of(["y", "x", "x"])


def test_what_a_loop_says_of_its_row_becomes_columns_scores_and_metrics():
    """Rows with a reward_score keep it; the others are scored as any."""

    @register("telling")
    class Telling(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            place = kwargs["extra_info"]["index"]
            done = await self.server_manager.generate(place, prompt_ids=kwargs["raw_prompt_ids"])
            extra = {"uid": sorted(kwargs)[:2]} | ({"reward_extra_info": {"acc": 1}} if place else {})
            return output(
                kwargs["raw_prompt_ids"], done.token_ids, reward_score=0.5 if place else None, num_turns=2,
                metrics={"generate_sequences": place + 1.0}, extra_fields=extra,
            )  # fmt: skip

    batch = played("telling", count=3, uid=["a", "b", "c"])
    scored = []
    reward = FunctionReward(lambda data_source, solution_str, ground_truth: scored.append(solution_str) or 2.0)
    batch = add_scores(batch, reward, TOKENIZER)
    assert batch.batch["token_level_scores"].sum(1).tolist() == [2.0, 0.5, 0.5] and scored == ["12"]
    assert (batch.batch["token_level_scores"] != 0).nonzero()[:, 1].tolist() == [2, 2, 2]
    assert batch.non_tensor_batch["acc"].tolist() == [None, 1, 1] and batch.meta_info["reward_extra_keys"] == ["acc"]
    assert batch.extra_uid.tolist() == [["data_source", "extra_info"]] * 3 and set(batch.end_reason) == {"terminated"}
    for name in ("token_level_rewards", "advantages", "returns"):
        batch.batch[name] = batch.batch["token_level_scores"]
    metrics = compute_data_metrics(batch, use_critic=False)
    assert (metrics["agent_loop/generate_sequences/mean"], metrics["num_turns/mean"]) == (2.0, 2.0)


def test_a_loop_of_a_yaml_gets_its_settings_and_verls_arguments(tmp_path: Path):
    (tmp_path / "my_loops.py").write_text(
        "from extras.verl.users_loop import AgentLoopBase, AgentLoopOutput\n"
        "class Old(AgentLoopBase):\n"  # of verl 0.5
        "    ready = 0\n"
        "    def __init__(self, config, server_manager, tokenizer):\n"
        "        super().__init__(config, server_manager, tokenizer)\n"
        "    @classmethod\n"
        "    def init_class(cls, config, tokenizer, **kwargs): cls.ready += not cls._class_initialized\n"
        "    async def run(self, messages, sampling_params):\n"
        "        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)\n"
        "        answer = await self.server_manager.generate('1', prompt_ids=ids, sampling_params=sampling_params)\n"
        "        return AgentLoopOutput(prompt_ids=ids, response_ids=answer[:2], response_mask=[1] * 2, metrics={})\n"
        "class New(Old):\n"
        "    def __init__(self, trainer_config, server_manager, tokenizer, processor, tries=1, **kwargs):\n"
        "        super().__init__(trainer_config.config, server_manager, tokenizer)\n"
        "        self.tries = tries\n"
        "    async def run(self, sampling_params, **kwargs):\n"
        "        found = await super().run(kwargs['raw_prompt'], {**sampling_params, 'max_tokens': self.tries})\n"
        "        found.response_mask, found.extra_fields = [1] * len(found.response_ids), {'tries': self.tries}\n"
        "        return found\n"
        "def load(): return {'loaded': Old}\n"
    )
    listed = "[{name: old, _target_: my_loops.Old}, {name: new, _target_: my_loops.New, tries: 1}]"
    (tmp_path / "loops.yaml").write_text(listed)
    config = settings(f"actor_rollout_ref.rollout.agent.agent_loop_config_path={tmp_path}/loops.yaml")
    register("old")(Looker)  # the yaml's goes first
    batch = played("old", config=config, count=2)
    assert TOKENIZER.decode(batch.responses[0, :2]) == "12" and batch.response_mask.sum() == 4
    batch = played("new", config=config)
    assert TOKENIZER.decode(batch.responses[0, :1]) == "1" and batch.response_mask.sum() == 1
    assert batch.tries.tolist() == [1] and batch.end_reason[0] == "answer_cut"  # of 24
    agents = load_agents(config.actor_rollout_ref.rollout.agent)
    assert agents["old"].cls.ready == 1 and [*agents][-2:] == ["old", "new"]
    config = settings(f"actor_rollout_ref.rollout.agent.custom_agent_loop_loader={tmp_path}/my_loops.py:load")
    assert TOKENIZER.decode(played("loaded", config=config).responses[0, :2]) == "12"


def test_rows_of_loops_may_bring_their_scores_and_need_no_reward():
    register("looker")(Looker)
    rows = {0: {}, 1: {"agent_name": "looker"}, 2: {"agent_name": "tool_agent"}, 3: {"agent_name": "single_turn_agent"}}
    assert [*rows_to_score(AgentConfig(default_agent_loop="looker"), rows)] == [2, 3]
    assert [*rows_to_score(AgentConfig(), rows)] == [0, 2, 3]
    assert [*rows_to_score(AgentConfig(default_agent_loop="workers.agents.episode.SingleAnswer"), rows)] == [0, 2, 3]


@pytest.mark.parametrize("blocks", [False, True])
def test_failures_of_a_loop_are_those_of_any_episode(blocks):
    """Raising, hanging and wrong results end the episode, counted; time in which the policy answers does not count."""

    @register("failing")
    class Failing(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            prompt, kind = kwargs["raw_prompt_ids"], kwargs["kind"]
            if kind == "waits":
                for _ in range(3):
                    await asyncio.sleep(0.15)
                    await self.server_manager.generate("a", prompt_ids=prompt)
            if kind == "hangs":
                await asyncio.sleep(60)
            if kind == "stop":
                await self.server_manager.generate("a", prompt_ids=prompt, sampling_params={"stop": ["x"]})
            done = await self.server_manager.generate("a", prompt_ids=prompt)
            if kind == "forged":
                return output(prompt, [*done, 7])
            return done if kind == "raw" else output(prompt, list(done), [1, 1] if kind == "ragged" else None)

    Failing.blocks = blocks
    kinds = ["fine", "waits", "hangs", "stop", "forged", "raw", "ragged"]
    config = settings("actor_rollout_ref.rollout.multi_turn.tool_timeout=0.3")
    batch = played("failing", count=len(kinds), config=config, kind=kinds)
    found = dict(zip(kinds, batch.end_reason, strict=True))
    assert found == dict.fromkeys(kinds, "env_error") | {
        "fine": "terminated",
        "waits": "terminated",
        "hangs": "timeout",
    }
    said = dict(zip(kinds, batch.failure, strict=True))
    for kind, words in {
        "stop": "stop=['x'], which the engines do not know", "forged": "of 1 tokens", "raw": "must return an Agent",
        "ragged": "3 response_ids, 2 in response_mask",
    }.items():  # fmt: skip
        assert words in said[kind], said[kind]
    assert batch.response_mask.sum(1).tolist() == [3, 3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("hold", ["hold(0.3)", "asyncio.gather(hold(0.15), hold(0.15))"])
def test_a_loop_that_holds_all_up_takes_no_time_from_the_others_and_is_named_once(tmp_path, hold, monkeypatch, capsys):
    """Nine of thirteen, with a second each, hold all up for 2.7 s; two, one of which does so too, take too long."""
    monkeypatch.setattr("extras.tools.shared_loop.LATE", 0.05)
    (tmp_path / "mine.py").write_text(f"""
import asyncio, time
from extras.verl.users_loop import AgentLoopBase, AgentLoopOutput
async def hold(seconds): time.sleep(seconds)
class Mine(AgentLoopBase):
    async def run(self, sampling_params, raw_prompt_ids, kind, **row):
        done = await self.server_manager.generate("a", prompt_ids=raw_prompt_ids)
        if kind == "holds":
            await {hold}
        await hold(2.6 * (kind == "is late"))
        await asyncio.sleep({{"waits": 0.5, "hangs": 60}}.get(kind, 0))
        return AgentLoopOutput(prompt_ids=raw_prompt_ids, response_ids=done, response_mask=[1] * len(done))
""")
    kinds = ["hangs", "is late", "waits", *["holds"] * 9, "waits"]
    agent = f"{tmp_path}/mine.py:Mine"
    config = settings(f"{TOOLS}.tool_timeout=1", f"actor_rollout_ref.rollout.agent.default_agent_loop={agent}")
    batch = played(agent, count=13, config=config, kind=kinds)
    assert batch.end_reason.tolist() == ["timeout"] * 2 + ["terminated"] * 11, batch.failure
    assert capsys.readouterr().err.count(f"mine.py:Mine computes or waits without await (at {tmp_path}/mine.py:4)") == 1


def test_an_episode_by_path_is_played_by_the_loop(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from data.types import Reply\n"
        "from workers.agents.episode import Episode\n"
        "class Echo(Episode):\n"
        "    async def start(self): self.columns = {'heard': []}\n"
        "    async def step(self, answer):\n"
        "        heard = self.columns['heard'] + [answer]\n"
        "        self.columns = {'heard': heard}\n"
        "        end = 'terminated' if len(heard) == 2 else None\n"
        "        said = [{'role': 'user', 'content': answer * 2}]\n"
        "        return Reply(said, end_reason=end, columns=self.columns)\n"
    )
    agent = f"{tmp_path}/mine.py:Echo"
    config = settings(f"actor_rollout_ref.rollout.agent.default_agent_loop={agent}")
    batch = played(agent, config=config)
    assert batch.heard.tolist() == [["12", "12"]] and batch.end_reason[0] == "terminated"
    told = TOKENIZER.decode(batch.responses[0][batch.attention_mask[0, -WIDTH:] == 1])
    assert told == "12<|end|><|user|>1212<|end|><|assistant|>12<|end|>"


NO_AGENTS = [
    ("default_agent_loop", "who", "the agents are single_turn_agent, tool_agent"),
    ("default_agent_loop", "nowhere.Loop", "nowhere"),
    ("default_agent_loop", "data.chat.ChatFormat", "which plays no episodes"),
    ("agent_loop_config_path", "missing.yaml", "cannot be read"),
]


@pytest.mark.parametrize(("key", "value", "words"), NO_AGENTS)
def test_an_agent_that_is_none_is_refused_by_name(key, value, words):
    with pytest.raises(ValueError, match=words):
        load_agents(AgentConfig(**{key: value}))


def test_rows_of_what_was_sampled_are_found_wherever_they_stand():
    """Log-probs come from the answer that a loop took of two to a prompt; one that was cut keeps its beginning."""
    stranger = Completion(9, [5, 8, 4, 6, 6], [-9.0] * 5, "stop", 9)  # what it answers does not stand there
    answers = [([7, 2], stranger), ([1, 2, 5], Completion(8, [9], [-9.0], "stop", 9)),
               ([1, 2], Completion(0, [5, 6, 7], [-0.5, -0.25, -1.0], "stop", 3)),
               ([1, 2], Completion(1, [5, 8, 9], [-0.5, -0.75, -2.0], "length", [3, 4, 4])),
               ([1, 2, 5, 8, 4], Completion(2, [6, 6], [-3.0, -4.0], "length", 4))]  # fmt: skip
    sample, reason = sample_of(output([1, 2], [5, 8, 4, 6, 6], [1, 1, 0, 1, 1]), answers, Limits(5, 5), 2)
    assert sample.log_probs == [-0.5, -0.75, 0.0, -3.0, -4.0] and sample.weight_versions == [3, 4, 0, 4, 4]
    assert (sample.turns, reason) == ([0, 0, 0, 1, 1], "max_tokens")
    sample, reason = sample_of(output([1, 2], [5, 8, 4, 6, 6], [1, 1, 0, 1, 1]), answers, Limits(3, 5), 2)
    assert (sample.token_ids, reason) == ([5, 8, 4], "max_tokens")
    given = output([1, 2], [5, 0], response_logprobs=[-1.0, -2.0])
    assert sample_of(given, answers, Limits(5, 5), 2)[0].log_probs == [-1.0, -2.0]
    with pytest.raises(ValueError, match=r"max_prompt_length is 1"):
        sample_of(given, answers, Limits(5, 5), 1)


@pytest.mark.parametrize(("told", "words"), [
    ([-0.5, -0.2504], None), ([-0.5, -0.26], "are not the engine's"), ([-0.5, float("nan")], "are not the engine's"),
    ([-0.5, -0.25, -3.0], "of 1 tokens that the policy did not sample"),
])  # fmt: skip
def test_log_probs_that_are_not_trusted_must_be_those_of_what_the_engine_drew(told, words):
    answers = [([1, 2], Completion(0, [5, 6], [-0.5, -0.25], "stop", 3))]
    returned = output([1, 2], [5, 6, 9][: len(told)], response_logprobs=told)
    assert sample_of(returned, answers, Limits(5, 5), 2)[0].log_probs == pytest.approx(told, nan_ok=True)
    with pytest.raises(ValueError, match=words) if words else nullcontext():
        assert sample_of(returned, answers, Limits(5, 5), 2, trusted=False)[0].log_probs == [-0.5, -0.25]


def test_settings_of_a_request_are_those_of_the_run_but_for_what_is_asked():
    assert sampling_of({"temperature": 1.0, "logprobs": True, "n": 1, "max_new_tokens": 3}, SAMPLED).max_tokens == 3
    greedy = SamplingParams(False, 1.0, -1, 1.0, 8)
    assert not sampling_of({"temperature": 0.0}, greedy).do_sample and not sampling_of({}, greedy).do_sample
    assert sampling_of({"temperature": 0.7, "stop_token_ids": [2]}, greedy).stop_token_ids == (2,)


def test_a_request_that_a_loop_cancels_at_its_end_does_not_stay_in_the_engine():
    """The request is cancelled while the engine is busy with a step, and nobody asks the engine for another."""
    stepping, over = Event(), Event()

    class OneOfTwo(Scripted):
        def generate(self, requests: Any) -> list[Completion]:
            self.running |= {request.id: request for request in requests}
            if len(self.running) > 1:  # both are there: the first is answered
                return [self.completion(self.running.pop(min(self.running)))]
            if not self.requests:
                return []
            stepping.set()
            assert over.wait(60)
            sleep(0.1)  # until the rollout is over, but for this step
            return []

    @register("two at once")
    class TwoAtOnce(AgentLoopBase):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
            prompt = kwargs["raw_prompt_ids"]
            asked = [asyncio.create_task(self.server_manager.generate("a", prompt_ids=prompt)) for _ in range(2)]
            done = await asked[0]
            await asyncio.to_thread(stepping.wait)
            asked[1].cancel()
            return output(prompt, list(done))

    config = settings()
    engine = OneOfTwo(config, TOKENIZER, lambda text, times: "12")
    loop = AgentLoop(config, TOKENIZER, engine, None)
    play_row = loop.play_row

    async def play(*row: Any) -> list[Any]:
        samples = await play_row(*row)
        over.set()
        return samples

    loop.play_row = play
    batch = loop.generate_sequences(prompts("two at once"), SAMPLED, seed=7, first_row=0)
    assert batch.end_reason.tolist() == ["terminated"] and len(engine.requests) == 1
    assert not engine.has_unfinished_requests()
