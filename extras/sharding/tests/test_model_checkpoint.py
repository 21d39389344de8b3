"""A model's part of a checkpoint: from any number of ranks to any other, in the background, and what of it cannot be
read. Ranks are real processes over gloo."""

import json
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from configs.errors import ConfigError
from configs.schema import ModelConfig, OptimConfig
from extras.sharding.fsdp2 import Sharding, full_tensor, make_mesh
from extras.sharding.layout import compute_together
from tests.ranks import Ranks
from tests.runs import files_of_at_most
from tests.test_checkpoint import in_child
from training import model_shards
from training.checkpoint import Saver, find_checkpoint, write_sums
from training.model_shards import Shards, save_shards, write_pretrained
from workers.collectives import Peers, gather, group_size
from workers.engine import TrainEngine
from workers.model_checkpoint import moments_of
from workers.models import load_causal_lm
from workers.parallel import Replicas

EVERYTHING = ["model", "optimizer", "extra", "hf_model"]
IDS = torch.tensor([[10, 11, 12, 13, 14]])
CPU = torch.device("cpu")


def make_engine(model: Path, fsdp_size: int = -1, tensor_parallel_size: int = 1) -> TrainEngine:
    if group_size() > 1:
        compute_together(tensor_parallel_size)
    mesh = make_mesh(fsdp_size, CPU, tensor_parallel_size)
    module = load_causal_lm(ModelConfig(path=str(model)), parallel=Sharding(mesh) if mesh else Replicas())
    return TrainEngine(module, OptimConfig(lr=0.01), 10, CPU, torch.float32)


def train(engine: TrainEngine, *steps: int) -> None:
    for step in steps:
        engine.update([engine.module(IDS, labels=IDS).loss * Peers.size / group_size()], step)


