"""Each private name of other packages is where the product looks for it; what a run can do without may be absent."""

import ast
import inspect
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.runs import ROOT
from tests.test_architecture import PRIVATE_NAMES
from workers import upstream

FSDP = "torch.distributed.fsdp._fully_shard"
NAMES = [  # module:name; what a class's own methods set is self.NAME, and A|B is in one version or the other
    *("torch:Tensor._is_view", "torch:nn.Module._apply", "torch:_dynamo.config.recompile_limit"),
    *("torch:_dynamo.config.specialize_float", "torch:_dynamo.exc.FailOnRecompileLimitHit"),
    "torch:_dynamo.mark_static",
    *("torch:ops.mkldnn._linear_pointwise", "torch:ops.mkldnn._reorder_linear_weight"),
    *("torch:ops.mkldnn._is_mkldnn_bf16_supported", "torch:ops._C"),
    *("torch._library.triton:__name__", "torch.distributed.tensor._redistribute:__name__"),
    "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    *(f"{FSDP}._fsdp_param:FSDPParam.self.{name}" for name in ("_unsharded_param", "all_gather_outputs")),
    *(f"{FSDP}._fsdp_param_group:FSDPParamGroup.{name}" for name in ("_init_mp_dtypes", "post_backward", "reshard")),
    *(f"{FSDP}._fsdp_param_group:FSDPParamGroup.self.{name}" for name in ("mp_policy", "fsdp_params", "reduce_grads")),
    f"{FSDP}._fsdp_state:FSDPState.self._fsdp_param_groups|self._fsdp_param_group",
    f"{FSDP}._fsdp_param_group:FSDPParamGroup.finalize_backward",
    *(f"{FSDP}._fsdp_state:FSDPState.self.{name}" for name in ("_state_ctx", "_training_state")),
    f"{FSDP}._fsdp_state:FSDPState.self._modules_to_run_forward",
    f"{FSDP}._fsdp_common:TrainingState.IDLE",
    "transformers:PretrainedConfig._attn_implementation",
    "transformers.integrations:PeftAdapterMixin._hf_peft_config_loaded",
    "transformers.integrations.peft:MIN_PEFT_VERSION",
    "transformers.utils.chat_template_utils:_convert_type_hints_to_json_schema",
    *(f"ray.experimental.internal_kv:_internal_kv_{name}" for name in ("get", "put", "del")),
    "ray._private.utils:get_ray_address_file",
    "ray._private.authentication.authentication_token_setup:maybe_enable_token_auth_if_token_available",
    "vllm.distributed.device_communicators.cpu_communicator:_CPUSHMDistributed.make_group_name",
    *(f"asyncio.selector_events:_SelectorTransport.self.{name}" for name in ("_closing", "_conn_lost")),
    *("asyncio.selector_events:_SelectorSocketTransport", "asyncio:SelectorEventLoop._make_socket_transport"),
]  # fmt: skip


def has(target: object, path: str) -> bool:
    for name in path.split("."):
        if name == "self":
            return f"self.{path.rpartition('.')[2]}" in inspect.getsource(target)
        target = getattr(target, name, None)
    return target is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_private_name_is_where_the_product_looks_for_it(name):
    module, _, path = name.partition(":")
    package = module.partition(".")[0]
    pytest.importorskip(package, reason=f"{package} is not installed")
    assert any(has(import_module(module), each) for each in path.split("|")), f"{name} is gone in this version"


def test_every_private_name_of_upstream_is_looked_up():
    files = [ROOT / file for file in PRIVATE_NAMES if (ROOT / file).exists()]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
    used |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    private = {name for name in used if re.fullmatch(r"([\w.]+\.)?_[a-zA-Z][\w.]*", name)}
    looked_up = set(re.findall(r"[\w.]+(?=:)|\w+", " ".join(NAMES)))
    assert private <= looked_up | {"_private"}, "put it into NAMES"


WITHOUT = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, *more):
        return None if name.split(".")[0] in {names} else find(name, *more)
PathFinder.find_spec = Visible.find_spec
"""
NO_SERVICE = ("ray", "fastapi", "uvicorn", "starlette", "hypothesis", "xdist")


def run_without(names: tuple[str, ...], folder: Path, *command: str) -> subprocess.CompletedProcess:
    """Runs Python with `command` where packages of these `names` cannot be imported."""
    (folder / "sitecustomize.py").write_text(WITHOUT.format(names=names))
    environment = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # of those that are hidden
    return subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_a_run_in_this_process_needs_no_ray_and_no_server(tmp_path, tiny_model):
    (tmp_path / "sums.jsonl").write_text('{"prompt": "1+2=", "ground_truth": "3", "data_source": "sums"}\n' * 4)
    (tmp_path / "reward.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None): return 1.0"
    )
    run = ["main.py", f"data.train_files={tmp_path}/sums.jsonl", f"actor_rollout_ref.model.path={tiny_model}"]
    run += [f"reward.custom_reward_function.path={tmp_path}/reward.py", "reward.custom_reward_function.name=score"]
    run += ["data.train_batch_size=4", "data.max_prompt_length=16", "data.max_response_length=2"]
    run += ["actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=1", "trainer.n_threads=1"]
    run.append(f"trainer.default_local_dir={tmp_path}/run")
    done = run_without(NO_SERVICE, tmp_path, *run)
    assert done.returncode == 0, done.stdout + done.stderr
    refused = run_without(NO_SERVICE, tmp_path, *run, "trainer.executor=ray")
    assert refused.returncode == 2 and "error: trainer.executor=ray" in refused.stderr, refused.stdout + refused.stderr


@pytest.mark.slow
def test_tests_are_collected_without_what_a_gpu_machine_may_lack(tmp_path):
    collect = ["-m", "pytest", "--collect-only", "-o", "addopts=", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    done = run_without(NO_SERVICE, tmp_path, *collect, "extras/kernels/tests/test_gpu.py")
    assert done.returncode == 0 and "test_gpu.py::" in done.stdout, done.stdout + done.stderr


def test_ray_is_asked_for_by_its_setting_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"^trainer\.executor=ray.* needs the package ray.*executor=local\.$"):
        upstream.ray.is_initialized()
