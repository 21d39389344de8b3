"""Moments and weights in main memory: the same numbers, in AdamW's layout, and weights on the device at work alone."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import main
from configs.schema import ModelConfig, OptimConfig
from extras.sharding import layout as sharding
from extras.sharding import offload
from extras.sharding.offload import Offload, Offloaded, make_optimizer, rounded_at_random
from tests.batches import ragged_batch, relative_distance, update_of
from tests.pretended_gpu import CPU, CUDA, PretendedGPU, is_on_device
from tests.runs import compose, learning_metrics, short_run
from workers import models
from workers.dp_actor import DataParallelPPOActor, ReferencePolicy
from workers.engine import TrainEngine
from workers.forward_check import trained_log_probs
from workers.micro_batches import MicroBatchSize
from workers.models import frozen_copy, load_causal_lm, plain_matrices

IDS = torch.tensor([[10, 11, 12, 13, 14]])


def make_engine(tiny_model: Path, moments_dtype: str = "float32", **offloads: bool) -> TrainEngine:
    module = load_causal_lm(ModelConfig(path=str(tiny_model)))
    optim = OptimConfig(lr=0.01, weight_decay=0.1, moments_dtype=moments_dtype)
    module.parallel = Offloaded(Offload(**offloads))
    return TrainEngine(module, optim, 10, CPU, torch.float32)


def train(engine: TrainEngine, steps: int) -> None:
    for step in range(steps):
        with engine.on_device():
            engine.update([engine.module(IDS, labels=IDS).loss], step)


def moments(engine: TrainEngine) -> list[torch.Tensor]:
    return [value for state in engine.optimizer.state_dict()["state"].values() for value in state.values()]


@pytest.mark.parametrize("chunk", [offload.CHUNK, 4096])
def test_steps_in_main_memory_are_adamws(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int):
    """Steps in main memory equal AdamW's, for whole tensors and by rows; either continues the other's checkpoint."""
    monkeypatch.setattr(offload, "CHUNK", chunk)
    plain, away = make_engine(tiny_model), make_engine(tiny_model, moments=True, module=True)
    train(plain, 3), train(away, 3)
    tensors = [[*engine.module.parameters(), *moments(engine)] for engine in (plain, away)]
    assert len(tensors[0]) == len(tensors[1]) and all(map(torch.equal, *tensors))
    assert plain.optimizer.state_dict()["param_groups"] == away.optimizer.state_dict()["param_groups"]
    for engine, name in ((plain, "plain"), (away, "away")):
        engine.save(tmp_path / name, ["model", "optimizer", "extra"])
    plain.load(tmp_path / "away"), away.load(tmp_path / "plain")
    train(plain, 2), train(away, 2)
    assert all(map(torch.equal, moments(plain), moments(away)))


def test_moments_in_bfloat16(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Moments in bfloat16 give about the same weights for half the bytes, wherever they are and however they are cut; a
    resumed run goes on to the last bit, and one that had them in float32 does, too."""
    plain, here = make_engine(tiny_model), make_engine(tiny_model, "bfloat16")
    train(plain, 3), train(here, 3)
    monkeypatch.setattr(offload, "CHUNK", 4096)
    away, resumed, changed = (make_engine(tiny_model, "bfloat16", moments=moments) for moments in (True, False, False))
    start = [weight.detach().clone() for weight in away.module.parameters()]
    train(away, 3)
    assert all(map(torch.equal, here.module.parameters(), away.module.parameters()))
    assert all(map(torch.equal, moments(here), moments(away)))
    assert {value.dtype for value in moments(here) if value.ndim} == {torch.bfloat16}
    steps = [[now - before for now, before in zip(engine.module.parameters(), start, strict=True)]
             for engine in (here, plain)]  # fmt: skip
    assert 1e-4 < relative_distance(*steps) < 1e-2
    for engine, before, name in ((resumed, here, "here"), (changed, plain, "plain")):
        before.save(tmp_path / name, ["model", "optimizer", "extra"])
        engine.load(tmp_path / name)
        assert {value.dtype for value in moments(engine) if value.ndim} == {torch.bfloat16}
    train(here, 2), train(resumed, 2)
    assert all(map(torch.equal, here.module.parameters(), resumed.module.parameters()))


