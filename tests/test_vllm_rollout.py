"""vLLM as the engine of whole runs, and what it is told. What engines promise: tests/test_engine_contract.py."""

import json
import shutil
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import ANY, MagicMock, Mock, call

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel

import main
from configs.extras import is_here
from configs.schema import ModelConfig, OptimConfig, RolloutConfig
from custom.tiny_model import save_tiny_model
from data.protocol import DataProto
from data.types import Request, SamplingParams
from tests.engines import probe_distance
from tests.runs import assert_two_at_once_do_not_meet, compose, learning_metrics, needs_vllm, short_run
from workers import vllm_rollout_spmd
from workers.engine import TrainEngine
from workers.model_worker import ColocatedRollout
from workers.models import load_causal_lm
from workers.vllm_rollout_spmd import config_folder, vLLMRollout
from workers.vllm_setup import CPU_HEAD_SIZES, cpu_cache_bytes, engine_settings
from workers.weight_sync import sync_class

LENGTHS = {"prompt_length": 40, "response_length": 12}


@pytest.fixture
def model(wide_headed_model: Path) -> PreTrainedModel:
    return load_causal_lm(ModelConfig(path=str(wide_headed_model)))


def engine_of(model: PreTrainedModel, **settings: object) -> vLLMRollout:
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    return vLLMRollout(RolloutConfig(**LENGTHS, **settings), tokenizer, model)