def state_of(engine: TrainEngine) -> dict[str, Tensor]:
    """Weights and moments, whole, by name."""
    weights, moments = engine.module.state_dict(), moments_of(engine.module, engine.optimizer)
    return {name: full_tensor(value).clone() for name, value in {**weights, **moments}.items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def saved_engine(model: Path, folder: Path, sizes: tuple[int, int], background: bool) -> tuple[dict, dict]:
    """Saves an engine after a step; its state then, and after two more."""
    engine = make_engine(model, *sizes)
    train(engine, 0)
    state = state_of(engine)
    engine.save(folder, EVERYTHING, background)
    assert bool(engine.checkpoint.pending) == background
    train(engine, 1, 2)
    while not engine.checkpoint.is_saved():
        pass
    return state, state_of(engine)


def loaded_engine(model: Path, folder: Path, *sizes: int) -> tuple[dict, dict]:
    """Loads what was saved: the state, and the one after two more steps."""
    engine = make_engine(model, *sizes)
    train(engine, 5)  # other weights and moments, which have to go
    engine.load(folder)
    state = state_of(engine)
    train(engine, 1, 2)
    return state, state_of(engine)


@pytest.fixture(scope="module")
def on() -> Iterator[Callable]:
    """on(size, function, args…): what it returned on the first of so many ranks; on one, in this process."""
    worlds = {size: Ranks(size) for size in (2, 3)}

    def call(size: int, function: Callable, *args: object) -> object:
        return function(*args) if size == 1 else worlds[size].run(function, *args)[0]

    yield call
    for world in worlds.values():
        world.pool.shutdown()


def assert_goes_on(found: tuple[dict, dict], wanted: tuple[dict, dict]) -> None:
    assert equal(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys()
    for name, value in found[1].items():
        torch.testing.assert_close(value, wanted[1][name], rtol=1e-5, atol=1e-5, msg=name)


def test_two_ranks_checkpoint_is_read_by_one_and_three(tiny_model, tmp_path, on):
    wanted = on(2, saved_engine, tiny_model, tmp_path, (-1, 1), False)
    for size in (1, 3):
        assert_goes_on(on(size, loaded_engine, tiny_model, tmp_path), wanted)
    weights = [path.stat().st_size for path in sorted((tmp_path / "model").iterdir())]
    assert len(weights) == 2 and max(weights) < 1.2 * min(weights)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    assert all(torch.equal(value, wanted[0][name]) for name, value in loaded.state_dict().items())
    assert loaded.config.architectures == ["LlamaForCausalLM"]


def test_replicas_write_once_in_the_background_what_shards_read(tiny_model, tmp_path, on):
    wanted = on(3, saved_engine, tiny_model, tmp_path, (1, 1), True)
    sizes = [path.stat().st_size for path in (tmp_path / "model").iterdir()]
    assert sum(sizes) < 1.2 * (tmp_path / "huggingface/model.safetensors").stat().st_size
    assert_goes_on(on(2, loaded_engine, tiny_model, tmp_path), wanted)
    assert len([*tmp_path.glob("extra_state_world_size_3_rank_*.pt")]) == 3


def refusals(model: Path, folder: Path) -> list[str]:
    """Returns the error of each rank that cannot load what is in `folder`."""
    try:
        make_engine(model).checkpoint.load(folder)
    except ValueError as error:
        return gather(str(error))
    return gather("")


def test_of_two_ranks_one_names_the_shard_in_which_a_bit_was_flipped(tiny_model, tmp_path, on):
    on(2, saved_engine, tiny_model, tmp_path / "actor", (-1, 1), False)
    write_sums(tmp_path)
    files = [*tmp_path.glob("actor/*.pt"), *tmp_path.glob("actor/model/*"), *tmp_path.glob("actor/optim/*")]
    assert len(files) == 6
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
        [said] = filter(None, on(2, refusals, tiny_model, tmp_path / "actor"))
        assert f"file {file} cannot be loaded" in said and "trainer.resume_mode=disable" in said
        file.write_bytes(content)


def save_nowhere(model: Path, folder: Path) -> str:
    with pytest.raises(ConfigError) as refusal:
        make_engine(model).save(folder, [])
    return str(refusal.value)


def test_machines_without_a_common_disk_are_told_so(tiny_model, tmp_path, on):
    said = on(2, save_nowhere, tiny_model, tmp_path / ".writing_global_step_trial" / "actor")
    assert "/.writing_global_step_trial is not there on" in said
    assert "trainer.default_local_dir has to be on a disk that all machines share" in said


@pytest.mark.parametrize("tied", [True, False])
def test_layers_that_were_split_are_put_together_and_split_again(tiny_model, tmp_path, on, tied):
    """Layers split unevenly, into 43 and 42 columns, are whole in a checkpoint; so is a head that is no embedding."""
    model, split = tmp_path / "model", (1, 2)
    config = AutoConfig.from_pretrained(tiny_model, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    wanted = on(2, saved_engine, model, tmp_path / "split", split, True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "split/huggingface")
    assert all(torch.equal(value, wanted[0][name]) for name, value in loaded.state_dict().items())
    for size, sizes in ((1, ()), (2, split), (3, ())):
        assert_goes_on(on(size, loaded_engine, model, tmp_path / "split", *sizes), wanted)
    wanted = on(1, saved_engine, model, tmp_path / "whole", (-1, 1), False)
    assert_goes_on(on(2, loaded_engine, model, tmp_path / "whole", *split), wanted)


@pytest.fixture
def saved(tiny_model: Path, tmp_path: Path) -> Path:
    """The folder of a model that one process has saved after a step."""
    saved_engine(tiny_model, tmp_path / "saved", (-1, 1), False)
    return tmp_path / "saved"


def test_a_part_that_cannot_be_read_is_named_with_the_remedy(tiny_model, saved):
    """Cut short, a pickle in its place, missing, or of another model."""
    engine, ran = make_engine(tiny_model), saved / "ran"
    for name in ("model", "optim"):
        [file] = (saved / name).iterdir()
        whole_file = file.read_bytes()
        for content in (whole_file[:-1], whole_file[:40], b"", pickle.dumps(Code(ran))):
            file.write_bytes(content)
            with pytest.raises(ValueError, match=rf"{file} cannot be loaded \(SafetensorError.*resume_mode=disable"):
                engine.load(saved)
        file.write_bytes(whole_file)
        shutil.move(saved / name, saved / "away")
        with pytest.raises(ValueError, match=rf"file {saved / name} cannot be loaded \(FileNotFoundError"):
            engine.load(saved)
        shutil.move(saved / "away", saved / name)
    torch.save({"x": Code(ran)}, saved / "extra_state_world_size_1_rank_0.pt")
    with pytest.raises(ValueError, match=r"extra_state_world_size_1_rank_0.pt holds Python objects"):
        engine.load(saved)
    assert not ran.exists()


class Code:
    """Writes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


def test_weights_of_another_model_are_named_with_both_shapes(saved, wide_headed_model):
    with pytest.raises(ValueError, match=rf"{saved}/model cannot be loaded \(ValueError: it lacks model.layers.1.*re"):
        make_engine(wide_headed_model).load(saved)
    tensors = {"model.norm.weight": torch.ones(7)}
    shards = Shards(saved / "model")
    with pytest.raises(ValueError, match=r"the run's model has no model\..* and \d+ more"):
        shards.fill(tensors)
    with pytest.raises(ValueError, match=r"norm.weight has shape \(32,\) in the checkpoint, and \(7,\) in this run"):
        shards.fill({name: torch.ones(shape) for name, shape in shards.shapes.items()} | tensors)


def test_an_optimiser_without_moments_yet_is_restored_as_it_was(tiny_model, tmp_path):
    """Loading a checkpoint without moments, as a policy's while only the critic learns, clears the optimiser's."""
    make_engine(tiny_model).save(tmp_path, EVERYTHING)
    engine = make_engine(tiny_model)
    train(engine, 0)
    engine.load(tmp_path)
    assert not engine.optimizer.state


def test_a_tensor_larger_than_a_file_gets_one_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(model_shards, "FILE_BYTES", 100)
    monkeypatch.setattr(model_shards, "PRETRAINED_BYTES", 100)
    tensors = {f"w{size}": torch.randn(size) for size in (30, 10, 15, 40)}
    save_shards(tmp_path / "model", tensors)
    assert len([*(tmp_path / "model").iterdir()]) == 3
    assert equal(Shards(tmp_path / "model").read_all(), tensors)
    write_pretrained(tmp_path / "plain", iter(tensors.items()))
    places = json.loads((tmp_path / "plain/model.safetensors.index.json").read_text())["weight_map"]
    assert {*places.values()} == {f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    assert equal({name: load_file(tmp_path / "plain" / file)[name] for name, file in places.items()}, tensors)


def run_in_background(engine: TrainEngine, root: Path) -> None:
    """Trains three steps, each of which is saved while the next one runs."""
    saver = Saver(root, lambda folder: engine.save(folder, EVERYTHING, True), 2, engine.checkpoint.is_saved)
    for step in (1, 2, 3):
        train(engine, step)
        saver.finish(wait=False)
        saver.save(step)
    saver.finish()


def test_a_kill_while_a_checkpoint_is_written_in_the_background_leaves_the_last_named_whole(tiny_model, tmp_path):
    torch.set_num_threads(1)  # an earlier test may have used two: a forked process has none of them, and would wait
    start, engine, states, found = make_engine(tiny_model), make_engine(tiny_model), {}, set()
    for step in (1, 2, 3):
        train(engine, step)
        states[step] = state_of(engine)
    for number in sorted(random.Random(0).sample(range(1, 95), 10)):  # of about a hundred file operations
        root = tmp_path / str(number)
        broken = in_child(lambda root=root: run_in_background(start, root), number, "kill")
        if folder := find_checkpoint(root, "auto", None):
            step = int(folder.name.rpartition("_")[2])
            engine.load(folder)
            assert equal(state_of(engine), states[step])
            found.add(step)
        assert broken, "it had fewer"
    assert found, "no kill came after a checkpoint was named"


def test_a_disk_that_is_full_in_the_background_costs_one_checkpoint(tiny_model, tmp_path, monkeypatch, caplog):
    engine = make_engine(tiny_model)
    saver = Saver(tmp_path, lambda folder: engine.save(folder, EVERYTHING, True), None, engine.checkpoint.is_saved)
    with files_of_at_most(30_000):  # the generators fit
        assert "training/failed_saves" in saver.save(1) | saver.finish()
    assert "step 1 was not saved" in caplog.text
    assert not [*tmp_path.iterdir()]
    assert not saver.save(2) | saver.finish(), caplog.text
    assert find_checkpoint(tmp_path, "auto", None) == tmp_path / "global_step_2"
