"""Weights change under requests in flight, and each token is that of the weights it is marked with; runs that generate
ahead keep their bound, their prompts and their record."""

import asyncio
import copy
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedModel

from configs.errors import ConfigError, WorkerError
from configs.schema import ModelConfig, RolloutConfig
from data.files import read_metrics
from data.types import Completion, Request, SamplingParams
from extras.overlap.fully_async import AsyncRollout, FirstCome, Strict
from extras.overlap.generator import Generator, ReloadingEngine
from extras.overlap.record import GROUPS, Record, last_step
from extras.overlap.tests.test_overlap import ALGORITHMS, APART, assert_same_weights, trained
from tests.runs import compose, files_of_at_most, needs_vllm
from training.checkpoint import LATEST
from training.ray_trainer import RayPPOTrainer
from training.roles import ROLES
from workers.deadlines import Beat, Wait
from workers.engine_pump import EngineError
from workers.models import load_causal_lm
from workers.rollout import Rollout, build_rollout, load_rollout_class

TOKENS = 24
SOON = 0.05  # seconds
AHEAD = (*APART, "trainer.async_mode=fully_async", "algorithm.rollout_correction.rollout_is=token")
FOUR_STEPS = ("data.max_response_length=20", "trainer.total_training_steps=4", "trainer.max_staleness=2")
FIRST = "trainer.batch_order=first_come"
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [5, 6, 7]]


def other_weights(model: PreTrainedModel) -> PreTrainedModel:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for weight in changed.parameters():
            weight.add_(0.1 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
    return changed


def log_probs(model: PreTrainedModel, prompt: list[int], answer: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(answer)), answer]


def answers(pump: ReloadingEngine, at: int, load: Callable[[], None]) -> list[Completion]:
    """Answers PROMPTS, and has the weights change once the engine has made so many steps."""
    sampling = SamplingParams(True, 1.0, -1, 1.0, TOKENS)

    async def run() -> list[Completion]:
        async def reload() -> None:
            while pump.steps < at:
                await asyncio.sleep(0)
            await pump.reload(1, load, Future())

        requests = [Request(row, ids, sampling, row) for row, ids in enumerate(PROMPTS)]
        return (await asyncio.gather(*(pump.answer_once(each, f"row {each.id}") for each in requests), reload()))[:-1]

    drawn = asyncio.run(run())
    assert not pump.between_turns, "no step has waited for a turn that never comes"
    return drawn


@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=[needs_vllm, pytest.mark.slow])])
def test_every_token_is_of_the_weights_that_it_is_marked_with(wide_headed_model: Path, tmp_path: Path, name: str):
    first = load_causal_lm(ModelConfig(path=str(wide_headed_model))).eval()
    second = other_weights(first)
    settings = RolloutConfig(name=name, prompt_length=8, response_length=TOKENS)
    kind, tokenizer = load_rollout_class(name), AutoTokenizer.from_pretrained(wide_headed_model)
    engine: Rollout = build_rollout(kind, settings, tokenizer, load_causal_lm(ModelConfig(path=str(wide_headed_model))))
    engine.load_weights(first.state_dict().items(), 0)

    def load() -> None:
        engine.module.load_state_dict(second.state_dict())
        engine.load_weights(second.state_dict().items(), 1)

    record = Record(tmp_path / "record", 0, last_step)
    drawn = answers(ReloadingEngine(engine, nullcontext, ThreadPoolExecutor(1), record=record), 9, load)
    for prompt, answer in zip(PROMPTS, drawn, strict=True):
        versions = torch.tensor(answer.weight_version)
        assert versions.tolist() == sorted(versions.tolist()) and len(versions) == len(answer.token_ids)
        scored = [log_probs(model, prompt, answer.token_ids) for model in (first, second)]
        expected = torch.where(versions == 0, *scored)
        assert (torch.tensor(answer.log_probs) - expected).abs().max() < 1e-4
    mixed = [answer for answer in drawn if len({*answer.weight_version}) == 2]
    assert mixed and max((scored[0] - scored[1]).abs()) > 0.05, "the weights differ, and changed in an answer"

    files = {"record": Record(tmp_path / "again", 0, last_step), "plan": read_metrics(tmp_path / "record")}
    engine.module.load_state_dict(first.state_dict())
    engine.load_weights(first.state_dict().items(), 0)
    again = answers(ReloadingEngine(engine, nullcontext, ThreadPoolExecutor(1), **files), 0, load)
    assert again == drawn
    assert (tmp_path / "again").read_text() == (tmp_path / "record").read_text()


