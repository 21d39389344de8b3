"""Ranks in processes of their own, over real gloo, with a share of the rows each and shards of the weights: what comes
out is what one process has."""

import io
import shutil
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import (
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from configs import errors
from configs.errors import ConfigError
from configs.schema import ActorConfig, ModelConfig, PretrainedModelConfig, RolloutConfig
from data.protocol import DataProto
from data.types import Request, SamplingParams
from extras.certificate.certificate import Certificate
from extras.certificate.tests.test_certificate import held_by
from extras.lora.lora import adapter_weights, is_lora, save_pretrained
from extras.reward_model.model import LearnedReward
from extras.reward_model.settings import RewardModelConfig
from extras.sharding import private_names
from extras.sharding.fsdp2 import Sharding, full_tensor, make_mesh, sharded_parts
from extras.sharding.layout import compute_together
from extras.sharding.settings import shard_count
from extras.sharding.tensor_parallel import check_split
from tests.batches import CUTS, TEMPERATURE, ragged_batch, recorded, relative_distance, update_of
from tests.engines import CopyOf
from tests.ranks import Ranks
from tests.test_replicas import LOSSES, OPTIM, assert_the_step_of_one, own_share, save_two_layers, trainer
from workers.collectives import gather, group_size, join_group, rank
from workers.dp_actor import DataParallelPPOActor, ReferencePolicy
from workers.engine import TrainEngine
from workers.forward_check import Trial
from workers.hf_rollout import HFRollout
from workers.micro_batches import MicroBatchSize, cut, score
from workers.models import load_causal_lm, load_value_model
from workers.parallel import Replicas

CPU = torch.device("cpu")
MESHES = {"sharded": (-1, 1), "replicated": (1, 1), "two replicas": (2, 1), "split": (-1, 4), "split shards": (-1, 2)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two_layers(tmp_path_factory.mktemp("models") / "two_layers")


def sharding(mesh: str = "sharded", **kept: Any) -> Replicas:
    """Makes the layout of a run of so many workers; the tests' own process has whole models. `kept`: of `Sharding`."""
    if group_size() == 1:
        compute_together(1)
        return Replicas()
    fsdp_size, parts = MESHES[mesh]
    compute_together(parts)
    return Sharding(make_mesh(fsdp_size, CPU, parts), **kept)


def share(batch: DataProto, first: int) -> DataProto:
    """Returns this rank's rows: `first` of them are the first rank's, the rest the second's; one process has all."""
    if group_size() == 1:
        return batch
    return [batch[:first], batch[first:], batch[:0], batch[:0]][rank()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        ("two replicas", [*LOSSES, "critic"]),
        *((mesh, ["kl_cov", "critic"]) for mesh in ("sharded", "replicated", "split", "split shards")),
    ],
)
def test_ranks_take_the_step_of_one(ranks: Ranks, model: Path, mesh: str, names: list[str]):
    """Ranks take the step of one process and report its metrics, whatever the loss, even where some have no row."""
    assert_the_step_of_one(ranks, model, names, partial(sharding, mesh))


def passes_of(path: Path, batch: DataProto, first: int) -> tuple[int, Tensor, dict[str, float], list[Tensor]]:
    """Forward passes of an update with `share`, what was scored before it, its metrics, and the weights after it."""
    config, passes = LOSSES["vanilla, every term"], []
    worker = trainer(path, config, MicroBatchSize(2, 0), sharding())
    scored = worker.compute_log_prob(share(batch, first), TEMPERATURE, ["old_log_probs"]).batch["old_log_probs"]
    worker.engine.module.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    metrics = worker.update_policy(share(batch, first), update_of(batch, config))
    return len(passes), scored, metrics, [full_tensor(weight.detach()) for weight in worker.engine.module.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("first", [7, 9])
def test_ranks_of_unequal_shares_run_as_many_passes_and_learn_the_same(ranks: Ranks, model: Path, first: int):
    batch = ragged_batch()
    _, scored, metrics, weights = passes_of(model, batch, first)
    found = ranks.run(passes_of, model, batch, first)
    assert {passes for passes, *_ in found} == {-(-max(first, 9 - first) // 2)}
    torch.testing.assert_close(torch.cat([scores for _, scores, *_ in found]), scored, rtol=1e-5, atol=1e-5)
    for _, _, found_metrics, found_weights in found:
        assert found_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        assert relative_distance(found_weights, weights) < 3e-5


def gradient_of(
    path: Path, batch: DataProto, settings: dict[str, Any], kept: dict[str, Any], mesh: str = "sharded"
) -> tuple[Tensor, list[Tensor]]:
    """Scores of this rank's rows, and the whole gradient of an update; `kept` are settings of the shards."""
    config, dtype = LOSSES["vanilla, every term"], kept.get("param_dtype", torch.float32)
    module = load_causal_lm(ModelConfig(path=str(path), **settings), dtype=dtype, parallel=sharding(mesh, **kept))
    assert module.shares_prompts == (settings.get("use_remove_padding", True) and settings.get("kernels") != "off")
    engine = TrainEngine(module, config.optim, 10, CPU, dtype)
    actor = DataParallelPPOActor(config, engine, MicroBatchSize(2, 0), CUTS["24 tokens"])
    own, columns = own_share(batch), ["old_log_probs", "entropys", "sum_pi_squared"]
    scored = actor.compute_log_prob(own, TEMPERATURE, columns).batch
    _, gradient, _ = recorded(engine, lambda: actor.update_policy(own, update_of(batch, config)))
    return torch.stack([scored[name] for name in columns], dim=1), [*map(full_tensor, gradient)]


@pytest.fixture(scope="module")
def uneven(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen 3, which normalises each head's queries and keys by weights that all heads share, with a head of its own:
    neither that one's 102 rows nor its 45 columns can be dealt out evenly to four."""
    folder = tmp_path_factory.mktemp("models") / "uneven"
    sizes = {"hidden_size": 32, "intermediate_size": 45, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    torch.manual_seed(2)
    tokenizer = AutoTokenizer.from_pretrained(model)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "settings", "kept"),
    [
        ("sharded", {}, {"reshard_after_forward": False}),
        ("sharded", {}, {"offload": True}),
        ("sharded", {"use_remove_padding": False}, {}),
        ("sharded", {"kernels": "off"}, {}),
        ("sharded", {"enable_gradient_checkpointing": True}, {}),
        ("split", {}, {}),
        ("split shards", {}, {}),
        ("split shards", {"use_remove_padding": False}, {}),
        ("split shards", {"enable_gradient_checkpointing": True}, {}),
    ],
)
def test_shards_and_parts_of_layers_have_the_gradient_of_one_process(ranks, uneven, mesh, settings, kept):
    """Log-probs, entropies, gradient are one process's, where parts are uneven, and where all heads share a weight."""
    batch, peers = ragged_batch(), MESHES[mesh][1]
    scored, wanted = gradient_of(uneven, batch, settings, kept)
    found = ranks.run(gradient_of, uneven, batch, settings, kept, mesh)
    torch.testing.assert_close(torch.cat([scores for scores, _ in found[::peers]]), scored, rtol=1e-5, atol=1e-5)
    for _, gradient in found:
        assert relative_distance(gradient, wanted) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reduced", "limit"),
    [({"enable_gradient_checkpointing": True}, torch.float32, 1.4), ({"kernels": "off"}, torch.bfloat16, 1.5)],
)
def test_weights_gathered_in_bfloat16_change_a_gradient_as_rounding_in_products_does(
    ranks: Ranks, model: Path, settings: dict[str, Any], reduced: torch.dtype, limit: float
):
    """A gradient by gathered bfloat16 weights is about as far from that of float32 as one process's in bfloat16."""
    batch, kept = ragged_batch(), {"param_dtype": torch.bfloat16, "reduce_dtype": reduced}
    exact, gradient = gradient_of(model, batch, settings, {})
    rounded, of_rounded = gradient_of(model, batch, settings, kept)
    found = ranks.run(gradient_of, model, batch, settings, kept)
    assert (torch.cat([seen for seen, _ in found]) - exact).abs().max() < 1.5 * (rounded - exact).abs().max()
    for _, of_rank in found:
        assert relative_distance(of_rank, of_rounded) > 0
        assert relative_distance(of_rank, gradient) < limit * relative_distance(of_rounded, gradient)


def gathered(path: Path) -> tuple[list[torch.dtype], bool, bool]:
    """Returns the types that a model's weights are gathered in to train and for generation, and where they cannot be
    multiplied so; whether for generation they are those of the shards, and whether it scores where they could not."""
    low, size = torch.bfloat16, CUTS["all rows"]
    module = load_causal_lm(ModelConfig(path=str(path)), dtype=low, parallel=sharding(param_dtype=low))
    shards, seen = [full_tensor(weight) for weight in module.parameters()], []
    module.model.norm.register_forward_pre_hook(lambda norm, _: seen.append(norm.weight.dtype))
    policy = TrainEngine(module, OPTIM, 10, CPU, low)
    with policy.autocast():
        score(module, ragged_batch(), size, TEMPERATURE)
    with module.parallel.full_weights(module):
        wanted = score(module, ragged_batch(), size, TEMPERATURE).log_probs
        same = all(map(torch.equal, module.parameters(), shards))
    with policy.autocast():
        score(module, ragged_batch(), size, TEMPERATURE)
    module = load_causal_lm(ModelConfig(path=str(path)), parallel=sharding(param_dtype=low))
    found = score(module, ragged_batch(), size, TEMPERATURE).log_probs
    return [*seen, module.param_dtype], same, torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_weights_are_gathered_in_float32_for_generation_and_where_bfloat16_cannot_be(ranks: Ranks, model: Path):
    low, exact = torch.bfloat16, torch.float32
    assert ranks.run(gathered, model) == [([low, exact, low, exact], True, True)] * 4


def devices(path: Path) -> list[set[torch.device]]:
    """Returns the devices of an offloaded model's shards, and of the micro-batches that it is given."""
    module = load_causal_lm(ModelConfig(path=str(path)), parallel=sharding(offload=True))
    module.computes_on = torch.device("meta")  # as a GPU would be
    [micro] = cut(ragged_batch(), CUTS["all rows"], [], module)
    return [{tensor.device for tensor in tensors} for tensors in (module.parameters(), micro.columns.values())]


def test_rows_go_where_a_model_computes_and_not_where_its_shards_are_kept(ranks: Ranks, model: Path):
    assert ranks.run(devices, model) == [[{CPU}, {torch.device("meta")}]] * 4


def log_probs_of(batch: DataProto, **settings: Any) -> Tensor:
    return score(load_causal_lm(ModelConfig(**settings)), batch, CUTS["24 tokens"], TEMPERATURE).log_probs


def adapted(
    path: Path, adapter: Path, batch: DataProto, folder: Path
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Trains with LoRA; returns the reference's log-probs of this rank's rows, the whole gradient of an update, and the
    weights for an engine; leaves adapter and merged model in `folder`."""
    config, size = LOSSES["vanilla, every term"], CUTS["24 tokens"]
    module = load_causal_lm(ModelConfig(path=str(path), lora_adapter_path=str(adapter)), parallel=sharding())
    engine = TrainEngine(module, config.optim, 10, CPU, torch.float32)
    reference = ReferencePolicy(module, size, engine.autocast, engine.on_device_without_adapter)
    own = own_share(batch)
    scored = reference.compute_log_prob(own, TEMPERATURE, ["ref_log_prob"]).batch["ref_log_prob"]
    actor = DataParallelPPOActor(config, engine, MicroBatchSize(2, 0), size)
    weights = {name: weight.clone() for name, weight in engine.weights()}
    _, gradient, _ = recorded(engine, lambda: actor.update_policy(own, update_of(batch, config)))
    engine.save(folder, ["hf_model"])
    return scored, [*map(full_tensor, gradient)], weights


def fresh_adapter(path: Path) -> dict[str, Tensor]:
    torch.manual_seed(3)
    return dict(adapter_weights(load_causal_lm(ModelConfig(path=str(path), lora_rank=4), parallel=sharding())))


@pytest.mark.slow
@pytest.mark.parametrize("experts", [False, True])
def test_lora_in_shards_has_the_start_the_gradient_the_reference_and_the_weights_of_one_process(
    ranks: Ranks, model: Path, tmp_path: Path, experts: bool
):
    """LoRA is right beside experts, too, one tensor that ranks do not divide evenly, with a gate of one row."""
    if experts:
        torch.manual_seed(4)
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
        routed = {"num_experts": 3, "num_experts_per_tok": 2}
        routed |= {f"{kind}_intermediate_size": 16 for kind in ("moe", "shared_expert")}
        Qwen2MoeForCausalLM(Qwen2MoeConfig(vocab_size=102, **sizes, **routed)).save_pretrained(tmp_path / "experts")
        AutoTokenizer.from_pretrained(model).save_pretrained(model := tmp_path / "experts")
    torch.manual_seed(0)
    start = load_causal_lm(ModelConfig(path=str(model), lora_rank=4))
    for name, weight in start.named_parameters():
        if is_lora(name):
            torch.nn.init.normal_(weight, std=0.2)
    save_pretrained(start, dict(adapter_weights(start)), tmp_path)
    batch, adapter, alone, together = ragged_batch(), tmp_path / "lora_adapter", tmp_path / "1", tmp_path / "4"
    scored, wanted, weights = adapted(model, adapter, batch, alone)
    assert torch.equal(scored, log_probs_of(batch, path=str(model)))
    found = ranks.run(adapted, model, adapter, batch, together)
    torch.testing.assert_close(torch.cat([seen for seen, *_ in found]), scored, rtol=1e-5, atol=1e-5)
    for _, gradient, handed in found:
        assert relative_distance(gradient, wanted) < 1e-5
        assert handed.keys() == weights.keys()
        assert relative_distance([handed[name] for name in weights], [*weights.values()]) < 1e-6
    saved = log_probs_of(batch, path=str(model), lora_adapter_path=str(together / "lora_adapter"))
    start, started = fresh_adapter(model), ranks.run(fresh_adapter, model)
    assert all(torch.equal(found[name], value) for found in started for name, value in start.items())
    for folder, tolerance in ((together, 1e-5), (alone, 1e-4)):
        merged = log_probs_of(batch, path=str(folder / "huggingface"))
        torch.testing.assert_close(merged, saved, rtol=0, atol=tolerance)


def refuse(path: Path, batch: DataProto, dtype: torch.dtype) -> list[tuple[dict[str, float], bool]]:
    """An update in which the last row's loss is not finite and one in which all are; whether the weights stayed."""
    worker, found = trainer(path, ActorConfig(optim=OPTIM), CUTS["1 row"], sharding(param_dtype=dtype), dtype), []
    for bad in (True, False):
        before = [full_tensor(weight).clone() for weight in worker.engine.module.parameters()]
        given = DataProto(batch.batch.clone())
        if bad:
            given.batch["advantages"][-1] = torch.inf
        metrics = worker.update_policy(own_share(given), update_of(given, worker.config))
        after = [full_tensor(weight) for weight in worker.engine.module.parameters()]
        found.append((metrics, all(map(torch.equal, before, after))))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_a_loss_that_is_not_finite_on_one_rank_is_refused_by_all_and_the_next_is_taken(ranks, model, dtype, rounding):
    [_, (wanted, _)] = refuse(model, ragged_batch(), dtype)
    for (refused, stayed), (taken, same) in ranks.run(refuse, model, ragged_batch(), dtype):
        assert refused["actor/skipped_updates"] == 1 and stayed
        assert not same and taken == pytest.approx(wanted, rel=rounding, abs=rounding / 100)


def held(path: Path, mesh: str, dtype: torch.dtype) -> tuple[int, int, int]:
    """Numbers of a whole model, of this rank's weights, and of its moments after a step."""
    worker = trainer(path, ActorConfig(optim=OPTIM), CUTS["all rows"], sharding(mesh, param_dtype=dtype), dtype)
    batch = ragged_batch()
    worker.update_policy(own_share(batch), update_of(batch, worker.config))
    weights = [*worker.engine.module.parameters()]
    moments = [state[name] for state in worker.engine.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert all(isinstance(tensor, DTensor) for tensor in (*weights, *moments))
    here = [sum(tensor.to_local().numel() for tensor in tensors) for tensors in (weights, moments)]
    return sum(weight.numel() for weight in weights), *here


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "shards", "parts", "dtype"),
    [
        *(("sharded", 4, 1, dtype) for dtype in (torch.float32, torch.bfloat16)),
        ("two replicas", 2, 1, torch.float32),
        ("replicated", 1, 1, torch.float32),
        ("split shards", 2, 2, torch.float32),
    ],
)
def test_a_rank_holds_its_share_of_weights_and_moments(ranks, folders, mesh, shards, parts, dtype):
    for total, weights, moments in ranks.run(held, folders["untied"], mesh, dtype):
        assert moments == 2 * weights and (parts > 1 or weights == pytest.approx(total / shards, rel=0.02))


def loaded(path: Path, of_critic: bool) -> tuple[str, dict[str, Tensor], bool, str]:
    """The notices of a load; the weights that are loaded, whole; whether weights are tied; the name of the class."""
    settings = ModelConfig(path=str(path))
    errors.noticed.clear()  # by tests before this one, in the same process
    with torch.random.fork_rng(), redirect_stderr(io.StringIO()) as said:
        torch.manual_seed(5)  # for weights that the folder lacks
        if of_critic:
            model = load_value_model(settings, 3, parallel=sharding())
        else:
            model = load_causal_lm(settings, parallel=sharding())
    names = {id(weight): name for name, weight in model.named_parameters(remove_duplicate=False)}
    tied = len(names) < len([*model.named_parameters(remove_duplicate=False)])
    weights = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    weights |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return said.getvalue(), weights, tied, type(model).__name__


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models by how they are read: under their own names from one file and from several, tied and not; without a weight
    that has to be drawn; in torch's old format."""
    root = tmp_path_factory.mktemp("folders")
    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(1)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    untied = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads))
    for name, size in (("untied", "1GB"), ("several files", "20KB")):
        untied.save_pretrained(root / name, max_shard_size=size)
    plain = LlamaForCausalLM.from_pretrained(model)
    state = plain.state_dict()
    del state["model.norm.weight"]
    plain.save_pretrained(root / "one missing", state_dict=state)
    shutil.copytree(model, root / "old format", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(plain.state_dict(), root / "old format" / "pytorch_model.bin")
    for folder in root.iterdir():
        tokenizer.save_pretrained(folder)
    return {"tied": model, **{folder.name: folder for folder in root.iterdir()}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trouble"),
    [
        *(("tied", ""), ("untied", ""), ("several files", "")),
        *(("one missing", "lack model.norm.weight"), ("old format", "are missing"), ("critic", "lack score.bias")),
    ],
)
def test_shards_are_loaded_as_a_whole_model_is(ranks: Ranks, folders: dict[str, Path], name: str, trouble: str):
    path = folders.get(name, folders["tied"])
    _, weights, tied, kind = loaded(path, name == "critic")
    assert tied == (name in ("tied", "one missing", "old format"))
    for place, (said, found, *others) in enumerate(ranks.run(loaded, path, name == "critic")):
        assert others == [tied, kind]
        assert found.keys() == weights.keys()
        for key, weight in weights.items():
            assert torch.equal(found[key], weight), key
        assert ("is read whole" in said) == (place == 0 and trouble != "")
        assert place > 0 or not trouble or (f"{kind} is read whole by the first worker" in said and trouble in said)


def shares_prompts(path: Path) -> bool:
    """Says whether the packed forward is taken, where one rank alone finds that it scores otherwise."""
    scores, packed = Trial.scores, lambda check, *_: check.model.shares_prompts
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.setattr(Trial, "scores", lambda *args, **mode: scores(*args, **mode) + packed(*args))
        return load_causal_lm(ModelConfig(path=str(path)), parallel=sharding()).shares_prompts


def test_a_forward_that_one_rank_refuses_is_taken_by_none(ranks: Ranks, model: Path):
    """All ranks have to take part in the trials that follow, so all refuse what one of them refuses."""
    assert ranks.run(shares_prompts, model) == [False] * 4


def sampled(path: Path, rows: list[int]) -> tuple[dict[int, tuple[list[int], list[float]]], Tensor, bool]:
    """Returns what the hf engine draws for this rank's number of `rows`; log-probs of a batch, before and after the
    same; whether the model is in shards then."""
    model = load_causal_lm(ModelConfig(path=str(path)), parallel=sharding())
    config = RolloutConfig(prompt_length=8, response_length=6)
    before = score(model, ragged_batch(), CUTS["3 rows"], TEMPERATURE).log_probs
    again = load_causal_lm(ModelConfig(path=str(path)), parallel=sharding(), sibling=model)  # as a reference is
    assert torch.equal(score(again, ragged_batch(), CUTS["3 rows"], TEMPERATURE).log_probs, before)
    assert all(weight.grad is None for weight in model.parameters()), "gradients of the trial are held"
    with model.parallel.full_weights(model):
        engine = HFRollout(config, AutoTokenizer.from_pretrained(path), model)
    with model.parallel.full_weights(model):
        asked = [Request(i, [7, 9 + i, 5], SamplingParams(True, 1.0, -1, 1.0, 6), seed=i) for i in range(rows[rank()])]
        done = {completion.id: (completion.token_ids, completion.log_probs) for completion in engine.generate(asked)}
        with TrainEngine(model, OPTIM, 10, CPU, torch.bfloat16).autocast():
            assert torch.is_autocast_cache_enabled()
    with TrainEngine(model, OPTIM, 10, CPU, torch.bfloat16).autocast():
        assert torch.is_autocast_cache_enabled() is (group_size() == 1), "cast weights would be a whole copy"
    in_shards = all(isinstance(weight, DTensor) for weight in model.parameters())
    assert torch.equal(score(model, ragged_batch(), CUTS["3 rows"], TEMPERATURE).log_probs, before)
    return done, before, in_shards


@pytest.mark.slow
def test_sampling_from_gathered_weights_is_sampling_from_the_model(ranks: Ranks, model: Path):
    """Ranks draw as the whole model does, though they have different numbers of rows, and so of forward passes."""
    rows = [0, 2, 5, 1]
    wanted, scored, _ = sampled(model, [max(rows)])
    for count, (done, scores, in_shards) in zip(rows, ranks.run(sampled, model, rows), strict=True):
        assert in_shards and len(done) == count
        torch.testing.assert_close(scores, scored, rtol=1e-5, atol=1e-5)
        for number, (tokens, log_probs) in done.items():
            assert tokens == wanted[number][0] and log_probs == pytest.approx(wanted[number][1], abs=1e-5)


def handed_over(path: Path, mesh: str) -> dict[str, Tensor]:
    """The weights for an engine, after a step."""
    worker, batch = trainer(path, ActorConfig(optim=OPTIM), CUTS["all rows"], sharding(mesh)), ragged_batch()
    worker.update_policy(own_share(batch), update_of(batch, worker.config))
    return {name: weight.clone() for name, weight in worker.engine.weights()}


def certify(path: Path, mesh: str) -> list[Any]:
    """Syncs of an engine that samples from the shards, gathered, and of one with a copy, which every second rank leads;
    the last of which brings one matrix as it was."""
    module = load_causal_lm(ModelConfig(path=str(path)), parallel=sharding(mesh))
    name = "model.layers.1.mlp.up_proj.weight"
    policy = TrainEngine(module, OPTIM, 10, CPU, torch.float32)
    make = partial(HFRollout, RolloutConfig(prompt_length=8, response_length=4), AutoTokenizer.from_pretrained(path))
    with module.parallel.full_weights(module):
        syncs = [Certificate(make(module), policy)]
    copy = load_causal_lm(ModelConfig(path=str(path)))
    syncs.append(Certificate(CopyOf(make(copy), copy, leads=rank() % 2 == 0, held=held_by), policy))
    found = [sync.update(1) for sync in syncs]
    old = {name: full_tensor(dict(module.named_parameters())[name]).clone()}
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(1e-6)
    found += [sync.update(2) for sync in syncs]
    assert syncs[1].is_comparable and syncs[1].engine_sums.total() == syncs[1].trained.total()
    with module.parallel.full_weights(module):
        syncs[0].check_gathered()
    assert syncs[0].gathered == syncs[0].trained
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(1e-6)
    syncs[0].gathered = None  # what is gathered now is of another version than that of the sync
    with module.parallel.full_weights(module), pytest.raises(RuntimeError, match="from all workers, are not those"):
        syncs[0].check_gathered()
    new = dict(policy.weights()) | {name: old[name]}
    policy.weights = lambda merged: new.items()
    with pytest.raises(RuntimeError, match="the numbers that it holds are not these"):
        syncs[1].update(3)
    return found


@pytest.mark.parametrize("mesh", ["sharded", "split shards"])
def test_a_sync_of_shards_is_certified_by_all_ranks(ranks: Ranks, uneven: Path, mesh: str):
    """Ranks whose engine is led by another rank certify by the probe of that leader."""
    for found in ranks.run(certify, uneven, mesh):
        assert [metrics["rollout/weight_version"] for metrics in found] == [1, 1, 2, 2]
        probed = [metrics.get("rollout/sync_max_logprob_diff") for metrics in found]
        assert probed[2] is None and max(probed[:2] + probed[3:]) < 1e-5


@pytest.mark.parametrize(
    ("mesh", "family", "head"),
    [("sharded", "llama", "lm_head"), ("split shards", "llama", "lm_head"), ("sharded", "gpt_neox", "embed_out")],
)
def test_an_engine_is_handed_whole_weights_under_all_their_names(ranks, model, tmp_path, mesh, family, head):
    """Weights have the names of a checkpoint, also of a GPT-NeoX, whose head transformers calls otherwise."""
    if family == "gpt_neox":
        torch.manual_seed(5)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"vocab_size": 102, "attention_bias": False}  # keys' has a gradient of rounding alone
        GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)).save_pretrained(model := tmp_path)
    wanted = handed_over(model, mesh)
    assert f"{head}.weight" in wanted
    for found in ranks.run(handed_over, model, mesh):
        assert found.keys() == wanted.keys()
        for name, weight in wanted.items():  # which a step moves by the learning rate, a gradient of roundings too
            torch.testing.assert_close(found[name], weight, rtol=0, atol=OPTIM.lr / 10)