def test_settings_become_those_of_vllm_and_engine_kwargs_have_the_last_word(model, wide_headed_model: Path):
    own = {"vllm": {"block_size": 64, "seed": None}, "sglang": {"log_level": "info"}}
    config = RolloutConfig(max_num_seqs=8, max_num_batched_tokens=128, engine_kwargs=own, load_format="auto", **LENGTHS)
    found = engine_settings(config, model)
    assert found["model"] == str(wide_headed_model) and found["load_format"] == "auto" and found["dtype"] == "float32"
    assert (found["max_model_len"], found["max_num_seqs"], found["max_num_batched_tokens"]) == (52, 8, 128)
    assert found["block_size"] == 64 and "seed" not in found and "log_level" not in found
    assert found["enforce_eager"] and found["logprobs_mode"] == "processed_logprobs"
    narrow = RolloutConfig(max_num_seqs=1024, max_num_batched_tokens=100, max_model_len=80, **LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        found = engine_settings(narrow, model)
    assert (found["max_model_len"], found["max_num_seqs"], found["dtype"]) == (80, 100, "bfloat16")
    found = engine_settings(RolloutConfig(max_num_seqs=8, max_num_batched_tokens=16, **LENGTHS), model)
    assert (found["max_num_batched_tokens"], found["enable_chunked_prefill"]) == (52, False)  # a prompt goes in whole


def test_the_cache_on_a_cpu_holds_what_runs_side_by_side(model):
    """2 layers × keys and values × 4 heads × 32 numbers × 4 bytes × 32 tokens a block; 52 tokens are 2 blocks."""
    text, block = model.config, 2 * 2 * 4 * 32 * 4 * 32
    assert cpu_cache_bytes(RolloutConfig(max_num_seqs=10, **LENGTHS), text, 4) == block * (10 * 2 + 2)
    assert cpu_cache_bytes(RolloutConfig(max_num_seqs=10, **LENGTHS), text, 2) == block // 2 * (10 * 2 + 2)
    assert cpu_cache_bytes(RolloutConfig(max_num_seqs=10**6, **LENGTHS), text, 4) == 1 << 30
    long = RolloutConfig(prompt_length=10**6, response_length=10**6, max_num_seqs=1)
    assert cpu_cache_bytes(long, text, 4) == block * (62_500 + 2), "one sequence always fits"


def test_heads_that_vllm_does_not_know_are_refused_before_it_starts(tiny_model: Path):
    model = load_causal_lm(ModelConfig(path=str(tiny_model)))
    with pytest.raises(ValueError, match=r"heads of 32, 64, .* numbers, and this model's have 8\."):
        engine_of(model)
    backend = pytest.importorskip("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    assert [*CPU_HEAD_SIZES] == backend.get_supported_head_sizes()


@pytest.mark.parametrize(("device", "free_cache"), [("cuda", True), ("cuda", False), ("cpu", True)])
def test_it_sleeps_and_wakes_in_one_order(model, monkeypatch: pytest.MonkeyPatch, device: str, free_cache: bool):
    """Weights wake, new ones arrive, then the cache wakes; twice is once. vLLM's own engine cannot sleep on a CPU."""
    engine = Mock()
    monkeypatch.setattr(vllm_rollout_spmd, "start_engine", lambda config, model, place: engine)
    monkeypatch.setattr(vLLMRollout, "_alone", lambda self: nullcontext())
    rollout = engine_of(model, free_cache_engine=free_cache)
    rollout.device = torch.device(device)
    rollout.sleep(), rollout.sleep()
    if rollout.lost_weights:
        with pytest.raises(AssertionError, match="load_weights has to come first"):
            rollout.wake_up()
    rollout.load_weights([("head", torch.zeros(1))], 1)
    rollout.wake_up(), rollout.wake_up()
    caches = call.reset_prefix_cache(), call.reset_encoder_cache()
    synced = [call.collective_rpc("reload_weights", kwargs=ANY), *caches]
    if (device, free_cache) != ("cuda", True):
        assert engine.mock_calls == synced
        return
    asleep, weights, cache = call.sleep(level=2), call.wake_up(tags=["weights"]), call.wake_up(tags=["kv_cache"])
    assert engine.mock_calls == [call.reset_prefix_cache(), asleep, weights, *synced, cache]
    rollout.add(Request(0, [5], SamplingParams(True, 1.0, -1, 1.0, 3), 0))
    with pytest.raises(AssertionError, match="requests are in flight"):
        rollout.sleep()


def test_weights_come_again_before_a_generation_without_a_sync(tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    """A second draw of a step, or a validation, has no sync. Its weights are the policy's, of the version that was
    there, and LoRA's matrices are added to them in float32."""
    module, casts = load_causal_lm(ModelConfig(path=str(tiny_model))), []
    policy = TrainEngine(module, OptimConfig(), 10, torch.device("cpu"), torch.bfloat16)
    engine = MagicMock(own_weights=True, takes_adapter=False, lost_weights=True, weight_version=7)
    rollout = ColocatedRollout(compose(), Mock(), engine, policy)

    def bring(version: int) -> None:
        casts.append(torch.is_autocast_enabled("cpu"))
        engine.load_weights(policy.weights(), version)

    def generate(*_: object) -> DataProto:
        casts.append(torch.is_autocast_enabled("cpu"))
        return DataProto()

    monkeypatch.setattr(rollout, "_generate", generate)
    monkeypatch.setattr(rollout.sync, "update", bring)
    rollout.generate_sequences(DataProto(), SamplingParams(True, 1.0, -1, 1.0, 3), 0, 0, False)
    names = [name for name, *_ in engine.mock_calls if "together" not in name]
    assert names == ["load_weights", "wake_up", "sleep"] and casts == [False, True]
    weights, version = engine.load_weights.call_args.args
    assert dict(weights).keys() == module.state_dict().keys() and version == 7
    engine.lost_weights = False
    rollout.generate_sequences(DataProto(), SamplingParams(True, 1.0, -1, 1.0, 3), 0, 0, False)
    assert engine.load_weights.call_count == 1


def test_a_config_has_one_folder_whatever_run_asks(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """vLLM finds what it compiled by the folder's name, which models of equal configs share, and no others."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    moved = shutil.copytree(tiny_model, tmp_path / "moved")
    folders = [config_folder(load_causal_lm(ModelConfig(path=str(path)))) for path in (tiny_model, moved)]
    wider = ModelConfig(path=str(tiny_model), override_config={"rope_theta": 5.0})
    other = config_folder(load_causal_lm(wider))
    assert folders[0] == folders[1] != other
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {folders[0].name, other.name}
    assert json.loads((other / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    (tmp_path / "file").touch()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "file"))
    with pytest.raises(ValueError, match="set VLLM_CACHE_ROOT to a folder"):
        config_folder(load_causal_lm(wider))


@needs_vllm
def test_prompts_that_together_exceed_a_step_draw_as_they_do_alone(model):
    """The third and the fourth prompt, which the budget would cut, wait for the next step."""
    rollout = engine_of(model, max_num_batched_tokens=64, max_num_seqs=8)
    sampling = SamplingParams(True, 1.0, -1, 1.0, 4)
    requests = [Request(number, [5 + number] * 25, sampling, number) for number in range(4)]
    together = {done.id: done.token_ids for done in rollout.generate(requests)}
    for request in requests:
        [alone] = rollout.generate([request])
        assert together[request.id] == alone.token_ids
    rollout.close()


class Idle:
    """Stands for a stream or an event of a GPU, which has always done its work."""

    device = torch.device("cpu")

    def __init__(self, *_: object, **__: object) -> None:
        self.record = self.synchronize = self.wait_stream = lambda *_: None


@needs_vllm
def test_a_step_ahead_draws_the_same_and_new_weights_are_new_at_once(model, monkeypatch: pytest.MonkeyPatch):
    """VLLM on a GPU schedules a step before it has read the one before. Here it does by force, as no CPU would: what is
    in flight when rows stop or are aborted, weights change, or it sleeps, has no effect on what is drawn afterwards."""
    from vllm.platforms.cpu import CpuPlatform

    stops = tuple(range(model.vocab_size // 8))
    requests = [
        Request(row, [5, 6 + row % 3], SamplingParams(True, 1.0, -1, 1.0, 8 + row % 3, stop_token_ids=stops), row)
        for row in range(8)
    ]

    def drawn(rollout: vLLMRollout, scale: float, version: int) -> list[tuple]:
        rollout.load_weights([(name, tensor * scale) for name, tensor in model.state_dict().items()], version)
        return [(done.token_ids, done.log_probs, done.finish_reason) for done in rollout.generate(requests)]

    def all_drawn(rollout: vLLMRollout) -> list[list[tuple]]:
        results = [drawn(rollout, 1.0, 1), drawn(rollout, 1.5, 2)]
        in_flight.append(len(rollout.engine.engine_core.engine_core.batch_queue or ()))
        for request in requests:
            rollout.add(request)
        rollout.step(), rollout.step(), rollout.abort(range(8))
        results.append(drawn(rollout, 1.0, 3))
        rollout.engine.sleep(level=2)
        rollout.engine.wake_up(tags=["weights"]), rollout.engine.wake_up(tags=["kv_cache"])
        return [*results, drawn(rollout, 1.5, 4)]

    in_flight, apart = [], engine_of(model)
    expected = all_drawn(apart)
    apart.close()
    assert expected[0] == expected[2] != expected[1] == expected[3] and {end for *_, end in expected[0]} >= {"stop"}
    check = CpuPlatform.check_and_update_config

    def ahead(config: Any) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(ahead))
    for place, name in ((torch.cuda, "Stream"), (torch.cuda, "Event"), (torch, "Event")):
        monkeypatch.setattr(place, name, Idle)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: Idle())
    rollout = engine_of(model)
    assert all_drawn(rollout) == expected and in_flight == [0, 1]
    rollout.close()


@needs_vllm
def test_in_bfloat16_it_samples_as_the_trainer_scores(wide_headed_model: Path):
    """Every sync is certified in bfloat16, by log-probs and by checksums of the weights."""
    model = load_causal_lm(ModelConfig(path=str(wide_headed_model)), torch.device("cpu"), torch.bfloat16)
    with torch.no_grad():
        for matrix in (parameter for parameter in model.parameters() if parameter.ndim == 2):
            matrix.mul_(2)  # a random model is nearly uniform
    policy = TrainEngine(model, OptimConfig(), 10, torch.device("cpu"), torch.bfloat16)
    with policy.autocast():
        rollout = engine_of(model)
        sync = sync_class()(rollout, policy)
        sync.update(0)
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(1.5)
        stale = probe_distance(rollout, policy)
        assert 0 < sync.update(1)["rollout/sync_max_logprob_diff"] < 0.3 < stale
    assert sync.is_comparable and sync.engine_sums.dtype == torch.bfloat16
    rollout.close()


@needs_vllm
def test_it_adds_an_adapter_itself_and_one_that_does_not_arrive_is_seen(wide_headed_model: Path, monkeypatch):
    """The frozen model is sent once, the adapter at every sync."""
    model = load_causal_lm(ModelConfig(path=str(wide_headed_model), lora_rank=4, lora_alpha=3))
    weights = [weight for name, weight in model.named_parameters() if model.adapter.is_adapter_weight(name)]
    policy = TrainEngine(model, OptimConfig(), 10, torch.device("cpu"), torch.float32)
    engine = engine_of(model, load_lora="adapter")
    rollout = ColocatedRollout(compose(), Mock(), engine, policy)
    rollout.update_weights(0)
    load_weights = Mock(side_effect=AssertionError)
    monkeypatch.setattr(engine, "load_weights", load_weights)
    for version, std in ((1, 0.1), (2, 1e-6)):
        with torch.no_grad():
            for weight in weights:
                weight.add_(std * torch.randn_like(weight))
        rollout.update_weights(version)
        assert probe_distance(engine, policy) < 1e-5 and rollout.sync.is_comparable
    load_adapter = engine.load_adapter
    old = {name: weight.clone() for name, weight in model.adapter.adapter_weights(model)}
    kept = next(name for name in old if "1.mlp.down_proj.lora_B" in name)

    def withhold(new: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Withholds one matrix in version 3, nothing in version 4, and all from version 5 on."""
        delivered = dict(new) | ({kept: old[kept]} if version == 3 else {})
        if version < 5:
            load_adapter(delivered.items(), version)

    monkeypatch.setattr(engine, "load_adapter", withhold)
    refusals = {3: r"numbers that it holds are not these\. .*1\.mlp\.down_proj", 4: None, 5: "held before"}
    for version, said in refusals.items():
        with torch.no_grad():
            for weight in weights:
                weight.add_(1e-6)
        with pytest.raises(RuntimeError, match=said) if said else nullcontext():
            rollout.update_weights(version)
    engine.adapter = None
    with pytest.raises(RuntimeError, match="of a probe differ from the trainer's by"):
        rollout.update_weights(6)
    rollout.close()


@needs_vllm
def test_an_argument_that_vllm_does_not_know_is_named(model):
    with pytest.raises(ValueError, match=r"engine_kwargs\.vllm=.*block_sise.*vllm\.EngineArgs"):
        engine_of(model, engine_kwargs={"vllm": {"block_sise": 32}})


def vllm_run(model: Path, run: Path, *more: str) -> list[str]:
    """Returns overrides with two updates a step, so that the trainer's log-probs of what was sampled are computed."""
    two_updates = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    return short_run(model, run, "actor_rollout_ref.rollout.name=vllm", two_updates, "trainer.test_freq=2", *more)


@needs_vllm
@pytest.mark.slow
def test_a_run_on_vllm_samples_by_the_probabilities_that_it_trains(wide_headed_model: Path, tmp_path: Path, capsys):
    main.run(compose(*vllm_run(wide_headed_model, tmp_path / "run", "trainer.save_freq=2")))
    steps = [json.loads(line)["data"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "timing_s/update_weights" in step]
    assert len(trained) == 4
    for step in trained:
        assert abs(step["rollout_corr/kl"]) < 1e-5
    main.run(compose(*vllm_run(wide_headed_model, tmp_path / "run", "trainer.total_training_steps=5")))
    assert "resuming from" in capsys.readouterr().out
    assert abs(learning_metrics(tmp_path / "run")[5]["rollout_corr/kl"]) < 1e-5


ANY_CALLS = """
from data.tool_parsers import ParsedAnswer, ToolCall, ToolParser
from data.tools import function_tool

@ToolParser.register("any")
class Any(ToolParser):
    def parse(self, answer, schemas):
        return ParsedAnswer("", [ToolCall("longer", {"text": str(answer)})])

@function_tool
def longer(text: str) -> str:
    "Adds to a text."
    return text[:3] + "<|end|>!"

def compute_score(solution_str):
    return float(solution_str.count("1"))
"""


@pytest.mark.slow
@pytest.mark.skipif(not is_here("extras.tools"), reason="extras/tools was removed")
@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=needs_vllm)])
def test_tokens_that_follow_tools_are_sampled_by_the_probabilities_that_are_trained(name, wide_headed_model, tmp_path):
    """Each answer of four, ended or cut, is a call; the largest ratio of a step is that of its worst token."""
    (tmp_path / "calls.py").write_text(ANY_CALLS)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"prompt": "{n}+1=", "data_source": "s"}}\n' for n in range(8)))
    turns = "enable=true format=any max_assistant_turns=4 max_tokens_per_turn=16 function_tool_path="
    keys = [f"actor_rollout_ref.rollout.multi_turn.{key}" for key in f"{turns}{tmp_path}/calls.py".split()]
    keys += f"""
        env.id=null data.train_files={tmp_path}/rows.jsonl data.max_prompt_length=40 data.max_response_length=140
        actor_rollout_ref.model.external_lib={tmp_path}/calls.py actor_rollout_ref.rollout.name={name}
        reward.custom_reward_function.path={tmp_path}/calls.py trainer.total_training_steps=6
        algorithm.adv_estimator=grpo actor_rollout_ref.actor.optim.lr=1e-2
    """.split()
    main.run(compose(*short_run(wide_headed_model, tmp_path / "run", *keys), name="ppo_trainer"))
    steps = [metrics for step, metrics in learning_metrics(tmp_path / "run").items() if step]
    assert len(steps) == 6 and {step["tool_call_counts/min"] for step in steps} == {3.0}
    assert max(step["rollout_mismatch/max_ratio"] for step in steps) < 1 + 1e-5