@pytest.fixture
def make_pump(tiny_model: Path) -> Callable[..., ReloadingEngine]:
    """make_pump(record=…, plan=…) serves the tiny model."""
    model = load_causal_lm(ModelConfig(path=str(tiny_model)))
    settings = RolloutConfig(name="hf", prompt_length=8, response_length=TOKENS)
    engine = build_rollout(load_rollout_class("hf"), settings, AutoTokenizer.from_pretrained(tiny_model), model)
    return partial(ReloadingEngine, engine, nullcontext, ThreadPoolExecutor(1))


def cut() -> None:
    raise RuntimeError("the wire is cut")


IDLE = [{"step": 3, "joining": [0], "ended": [], "weights": []}]  # the engine never makes three steps


@pytest.mark.parametrize(
    ("loads", "plan", "message"),
    [
        ([cut], [], "the wire is cut"),
        ([cut, Mock()], [], "the wire is cut"),  # the second waits in the same step
        ([Mock()], IDLE, "trainer.replay: the engine has nothing to do after step 0"),
    ],
    ids=["a load fails", "another waits", "an idle engine"],
)
def test_what_ends_the_engines_step_is_told_to_clients_and_ends_every_change_of_weights(
    make_pump, loads, plan, message
):
    pump, asked = make_pump(plan=plan), [Future() for _ in loads]

    async def run() -> None:
        for version, (load, done) in enumerate(zip(loads, asked, strict=True), start=1):
            await pump.reload(version, load, done)
        with pytest.raises(EngineError, match=message):
            await pump.complete([5, 6], SamplingParams(True, 1.0, -1, 1.0, TOKENS), 0, "row", False)

    asyncio.run(run())
    failures = [str(done.exception(timeout=0)) for done in asked]
    assert failures[0] == "the wire is cut" or plan
    assert all("before it took the weights of step" in text for text in failures[not plan :])


def test_weights_that_come_in_the_moment_in_which_the_engine_falls_idle_are_taken(make_pump):
    pump, late = make_pump(), Future()
    has_work = pump._has_work

    def last_look() -> bool:
        """Weights come after it: who brings them finds that the engine still serves, and does not wake it."""
        if not (answer := has_work()) and not pump.reloads and not late.done():
            pump.reloads.append((2, lambda: "second", late))
        return answer

    async def run() -> None:
        pump._has_work = last_look
        await pump.reload(1, lambda: "first", Future())
        async with asyncio.timeout(5):
            await asyncio.wrap_future(late)

    asyncio.run(run())
    assert late.result() == "second"


def test_a_replay_whose_weights_need_answers_that_wait_for_them_ends(make_pump, monkeypatch):
    generator, plan = Generator(Mock()), [{"step": 0, "joining": [], "ended": [], "weights": [2]}]
    generator.pump = pump = make_pump(plan=plan)
    parts = [5, 6], SamplingParams(True, 1.0, -1, 1.0, TOKENS), 0, "77-0", False
    generator.calls = {4: (asyncio.run_coroutine_threadsafe(pump.complete(*parts), generator.loop), "77-")}
    generator.calls |= {5: (Future(), "78-")}
    while not pump.awaited:
        time.sleep(SOON)
    assert generator.take([4], 3) == {}  # step 2 is learnt without them
    assert generator.take([5], 2) == {}  # its episode asks for nothing: a slow environment may have the last word
    with pytest.raises(EngineError, match="weights 2 come after answers that wait for them"):
        generator.take([4, 5], 2)
    monkeypatch.setattr("extras.overlap.generator.time", clock := Mock())
    assert generator.expects(2) and not clock.sleep.called, "who may come does not wait"
    assert not generator.expects(3) and clock.sleep.called, "who may not come waits before it asks again"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 4)), min_size=1, max_size=6))