def rewards(path: Path, tokenizer: Path, batch: DataProto, first: int) -> Tensor:
    settings = RewardModelConfig(enable=True, model=PretrainedModelConfig(path=str(path)), micro_batch_size_per_gpu=2)
    model = LearnedReward(settings, AutoTokenizer.from_pretrained(tokenizer), CPU, parallel=sharding())
    return torch.cat(gather(model.compute_rm_score(share(batch, first)).batch["rm_scores"]))


@pytest.mark.slow
def test_a_sharded_reward_model_scores_as_a_whole_one(ranks: Ranks, reward_model: Path, model: Path):
    """Rewards are the whole model's, though ranks have different numbers of rows, and so of forward passes."""
    wanted = rewards(reward_model, model, ragged_batch(), 7)
    for found in ranks.run(rewards, reward_model, model, ragged_batch(), 7):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_workers_are_dealt_out_to_shards_in_whole_groups():
    for asked, workers, shards in ((-1, 4, 4), (1, 4, 1), (2, 4, 2), (8, 4, 4), (3, 3, 3)):
        assert shard_count(asked, workers) == shards
    for asked, workers in ((3, 4), (2, 3), (0, 2)):
        with pytest.raises(ConfigError, match=rf"fsdp_size={asked}: .*{workers} workers cannot be dealt out"):
            shard_count(asked, workers)


