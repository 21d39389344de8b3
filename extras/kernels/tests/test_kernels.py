"""The door of extras/kernels/: with what is inside and without it the same numbers, and nothing before it is asked."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from configs.process import VARIABLES
from configs.schema import ActorConfig, ModelConfig
from extras.kernels.decode import decoding, lay_out_weights
from extras.kernels.kernels import Kernels
from extras.kernels.packed_attention import packed_scores
from extras.kernels.products import HAS_BFLOAT16, Linear
from extras.kernels.tests.operations import Operations, needs_onednn
from tests.batches import CUTS, ragged_batch, update_of
from tests.forked import python
from tests.pages import shipped_modules
from tests.runs import ROOT, short_run
from tests.test_architecture import module_of
from workers.dp_actor import DataParallelPPOActor
from workers.engine import TrainEngine
from workers.models import load_causal_lm, load_value_model
from workers.scoring_model import padded_scores


def classes(model: PreTrainedModel) -> set[type]:
    return {type(layer) for layer in model.modules()}


def test_off_leaves_a_model_to_pytorch_and_transformers_until_it_is_prepared(tiny_model: Path):
    settings = ModelConfig(path=str(tiny_model), kernels="off")
    for model in (load_causal_lm(settings), load_value_model(settings, seed=0)):
        assert nn.Linear in classes(model) and not classes(model) & {Linear}
        assert model.config._attn_implementation == "sdpa"
        assert model.token_scores.__func__ is padded_scores and not model.shares_prompts
        before = dict(vars(model.config))
        with decoding(model) as shares_prompts:
            lay_out_weights(model, steps=100, rows=100)
            assert not shares_prompts and vars(model.config) == before
            assert all("stand_in" not in vars(layer) for layer in model.modules())
    policy = load_causal_lm(settings)
    names = list(policy.state_dict())
    assert Kernels().prepare(policy) is packed_scores, "prepared in place"
    assert Linear in classes(policy) and list(policy.state_dict()) == names
    with decoding(policy) as shares_prompts:
        assert shares_prompts


@needs_onednn
def test_in_bfloat16_decoding_has_a_copy_of_the_weights_in_it(tiny_model: Path):
    model = load_causal_lm(ModelConfig(path=str(tiny_model)))
    layer, values = next(part for part in model.modules() if isinstance(part, Linear)), torch.randn(6, 1, 8)
    values = values.expand(6, 1, 8).repeat(1, 1, layer.in_features // 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), decoding(model):
        wanted = layer(values)
        lay_out_weights(model, steps=100, rows=6)
        assert layer.stand_in is not None or not HAS_BFLOAT16
        found = layer(values)
        assert found.dtype == wanted.dtype == torch.bfloat16
        torch.testing.assert_close(found, wanted)


def test_no_gradient_depends_on_which_thread_is_first(tiny_model: Path):
    """No update differentiates `values[rows]`: on CPUs, threads add up the gradient of a repeated row as they come."""
    model, config = load_causal_lm(ModelConfig(path=str(tiny_model))), ActorConfig()
    engine = TrainEngine(model, config.optim, 10, torch.device("cpu"), torch.float32)
    actor, batch = DataParallelPPOActor(config, engine, CUTS["3 rows"], CUTS["24 tokens"]), ragged_batch()
    with Operations() as operations:
        actor.update_policy(batch, update_of(batch, config))
    assert "aten.embedding_dense_backward" in operations.count
    assert not operations.count.keys() & {"aten.index_put", "aten._index_put_impl_"}


PROCESS = """
import gc, os, sys
from importlib import import_module
import gymnasium, torch
from torch.optim import optimizer
from transformers import AttentionInterface
import ray
def state():
    hooks = len(optimizer._global_optimizer_post_hooks)
    return dict(os.environ), gc.get_freeze_count(), torch.get_num_threads(), hooks, len(AttentionInterface())
before = state()
for name in sys.argv[1:]:
    import_module(name)
assert state() == before, (state(), before)
"""


def product_modules() -> list[str]:
    folders = ("configs", "data", "training", "workers", "custom")
    examples = ROOT / "custom" / "examples"  # which need packages of their own
    files = [ROOT / "main.py", *(file for file in shipped_modules(*folders) if examples not in file.parents)]
    modules = [module_of(file.relative_to(ROOT).as_posix()) for file in files]
    return [name for name in modules if name != "extras.openai.vllm_weights"]  # which vLLM's workers alone import


def test_importing_any_module_changes_nothing_of_the_process():
    subprocess.run([sys.executable, "-c", PROCESS, *product_modules()], cwd=ROOT, check=True)


COMMAND = """
import sys
import main
seen, started = [], []
def stop(launch):
    import torch
    seen.append((len(started), torch.get_num_threads()))
main.Launch.init_workers, main.Launch.fit = stop, lambda launch: None
from extras.kernels import kernels
kernels.start_process = lambda: started.append(True)
for threads, kernels in enumerate(("off", "auto"), start=2):
    own = [f"trainer.n_threads={threads}", f"actor_rollout_ref.model.kernels={kernels}"]
    main.main([*sys.argv[1:], *own])
import os
from configs.process import VARIABLES
assert all(os.environ[name] == value for name, value in VARIABLES.items())
print(seen)
"""


def test_a_command_starts_its_process_and_off_leaves_it_at_the_threads(tiny_model, tmp_path):
    """Two commands in one process, first the one that changes less."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    arguments = ("--config-name", "frozenlake", *short_run(tiny_model, tmp_path))
    done = python("-c", COMMAND, *arguments, env=environment, check=True)
    assert done.stdout.splitlines()[-1] == "[(0, 2), (1, 3)]"