def test_the_record_of_a_run_has_each_step_once_whatever_lives_it_has_had(lives):
    """Each life goes on after a step, or after the last that was learnt if that is sooner, and learns some more."""
    with TemporaryDirectory() as folder:
        path, done = Path(folder) / "engine_steps_0.jsonl", 0
        for start, number in lives:
            start = min(start, done)
            record, done = Record(path, start, last_step), start + number
            for step in range(start + 1, done + 1):
                record.write({"step": 9 * step, "weights": []})
                record.write({"step": 9 * step + 1, "weights": [step]})
        entries = read_metrics(path)
        assert [step for entry in entries for step in entry["weights"]] == [*range(1, done + 1)]
        begun = [entry["resumed_at"] for entry in entries]
        assert begun == sorted(begun)


def test_a_full_disk_ends_the_record_and_not_the_run_and_what_is_left_is_not_played(tmp_path, caplog):
    record = Record(tmp_path / GROUPS, 0, last_step)
    with files_of_at_most(70):
        for step in (1, 2, 3):
            record.write({"step": step, "groups": ["1-0"]})
    record.write({"step": 4, "groups": ["1-0"]})
    assert [path.name for path in tmp_path.iterdir()] == [f"{GROUPS}.incomplete"]
    assert caplog.text.count("cannot be played again") == 1
    assert [entry["step"] for entry in read_metrics(tmp_path / f"{GROUPS}.incomplete")] == [1]


LINE = '{"resumed_at": 0, "step": 0, "joining": [], "ended": [], "weights": [1]}\n'


@pytest.mark.parametrize(
    ("files", "more", "message"),
    [
        ({}, [], "engine_steps_0.jsonl is absent, empty or torn"),
        ({"engine_steps_0.jsonl": ""}, [], "engine_steps_0.jsonl is absent, empty or torn"),
        ({"engine_steps_0.jsonl": LINE + LINE[:20]}, [], "engine_steps_0.jsonl is absent, empty or torn"),
        ({"engine_steps_0.jsonl": LINE + LINE[:-1]}, [], "engine_steps_0.jsonl is absent, empty or torn"),
        ({"engine_steps_0.jsonl.incomplete": LINE}, [], "engine_steps_0.jsonl is absent, empty or torn"),
        ({f"engine_steps_{rank}.jsonl": LINE for rank in (0, 1)}, [], "has engine_steps_1.jsonl"),
        ({"engine_steps_0.jsonl": LINE}, ["actor_rollout_ref.rollout.n_workers_per_node=2"], "engine_steps_1.jsonl is"),
        ({"engine_steps_0.jsonl": LINE}, [FIRST], "groups.jsonl is absent"),
        ({"engine_steps_0.jsonl": LINE, GROUPS: '{"step": 1}\n'}, [], "has groups.jsonl"),
        ({"engine_steps_0.jsonl": LINE}, ["trainer.default_local_dir={folder}/../run"], "is this run's folder"),
        ({"engine_steps_0.jsonl": LINE, GROUPS: ""}, [], None),
    ],
)
def test_a_record_by_which_a_run_cannot_go_is_refused_before_anything_is_opened(tmp_path, files, more, message):
    folder = tmp_path / "run"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    settings = [*AHEAD, f"trainer.replay={folder}", *(text.format(folder=folder) for text in more)]
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        compose(*settings)
    assert {path.name: path.read_text() for path in folder.iterdir()} == files


