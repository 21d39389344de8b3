"""The ways of weights to a server: files in shared memory, and vLLM's own transfer over NCCL, which has a stand-in here
(extras/openai/tests/store_transfer.py); then both with vLLM's server behind them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from configs.errors import ConfigError
from configs.schema import ModelConfig, OptimConfig
from extras.http.http import ServerError
from extras.openai import weight_transfer as transfers
from extras.openai.settings import OpenAISettings, openai_settings
from extras.openai.tests.fixtures import engine_for
from extras.openai.weight_transfer import (
    WeightTransfer,
    buckets,
    check_weight_transfer,
    passing_folder,
    read_weights,
    weight_transfer,
    write_weights,
)
from tests.engines import probe_distance
from tests.forked import python
from tests.runs import compose, files_of_at_most, learning_metrics, needs_vllm, run_main, short_run
from tests.servers import KEY, answering
from workers.engine import TrainEngine
from workers.models import load_causal_lm
from workers.ray_group import check_machine
from workers.vllm_setup import vllm_process
from workers.weight_sync import sync_class

OWN = "actor_rollout_ref.rollout.engine_kwargs.openai"
START, UPDATE, FINISH = "/start_weight_update", "/update_weights", "/finish_weight_update"
RESET = "/reset_prefix_cache?reset_running_requests=true"
Answer = Callable[[dict], tuple[int, dict]]


@pytest.fixture
def stand_in() -> None:
    """vLLM's engines for NCCL do without it from now on, in this process."""
    with vllm_process("cpu"):
        from extras.openai.tests import store_transfer  # noqa: F401


def server_that(calls: list[tuple[str, dict | None]], **own: Answer) -> AbstractContextManager[str]:
    """The address of a server that notes what it is asked, takes everything, and does `own`, by route, besides."""

    def answer(method: str, path: str, body: dict | None) -> tuple[int, dict]:
        calls.append((path, body))
        does = own.get(path.strip("/").partition("?")[0])
        return does(body) if does else (200, {"success": True, "world_size": 1})

    return answering(answer)


def sender(url: str, way: str, folder: Path, **settings: Any) -> AbstractContextManager[WeightTransfer]:
    own = OpenAISettings(f"{url}/v1", weight_transfer=way, weights_folder=str(folder), **settings)
    return closing(weight_transfer(own))