def of_heads(heads: int, key_heads: int) -> LlamaConfig:
    return LlamaConfig(hidden_size=576, num_attention_heads=heads, num_key_value_heads=key_heads)


@pytest.mark.parametrize(
    ("config", "size", "said"),
    [
        (of_heads(9, 3), 2, "9 heads, 3 key heads"),
        (of_heads(4, 1), 2, "4 heads, 1 key heads"),
        (of_heads(9, 3), 3, "2 a machine cannot be dealt out in groups of 3"),
        (Phi3Config(), 2, "the layers of phi3 cannot be split"),
    ],
)
def test_a_model_that_does_not_split_is_refused_with_its_numbers_or_its_family(config, size: int, said: str):
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size}: .*{said}"):
        check_split(config, size, workers_a_node=2)


def test_a_rank_that_does_not_come_is_not_waited_for_longer_than_asked():
    with pytest.raises(dist.DistError, match=r"(?i)timed out after 1 seconds|timeout"):
        join_group(dist.HashStore(), rank=0, size=2, timeout=1)
    assert group_size() == 1


def test_one_process_is_a_group_of_one_and_is_not_wrapped(model: Path):
    assert (group_size(), rank(), gather("x"), make_mesh(-1, CPU)) == (1, 0, ["x"], None)
    module = load_causal_lm(ModelConfig(path=str(model)))
    assert not sharded_parts(module)
    with module.parallel.full_weights(module):
        assert not any(isinstance(weight, DTensor) for weight in module.parameters())