@pytest.mark.parametrize("more", [[], ALGORITHMS["process rewards"]], ids=str)
def test_without_staleness_a_run_is_the_synchronous_one(cluster, tiny_model, tmp_path, more):
    together = trained(tmp_path / "together", tiny_model, "trainer.executor=ray", "trainer.n_threads=1", *more)
    settings = [*APART, "trainer.async_mode=fully_async", "trainer.max_staleness=0"]
    ahead = trained(tmp_path / "ahead", tiny_model, *settings, *more)
    ahead = {step: {name: ahead[step][name] for name in ahead[step] if "staleness" not in name} for step in ahead}
    assert ahead == together
    assert_same_weights(tmp_path / "together", tmp_path / "ahead")


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """Positions of the rows that each step of a run has learnt from."""
    rows: dict[int, list[int]] = {}

    def after_step(self, batch):
        rows[self.global_step] = batch.dataset_position.tolist()
        return original(self, batch)

    original = RayPPOTrainer.after_step
    monkeypatch.setattr(RayPPOTrainer, "after_step", after_step)
    return rows


@pytest.mark.parametrize(("steps", "bounds"), [(5, [1, 3]), pytest.param(12, [0, 8, 3], marks=pytest.mark.slow)])
def test_each_step_learns_the_prompts_of_the_synchronous_run_from_tokens_within_the_bound(
    cluster, tiny_model, tmp_path, monkeypatch, learnt, steps, bounds
):
    more = ["data.max_response_length=20", f"trainer.total_training_steps={steps}"]
    together = trained(tmp_path / "together", tiny_model, "trainer.n_threads=1", *more)
    expected, draw = dict(learnt), Strict.next_rows
    monkeypatch.setattr(Strict, "next_rows", lambda self, step: time.sleep(SOON) or draw(self, step))  # all are drawn
    for staleness in bounds:
        learnt.clear()
        settings = [*AHEAD, *more, f"trainer.max_staleness={staleness}"]
        metrics = trained(tmp_path / f"ahead {staleness}", tiny_model, *settings, "trainer.save_freq=2")
        assert learnt == expected
        epochs = [[run[step]["training/epoch"] for step in expected] for run in (metrics, together)]
        assert epochs[0] == epochs[1] and len({*epochs[0]}) > 1
        oldest = max(metrics[step]["staleness/max"] for step in range(1, steps + 1))
        assert oldest <= staleness and (oldest > 0) == (staleness > 0)

    start = f"trainer.resume_from_path={tmp_path}/ahead 3/global_step_2"
    learnt.clear()
    trained(tmp_path / "resumed", tiny_model, *settings, "trainer.resume_mode=resume_path", start)
    assert learnt == {step: expected[step] for step in range(3, steps + 1)}

    replay = f"trainer.replay={tmp_path}/ahead 3"
    again = trained(tmp_path / "again", tiny_model, *settings, "trainer.save_freq=2", replay)
    assert again == metrics
    assert_same_weights(tmp_path / "ahead 3", tmp_path / "again", steps)


def test_groups_that_are_finished_first_are_learnt_once_and_again_in_that_order(cluster, tiny_model, tmp_path, learnt):
    settings = [*AHEAD, *FOUR_STEPS, FIRST, "trainer.save_freq=2"]
    metrics = trained(tmp_path / "first", tiny_model, *settings)
    groups = [entry["groups"] for entry in read_metrics(tmp_path / "first" / GROUPS)]
    assert [*map(len, groups)] == [4] * 4
    assert [metrics[step]["training/epoch"] for step in (1, 2, 3, 4)] == [0, 0, 1, 1], "of 10 rows, 4 a step"
    assert {name for names in groups for name in names} == {f"{n}-{i}" for n in (1, 2, 3, 4) for i in range(4)}
    rows = dict(learnt)
    again = trained(tmp_path / "again", tiny_model, *settings, f"trainer.replay={tmp_path}/first")
    assert again == metrics and learnt == rows
    assert_same_weights(tmp_path / "first", tmp_path / "again", step=4)