@needs_vllm
@pytest.mark.slow
def test_two_runs_with_vllm_at_once_do_not_meet(wide_headed_model: Path, tmp_path: Path):
    assert_two_at_once_do_not_meet(
        tmp_path, lambda folder, seed: vllm_run(wide_headed_model, folder, f"trainer.seed={seed}")
    )


@needs_vllm
@pytest.mark.slow
def test_an_engine_for_each_of_two_workers_or_split_over_them_equals_one(tmp_path: Path, cluster: None):
    """vLLM plays whole episodes on one worker, on each of two, and split over two, with equal metrics."""
    model = tmp_path / "model"
    save_tiny_model(model, hidden_size=256, layers=1)

    def shared() -> set[Path]:
        return {*Path("/dev/shm").glob("*cpushm*"), *Path("/dev/shm").glob("psm_*")}

    before, found = shared(), []
    for workers, parts in ((1, 1), (2, 1), (2, 2)):
        split = f"actor_rollout_ref.rollout.tensor_model_parallel_size={parts}"
        # No episode is won in two turns: without the entropy, AdamW would step by the rounding of a gradient of 0.
        signal = ["actor_rollout_ref.actor.entropy_coeff=0.01", f"trainer.n_workers_per_node={workers}"]
        run, short = tmp_path / f"{workers}_{parts}", ["trainer.total_training_steps=2", "env.max_turns=2"]
        main.run(compose(*vllm_run(model, run, split, *signal, *short), name="frozenlake_multiturn"))
        found.append(learning_metrics(run))
    one, each, split = found
    assert one.keys() == each.keys() == split.keys() == {0, 1, 2}
    for step in one:
        for name, value in one[step].items():
            assert split[step][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    for name in ("critic/score/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm"):
        assert each[1][name] == pytest.approx(one[1][name], rel=1e-3, abs=1e-5), name
    assert max(step.get("rollout_mismatch/abs_log_prob_diff", 0) for step in split.values()) < 1e-5
    assert shared() <= before, "a later run would find what this one shared"


def test_a_model_that_cannot_be_split_so_is_refused(model):
    assert not {"tensor_parallel_size", "async_scheduling"} & engine_settings(RolloutConfig(**LENGTHS), model).keys()
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=2: the model has intermediate_size=341, which"):
        engine_settings(RolloutConfig(tensor_model_parallel_size=2, **LENGTHS), model)
    model.config.intermediate_size = 342
    split = engine_settings(RolloutConfig(tensor_model_parallel_size=2, **LENGTHS), model)
    assert split["tensor_parallel_size"] == 2 and split["disable_custom_all_reduce"] and not split["async_scheduling"]