def part_of_torch_2_11(monkeypatch: pytest.MonkeyPatch, group: SimpleNamespace | None) -> SimpleNamespace:
    state = SimpleNamespace(_fsdp_param_group=group)
    monkeypatch.setattr(torch.distributed.fsdp.fully_shard, "state", lambda part: state)
    return SimpleNamespace()


def test_the_groups_of_a_part_are_a_list_in_every_version(monkeypatch):
    part = part_of_torch_2_11(monkeypatch, None)
    assert private_names.fsdp_state(part)[1] == []
    group = SimpleNamespace()
    assert private_names.fsdp_state(part_of_torch_2_11(monkeypatch, group))[1] == [group]


@pytest.mark.parametrize(
    ("grad", "summed", "expected"),
    [(None, None, [0.0, 0.0]), ([1.0, 2.0], None, [1.0, 2.0]), (None, [3.0, 4.0], None)],
)
def test_torch_2_11_sums_zeros_of_weights_that_a_rank_did_not_use(grad, summed, expected, monkeypatch):
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = None if grad is None else torch.tensor(grad)
    held = SimpleNamespace(_unsharded_param=weight, unsharded_accumulated_grad=summed)
    sent = []
    group = SimpleNamespace(fsdp_params=[held, SimpleNamespace()], reduce_grads=True, comm_ctx=None)
    group.post_backward = lambda: sent.append(weight.grad)
    private_names.sum_unused(part_of_torch_2_11(monkeypatch, group))
    group.post_backward()
    [gradient] = sent
    assert (gradient is None) if expected is None else gradient.tolist() == expected