def test_a_step_learnt_before_its_turn_is_not_drawn_again(cluster, tiny_model, tmp_path, monkeypatch, learnt):
    """Late groups are finished first: after step 2, all of 3-… are learnt, some of 2-… and 4-…, and none of 1-…"""
    monkeypatch.setattr(FirstCome, "first_done", lambda self, wait: [*self.groups][-5:][:4])
    settings = [*AHEAD, "trainer.max_staleness=2", FIRST, "trainer.save_freq=2"]
    trained(tmp_path / "whole", tiny_model, *settings)
    expected = {step: learnt.pop(step) for step in range(3, 9)}
    settings += ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/whole/global_step_2"]
    trained(tmp_path / "resumed", tiny_model, *settings)
    assert learnt.items() >= expected.items()
    with pytest.raises(ConfigError, match="batch_order=strict: rows under way at the checkpoint are first_come"):
        trained(tmp_path / "strict", tiny_model, *settings, "trainer.batch_order=strict")


@pytest.mark.parametrize("order", ["strict", "first_come"])
def test_a_run_of_two_lives_is_played_again_in_two(cluster, tiny_model, tmp_path, order):
    """The first life learns a third step as well, which the second does again."""
    settings = [*AHEAD, *FOUR_STEPS, f"trainer.batch_order={order}", "trainer.save_freq=1"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    trained(whole, tiny_model, *settings, "trainer.save_freq=2", "trainer.total_training_steps=3")
    (whole / LATEST).write_text("2")
    metrics = trained(whole, tiny_model, *settings)
    replay = f"trainer.replay={whole}"
    assert [*trained(again, tiny_model, *settings, replay)] == [0, 1, 2], "as the first life, and saved"
    assert trained(again, tiny_model, *settings, replay) == metrics
    assert_same_weights(whole, again, step=4)
    lines = [{*(folder / "engine_steps_0.jsonl").read_text().splitlines()} for folder in (again, whole)]
    assert not [line for line in lines[1] - lines[0] if '"resumed_at": 2' in line]
    past = [f"trainer.resume_from_path={whole}/global_step_4", "trainer.total_training_steps=5"]
    with pytest.raises(ConfigError, match="that run did not go on after step 4"):
        trained(tmp_path / "no", tiny_model, *settings, replay, *past, "trainer.resume_mode=resume_path")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["trainer.replay=outputs/x"], "async_mode=fully_async"),
        ([*AHEAD, "algorithm.filter_groups.enable=true"], "algorithm.filter_groups"),
        ([*AHEAD, FIRST, "trainer.max_staleness=0", "algorithm.filter_groups.enable=true"], "algorithm.filter_groups"),
        ([*AHEAD, "actor_rollout_ref.rollout.tensor_model_parallel_size=2"], "tensor_model_parallel_size=1"),
        ([*APART, "trainer.async_mode=fully_async"], "rollout_is=token"),
    ],
)
def test_what_cannot_run_ahead_is_refused_in_a_line(settings, message):
    with pytest.raises(ConfigError, match=message):
        compose(*settings)


def test_a_generator_that_gets_no_further_ends_the_wait_though_it_answers_every_call(monkeypatch):
    """The first of two generators lives, and its engine takes no step; the second has given its rows."""
    monkeypatch.setattr("workers.deadlines.BEAT_SECONDS", SOON)
    numbers, group = count(), Mock(size=2)
    group.submit.return_value.result.return_value = [{}, {0: "rows"}]
    group.wait_for = lambda verb: Wait(verb, [(1, "a"), (2, "b")], lambda rank: Beat(next(numbers), 3, ""), 4 * SOON)
    with pytest.raises(WorkerError, match=r"generator.answer gets no further .*, by rank 0 \(pid 1 on a\)\.$"):
        AsyncRollout(group, ROLES["rollout"])._answers([(), ()])
