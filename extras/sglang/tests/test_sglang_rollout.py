"""SGLang as the engine, held against a stand-in for sglang.Engine: the real one needs a GPU and is not run here."""

import asyncio
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from configs.schema import ModelConfig, RolloutConfig
from data.types import Request, SamplingParams
from extras.openai import weight_transfer
from extras.sglang.rollout import SGLangRollout
from workers.models import load_causal_lm
from workers.rollout import build_rollout, load_rollout_class

PLAIN = SamplingParams(True, 0.7, -1, 1.0, 4)
SLOW = 60  # the stand-in answers a prompt of this token when it is aborted, and not before


class StandIn:
    """Stands in for SGLang 0.5.23's Engine, as far as extras/sglang/rollout.py uses it; counts up from the prompt."""

    def __init__(self, **settings: object) -> None:
        self.settings, self.calls, self.asked = settings, [], []
        self.loop, self.tokenizer_manager = asyncio.new_event_loop(), self
        self.aborted: dict[str, asyncio.Event] = {}
        self.log_prob = -0.5
        self.model_type = (Path(str(settings["model_path"])) / "config.json").read_text()

    async def async_generate(self, *, input_ids, sampling_params, return_logprob, rid) -> dict:
        assert return_logprob and rid not in self.aborted
        self.asked.append(sampling_params)
        self.aborted[rid] = asyncio.Event()
        if SLOW in input_ids:
            await self.aborted[rid].wait()
        del self.aborted[rid]
        ids = []
        while len(ids) < sampling_params["max_new_tokens"]:
            ids.append(input_ids[-1] + 1 + len(ids))
            if ids[-1] in sampling_params["stop_token_ids"] and not sampling_params["ignore_eos"]:
                return {"meta_info": self.meta(ids, "stop")}
        return {"meta_info": self.meta(ids, "abort" if SLOW in input_ids else "length")}

    def meta(self, ids: list[int], reason: str) -> dict:
        tokens = [(self.log_prob, token_id, None) for token_id in ids]
        return {"output_token_logprobs": tokens, "finish_reason": {"type": reason}}

    def abort_request(self, rid: str) -> None:
        self.aborted[rid].set()

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True) -> tuple[bool, str]:
        self.calls.append([name for name, _ in named_tensors])
        return named_tensors[0][0] != "nowhere", "no place for it"

    def flush_cache(self) -> None:
        self.calls.append("flush")

    def release_memory_occupation(self, tags: list[str]) -> None:
        self.calls.append(f"release {tags}")

    def resume_memory_occupation(self, tags: list[str]) -> None:
        self.calls.append(f"resume {tags}")

    def shutdown(self) -> None:
        self.loop.close()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> Iterator[SGLangRollout]:
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(Engine=StandIn))
    own = {"sglang": {"attention_backend": "triton", "base_gpu_id": None}}
    config = RolloutConfig(name="sglang", prompt_length=8, response_length=4, max_num_seqs=16, engine_kwargs=own)
    model = load_causal_lm(ModelConfig(path=str(tiny_model)))
    engine = build_rollout(load_rollout_class("sglang"), config, AutoTokenizer.from_pretrained(tiny_model), model)
    engine.stop_ids = {22, 10**6}
    yield engine
    engine.close()


def test_requests_become_those_of_sglang(engine: SGLangRollout):
    """SGLang would not stop at stop_token_ids if ignore_eos were set, and takes seeds of 31 bits."""
    greedy = replace(PLAIN, do_sample=False)
    first, second = engine.generate([Request(0, [20], PLAIN, seed=2**40 + 3), Request(1, [30], greedy, seed=5)])
    assert (first.token_ids, first.log_probs, first.finish_reason) == ([21, 22], [-0.5, -0.5], "stop")
    assert (second.token_ids, second.finish_reason) == ([31, 32, 33, 34], "length")
    shared = {"max_new_tokens": 4, "stop_token_ids": [22], "ignore_eos": False}
    assert engine.engine.asked == [
        {"temperature": 0.7, "sampling_seed": 3, **shared}, {"temperature": 0.0, **shared}
    ]  # fmt: skip
    settings = engine.engine.settings
    assert settings["enable_deterministic_inference"] and settings["skip_tokenizer_init"]
    assert (settings["context_length"], settings["max_running_requests"], settings["dtype"]) == (12, 16, "float32")
    assert settings["attention_backend"] == "triton" and settings["base_gpu_id"] == 0
    assert '"architectures"' in engine.engine.model_type


def test_what_sglang_cannot_do_right_is_refused(engine: SGLangRollout):
    with pytest.raises(ValueError, match=r"asks for top_k=5, .*leave out"):
        engine.add(Request(0, [20], replace(PLAIN, top_k=5), 0))
    engine.engine.log_prob = -math.inf
    with pytest.raises(FloatingPointError, match="request 0, token 1 of its response"):
        engine.generate([Request(0, [20], PLAIN, 0)])


def test_aborted_requests_are_gone_and_their_ids_free(engine: SGLangRollout):
    for number, prompt in enumerate([[SLOW], [30], [SLOW]]):
        engine.add(Request(number, prompt, PLAIN, 0))
    found = engine.step()
    while len(found) < 1:
        found += engine.step()
    assert [done.id for done in found] == [1]
    engine.abort([0, 2, 7])
    assert not engine.has_unfinished_requests() and not engine.engine.aborted
    assert len(engine.generate([Request(0, [30], PLAIN, 0)])) == 1


def test_weights_are_handed_over_in_buckets(engine: SGLangRollout, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weight_transfer, "BUCKET_BYTES", 40)
    engine.load_weights([("a", torch.ones(5)), ("b", torch.ones(5)), ("c", torch.ones(50)), ("d", torch.ones(1))], 4)
    assert engine.engine.calls == [["a", "b"], ["c"], ["d"], "flush"] and engine.weight_version == 4
    with pytest.raises(ValueError, match="does not take the weights of version 5: no place for it"):
        engine.load_weights([("nowhere", torch.ones(1))], 5)
    with pytest.raises(ValueError, match="was given no weights for version 6"):
        engine.load_weights([], 6)


def test_the_cache_leaves_the_gpu_between_generations(engine: SGLangRollout):
    engine.sleep()
    assert engine.engine.calls == [], "nothing is to be gained on a CPU"
    engine.sleeps = True
    engine.sleep()
    engine.sleep()
    engine.generate([Request(0, [30], PLAIN, 0)])
    assert engine.engine.calls == ["flush", "release ['kv_cache']", "resume ['kv_cache']"]