def some_weights(count: int = 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{i}.weight": torch.randn(4, i + 1, generator=generator) for i in range(count)}


# Files


def test_weights_pass_through_files_as_they_are(tmp_path: Path):
    """Tied ones under both names, all types, and a matrix that is a view."""
    tied = torch.randn(5, 3)
    weights = {
        "embed": tied, "lm_head": tied, "half": torch.randn(4).bfloat16(), "turned": torch.randn(2, 6).T,
        "scalar": torch.tensor(2.0), "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    write_weights(weights.items(), tmp_path)
    found = dict(read_weights(str(tmp_path)))
    assert list(found) == list(weights)
    for name, tensor in weights.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    with pytest.raises(FileNotFoundError, match="there are no weights in"):
        next(read_weights(str(tmp_path / "elsewhere")))


def test_one_weight_is_in_memory_at_a_time(tmp_path: Path):
    """A weight is written before the next is asked for."""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            assert len(list(tmp_path.iterdir())) == number
            yield str(number), torch.ones(number + 1)

    write_weights(weights(), tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


def test_the_server_reads_them_within_an_update_and_drops_its_caches_after_it(tmp_path: Path):
    weights, found, calls = some_weights(), {}, []

    def update(body: dict) -> tuple[int, dict]:
        found.update(read_weights(body["update_info"]["folder"]))
        return 200, {}

    with server_that(calls, update_weights=update) as url, sender(url, "shared_memory", tmp_path) as way:
        way.send(iter(weights.items()), 7)
    assert [path for path, _ in calls] == [START, UPDATE, FINISH, RESET]
    assert calls[2][1] == {"weight_version": "7"} and not list(tmp_path.iterdir())
    assert list(found) == list(weights) and all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("route", "answer", "asked", "kind", "message"),
    [
        ("update_weights", (400, {"error": "no place"}), [START, UPDATE], ValueError, "version 3 by .*400.*no place"),
        ("start_weight_update", (500, {"error": "dead"}), [START], ServerError, "_update failed, status 500: .*dead"),
        ("reset_prefix_cache", (200, {"success": False}), [START, UPDATE, FINISH, RESET], ServerError, "still in use"),
    ],
)
def test_what_a_server_refuses_is_not_tried_again(tmp_path: Path, route: str, answer: tuple, asked, kind, message: str):
    """A refusal for good is told from a failure that may pass, after which trainer.max_restarts tries the run again."""
    calls = []
    with (
        server_that(calls, **{route: lambda _: answer}) as url,
        sender(url, "shared_memory", tmp_path) as way,
        pytest.raises(kind, match=message),
    ):
        way.send(some_weights().items(), 3)
    assert [path for path, _ in calls] == asked and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("seconds", "health", "words"), [
    (0.2, 200, r"/update_weights gave no answer in 0\.2 seconds"),
    (600, 503, r"/health failed, status 503"),  # its engine has died
])  # fmt: skip
def test_an_answer_that_does_not_come_ends_the_sync(seconds, health, words, tmp_path, monkeypatch):
    monkeypatch.setattr(transfers, "LOOK_SECONDS", 0.5)
    over = Event()

    def update(_: dict) -> tuple[int, dict]:
        over.wait()
        return 200, {}

    with (
        server_that([], update_weights=update, health=lambda _: (health, {})) as url,
        sender(url, "shared_memory", tmp_path, weights_timeout=seconds) as way,
    ):
        try:
            with pytest.raises(ServerError, match=words):
                way.send(some_weights().items(), 1)
        finally:
            over.set()


def test_a_sync_that_cannot_be_done_says_why_and_leaves_no_files(address: str, tmp_path: Path):
    """The error names a server that takes no weights, or a folder that is too small."""
    weights = [("a", torch.ones(3000))]
    with sender(address, "shared_memory", tmp_path, api_key=KEY) as way:
        with pytest.raises(ValueError, match=r"does not take the actor's weights .*404.*server.takes_weights=true"):
            way.send(weights, 1)
        with files_of_at_most(5000), pytest.raises(ValueError, match=r"version 2 cannot be written to .*--shm-size"):
            way.send(weights, 2)
    assert not list(tmp_path.iterdir())


# vLLM's own transfer


def test_nccl_is_refused_where_there_is_no_gpu_or_no_vllm(monkeypatch: pytest.MonkeyPatch):
    openai = ["actor_rollout_ref.rollout.name=openai", f"{OWN}.base_url=http://127.0.0.1:8000/v1"]
    nccl = openai_settings(compose(*openai, f"{OWN}.weight_transfer=nccl").actor_rollout_ref.rollout)
    monkeypatch.setattr(transfers, "find_spec", lambda name: object())
    check_weight_transfer(nccl, gpus=1)
    check_weight_transfer(openai_settings(compose(*openai).actor_rollout_ref.rollout), gpus=0)
    with pytest.raises(ConfigError, match=r"weight_transfer=nccl needs a GPU .* has none .* Set it to shared_memory"):
        check_machine(compose(*openai, f"{OWN}.weight_transfer=nccl", "trainer.n_gpus_per_node=0"))
    monkeypatch.setattr(transfers, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"weight_transfer=nccl needs vLLM, which is not installed"):
        check_weight_transfer(nccl, gpus=1)


def test_buckets_of_weights_are_filled_as_they_come(monkeypatch: pytest.MonkeyPatch):
    """No more than a bucket, and the weight that opens the next, is asked for at a time."""
    asked, weights = [], some_weights(6)  # of 16, 32 … 96 bytes

    def coming() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights.items():
            asked.append(name)
            yield name, tensor

    monkeypatch.setattr(transfers, "BUCKET_BYTES", 100)
    found = [(len(bucket), len(asked)) for bucket in buckets(coming())]
    assert found == [(3, 4), (1, 5), (1, 6), (1, 6)]


def test_a_bucket_is_what_either_version_of_vllm_reads():
    """0.32 calls `metadata` and iterates; 0.33 reads `metadata`, and asks for `iter_full` (base.WeightSource)."""
    bucket = transfers.Bucket(some_weights(2).items())
    described = [("layers.0.weight", torch.float32, (4, 1)), ("layers.1.weight", torch.float32, (4, 2))]
    assert bucket.metadata == bucket.metadata() == described and [meta.shape for meta in bucket.metadata][1] == (4, 2)
    assert bucket.implements_iter_full() and [name for name, _ in bucket.iter_full()] == [name for name, _ in bucket]


class Receiver:
    """A server's one worker, as vLLM's own engine receives, in this process: what it is asked under init and update."""

    def __init__(self) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        class Engine(NCCLWeightTransferEngine):
            def __init__(self) -> None:
                self.parallel_config = SimpleNamespace(rank=0)
                self.device = torch.device("cpu")
                self.model = SimpleNamespace(load_weights=received.update)

        self.weights = received = {}
        self.engine = Engine()

    def init(self, body: dict) -> tuple[int, dict]:
        self.engine.init_transfer_engine(self.engine.parse_init_info(body["init_info"]))
        return 200, {}

    def update(self, body: dict) -> tuple[int, dict]:
        self.engine.update_weights(body["update_info"])
        return 200, {}

    def routes(self) -> dict[str, Answer]:
        return {"init_weight_transfer_engine": self.init, "update_weights": self.update}


@needs_vllm
def test_weights_are_sent_in_buckets_of_one_update(stand_in: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names, types and shapes of its weights go ahead of each bucket; the group is made once. The GPU has done what
    makes weights, which may be gathered or merged, before any is sent."""
    monkeypatch.setattr(transfers, "BUCKET_BYTES", 100)
    weights, receiver, calls = some_weights() | {"half": torch.ones(3).bfloat16()}, Receiver(), []
    had = []  # of the weights when the device was waited for
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: had.append(len(receiver.weights)))
    with server_that(calls, **receiver.routes()) as url, sender(url, "nccl", tmp_path) as way:
        way.send(iter(weights.items()), 1)
        assert had[:2] == [0, 0]  # before the group is joined, and before the first bucket
        assert all(torch.equal(receiver.weights[name], tensor) for name, tensor in weights.items())
        assert receiver.weights["half"].dtype == torch.bfloat16
        way.send(((name, tensor + 1) for name, tensor in weights.items()), 2)
    assert all(torch.equal(receiver.weights[name], tensor + 1) for name, tensor in weights.items())
    update = [START, UPDATE, UPDATE, UPDATE, FINISH, RESET]
    meeting = ["/get_world_size", "/init_weight_transfer_engine"]
    assert [path for path, _ in calls] == [*meeting, *update, *update, "/shutdown_weight_transfer_engine"]
    told = calls[1][1]["init_info"]
    assert (told["master_address"], told["rank_offset"], told["world_size"]) == ("127.0.0.1", 1, 2) and told["packed"]
    assert calls[3][1]["update_info"]["shapes"] == [[4, 1], [4, 2], [4, 3]]
    assert calls[6] == (FINISH, {"weight_version": "1"})


PRODUCER = "packed_nccl_broadcast_producer"


@needs_vllm
@pytest.mark.parametrize(
    ("waits", "update", "message"),
    [
        (PRODUCER, (200, {}), r"version 5 by .*nccl: while layers\.0\.weight … layers\.4\.weight were sent: Overdue"),
        (PRODUCER, (400, {"error": "no place"}), r"status 400: .*no place"),
        ("open_trainer_endpoint", (200, {}), r"while 1 workers of the server were to join at .*: Overdue"),
    ],
    ids=["never sent", "refused", "never joined"],
)
def test_a_transfer_that_never_ends_is_given_up(stand_in: None, tmp_path: Path, monkeypatch, waits, update, message):
    """NCCL waits for one that is gone: to the deadline, or until the server refuses. Nothing is asked after that."""
    from vllm.distributed.weight_transfer import nccl_engine

    over, calls = Event(), []
    monkeypatch.setattr(nccl_engine, waits, lambda *_, **__: over.wait())
    routes = Receiver().routes() | {"update_weights": lambda _: update}
    if waits == "open_trainer_endpoint":  # which a server's worker would look for, for five minutes
        del routes["init_weight_transfer_engine"]
    seconds, kind = (60.0, ValueError) if update[0] == 400 else (1.0, ServerError)
    with server_that(calls, **routes) as url, sender(url, "nccl", tmp_path, weights_timeout=seconds) as way:
        with pytest.raises(kind, match=message):
            way.send(some_weights().items(), 5)
        over.set()
    assert FINISH not in [path for path, _ in calls]


def test_of_several_workers_the_first_sends_and_all_go_through_the_weights(address, tiny_model, monkeypatch):
    """Sharded weights are put together by all workers, in the same order."""
    engine, made = engine_for(address, tiny_model, api_key=KEY), []
    monkeypatch.setattr(engine.transfer, "send", lambda weights, version: pytest.fail("a second worker sends"))
    monkeypatch.setattr("extras.openai.rollout.rank", lambda: 1)
    engine.load_weights((made.append(name) or (name, tensor) for name, tensor in some_weights().items()), 4)
    assert made == [*some_weights()] and engine.weight_version == 4
    engine.close()


# With vLLM's server


@needs_vllm
@pytest.mark.slow
def test_one_server_takes_weights_either_way(stand_in, vllm_address, wide_headed_model, tmp_path, monkeypatch):
    """A server takes weights by vLLM's transfer from two trainers in turn, then by shared memory from a whole run. Its
    two updates a step have the trainer compute log-probs of what was sampled: they are those of the server."""
    monkeypatch.setattr(transfers, "BUCKET_BYTES", 100_000)
    model = load_causal_lm(ModelConfig(path=str(wide_headed_model)))
    policy = TrainEngine(model, OptimConfig(), 10, torch.device("cpu"), torch.float32)
    nccl = {"api_key": KEY, "weight_transfer": "nccl", "weights_timeout": 60.0}
    for change in (1.5, 0.8):
        engine = engine_for(vllm_address, wide_headed_model, **nccl)
        with torch.no_grad():
            policy.module.model.embed_tokens.weight.mul_(change)
        assert probe_distance(engine, policy) > 1e-3
        sync_class()(engine, policy).update(1)
        engine.close()
    engine = engine_for(vllm_address, wide_headed_model, **nccl)
    with pytest.raises(ServerError, match=r"does not take .* no module or parameter named .nowhere"):
        engine.load_weights([("model.nowhere.weight", torch.zeros(3))], 2)
    engine.close()
    own = ["actor_rollout_ref.rollout.name=openai", f"{OWN}.base_url={vllm_address}", f"{OWN}.api_key='{KEY}'"]
    two_updates = "actor_rollout_ref.actor.ppo_mini_batch_size=2"
    done = run_main(*short_run(wide_headed_model, tmp_path / "run", *own, two_updates))
    assert done.returncode == 0, done.stderr
    steps = learning_metrics(tmp_path / "run")
    for number in range(1, 5):
        assert abs(steps[number]["rollout_corr/kl"]) < 1e-5


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("{}", r"openai\.base_url=None: set the server's address"),
        ("{url: 'http://a'}", r"openai=\['url'\]: it holds base_url, api_key, .*, weights_timeout, and nothing"),
        ("{base_url: 'http://a', api_key_env: NO_SUCH}", "openai.api_key_env=NO_SUCH: the environment has no such"),
        ("{base_url: 'http://a', weight_transfer: rdma}", "weight_transfer=rdma is none of shared_memory, nccl"),
    ],
)
def test_settings_are_refused_by_name(settings: str, words: str):
    with pytest.raises(ValueError, match=words):
        check_machine(compose("actor_rollout_ref.rollout.name=openai", f"{OWN}={settings}"))


def test_a_folder_that_a_killed_process_left_goes_and_those_of_live_ones_stay(tmp_path):
    program = f"""
import os, signal
from extras.openai.weight_transfer import passing_folder
with passing_folder({str(tmp_path)!r}, "weights_") as folder:
    (folder / "weight").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    python("-c", program)
    [left] = tmp_path.iterdir()
    (tmp_path / "weights_new").mkdir()  # which its process has not locked yet
    with passing_folder(tmp_path, "weights_") as live:
        assert not left.exists()
        (live / "weight").write_text("x")
        with passing_folder(tmp_path, "weights_"):
            assert live.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["weights_new"]