def test_rounding_at_random_keeps_the_mean_where_rounding_to_the_nearest_keeps_the_number():
    near = torch.full((100_000,), 1 + 2**-10)  # a quarter of the way from one number of bfloat16 to the next
    rounded = rounded_at_random(near, 7, 3).float()
    assert set(rounded.tolist()) == {1.0, 1 + 2**-7} and rounded.mean() == pytest.approx(1 + 2**-10, abs=3e-5)
    assert torch.equal(rounded[5000:], rounded_at_random(near[5000:], 5007, 3))
    assert not torch.equal(rounded, rounded_at_random(near, 7, 4))
    fading, stuck = torch.ones(2, 4096, dtype=torch.bfloat16)
    for step in range(1000):
        fading, stuck = rounded_at_random(fading.float() * 0.999, 0, step), (stuck.float() * 0.999).bfloat16()
    assert fading.float().mean() == pytest.approx(0.999**1000, rel=5e-3) and stuck.unique().item() == 1


def test_shards_are_stepped_as_the_whole():
    """The last of two ranks steps two of five rows, the last of four none, in groups that exchange nothing."""
    weights, gradients = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))

    def stepped(weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        parameter = torch.nn.Parameter(weight.clone())
        optimizer = make_optimizer([parameter], OptimConfig(lr=0.1, moments_dtype="bfloat16"), in_main_memory=True)
        for factor in (1, 3, 2):
            parameter.grad = gradient * factor
            optimizer.step()
        return torch.stack([parameter.detach(), optimizer.state[parameter]["exp_avg_sq"].float()])

    wanted = stepped(weights, gradients)
    for size in (2, 4):  # each once: torch keeps what it has computed of a mesh
        dist.init_process_group("fake", store=FakeStore(), rank=size - 1, world_size=size)
        mesh = init_device_mesh("cpu", (size,))
        shards = [distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for whole in (weights, gradients)]
        found = stepped(*shards).to_local()
        dist.destroy_process_group()
        assert torch.equal(found, wanted[:, (size - 1) * -(-5 // size) :])


def test_bytes_of_five_weights_are_of_what_stays_on_the_device():
    optims = None, OptimConfig(), OptimConfig(moments_dtype="bfloat16")
    for kept, held in {(0, 0): [20, 80, 60], (1, 0): [20, 20, 20], (0, 1): [0, 60, 40], (1, 1): [0, 0, 0]}.items():
        assert [Offloaded(Offload(*kept)).bytes_held(5, optim) for optim in optims] == held


def test_weights_are_at_home_but_at_work(tiny_model: Path):
    engine = make_engine(tiny_model, module=True)
    weights = [*engine.module.parameters()]
    before = [weight.detach().clone() for weight in weights]
    homes = [weight.data_ptr() for weight in weights]
    with engine.on_device():
        device = [weight.data_ptr() for weight in weights]
        assert not set(homes) & set(device)
        with engine.on_device():
            assert [weight.data_ptr() for weight in weights] == device
        assert [weight.data_ptr() for weight in weights] == device, "the outer block goes on"
        assert engine.module.get_output_embeddings().weight is engine.module.get_input_embeddings().weight
        weights[0].data.add_(1)
    assert [weight.data_ptr() for weight in weights] == homes
    assert torch.equal(weights[0], before[0] + 1) and all(map(torch.equal, weights[1:], before[1:]))


def test_a_run_with_all_of_it_offloaded_has_the_same_numbers(tiny_model, tmp_path, monkeypatch):
    """Actor, critic, reference and generation by the module, which all come to the device and go again."""
    monkeypatch.setattr(sharding, "on_gpu", lambda device: True)
    terms = ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true", "trainer.save_freq=2")
    actor, ref = "actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config"
    offloads = (f"{actor}.param_offload=true", f"{actor}.optimizer_offload=true", f"{ref}.param_offload=true")
    main.run(compose(*short_run(tiny_model, tmp_path / "here", *terms, "trainer.total_training_steps=3")))
    main.run(compose(*short_run(tiny_model, tmp_path / "away", *terms, *offloads, "trainer.total_training_steps=2")))
    main.run(compose(*short_run(tiny_model, tmp_path / "away", *terms, *offloads, "trainer.total_training_steps=3")))
    assert learning_metrics(tmp_path / "away") == learning_metrics(tmp_path / "here")


@pytest.mark.parametrize("gpu", [True, False])
def test_where_there_is_a_gpu_what_is_asked_for_is_offloaded_and_nothing_else(monkeypatch, gpu):
    monkeypatch.setattr(sharding, "on_gpu", lambda device: gpu)
    config = compose("actor_rollout_ref.actor.fsdp_config.optimizer_offload=true")
    assert sharding.Sharded(config, CPU, torch.float32, "policy").offload == Offload(moments=gpu, module=False)


@pytest.mark.parametrize("agrees", [True, False])
def test_a_reference_in_bfloat16_scores_as_the_policy_does(tiny_model, monkeypatch, capsys, agrees):
    """A reference scores as the policy to the last bit, so KL is 0; where a layer would not, it stays in float32."""
    policy = load_causal_lm(ModelConfig(path=str(tiny_model)), CPU, torch.bfloat16)
    if not agrees:
        monkeypatch.setattr(models, "score_equally", lambda *_: False)
    copied = frozen_copy(policy, torch.bfloat16)
    assert {weight.dtype for weight in plain_matrices(copied)} == {torch.bfloat16 if agrees else torch.float32}
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    assert copied.get_output_embeddings().weight is copied.get_input_embeddings().weight
    assert copied.get_input_embeddings().weight.dtype == torch.float32
    assert ("the reference keeps float32" in capsys.readouterr().err) is not agrees
    size, batch = MicroBatchSize(None, 64), ragged_batch()
    engine = TrainEngine(policy, OptimConfig(), 10, CPU, torch.bfloat16)
    actor = DataParallelPPOActor(compose().actor_rollout_ref.actor, engine, size, size)
    reference = ReferencePolicy(copied, size, engine.autocast)
    found = reference.compute_log_prob(batch, 0.7, ["ref_log_prob"]).batch["ref_log_prob"]
    assert torch.equal(found, actor.compute_log_prob(batch, 0.7, ["old_log_probs"]).batch["old_log_probs"])
    assert frozen_copy(policy, torch.float32).lm_head.weight.dtype == torch.float32


def put_by_swapping(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """`offload.put` for the pretended GPU, whose tensors are of another class than the host's."""
    made = torch.nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else values
    torch.utils.swap_tensors(tensor, made)


def test_on_a_gpu_a_model_leaves_between_its_stages(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Scores and steps are those of a CPU, and where it waits it can be probed."""

    def stages(device: torch.device, *offloads: bool) -> tuple[DataParallelPPOActor, torch.Tensor]:
        module = load_causal_lm(ModelConfig(path=str(tiny_model)), device, torch.float32, 64)
        module.parallel = Offloaded(Offload(*offloads))
        engine = TrainEngine(module, OptimConfig(), 10, device, torch.float32)
        size, batch = MicroBatchSize(None, 64), ragged_batch()
        actor = DataParallelPPOActor(compose().actor_rollout_ref.actor, engine, size, size)
        actor.update_policy(batch, update_of(batch, actor.config))
        engine.save(tmp_path / device.type, ["model", "optimizer", "extra"])
        engine.load(tmp_path / device.type)
        actor.update_policy(batch, update_of(batch, actor.config))
        return actor, actor.compute_log_prob(batch, 1.0, ["old_log_probs"]).batch["old_log_probs"]

    _, wanted = stages(CPU)
    monkeypatch.setattr(offload, "put", put_by_swapping)
    with PretendedGPU():
        actor, found = stages(CUDA, True, True)
        assert not any(map(is_on_device, [*actor.engine.module.parameters(), *moments(actor.engine)]))
        batch = ragged_batch()
        at_home = trained_log_probs(actor.engine.module, batch)
        with actor.engine.on_device():
            assert all(map(is_on_device, actor.engine.module.parameters()))
            on_device = trained_log_probs(actor.engine.module, batch)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(at_home, on_device, rtol=1e-5, atol=1e-5)
