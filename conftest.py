"""Shared by all tests: the environment of a command, and a tiny model, made once."""

import copy
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import pytest

from configs.process import set_environment

ROOT = Path(__file__).parent
pytest_plugins = [  # fixtures of an extra that tests of others use too
    f"extras.{file.parts[-3]}.tests.fixtures" for file in sorted(ROOT.glob("extras/*/tests/fixtures.py"))
]

NEEDS = {  # of tests of scripts, benchmarks and pages, the extras without which they are not collected
    "tests/test_example_agents.py": ("sessions", "tools"),
    "tests/test_docs.py": ("report", "sft", "rollout_correction", "verl"),
    "tests/test_documents.py": ("evaluation", "python", "sft", "tools", "verl"),
    "tests/test_env_wrapper.py": ("gym",),
    "tests/test_games.py": ("gym", "lookahead"),
    "tests/test_learn.py": ("gym", "imitate", "lookahead", "report", "sft", "watch"),
    "tests/test_make_gpu.py": ("kernels", "report"),
    "tests/test_multiturn.py": ("report", "sft", "tools"),
    "tests/test_prime_script.py": ("prime", "report", "sft"),
    "tests/test_quickstart.py": ("report", "sft"),
    "tests/test_reward_template.py": ("rules", "sandbox", "try_reward"),
    "tests/test_reasoning.py": ("report", "sft"),
    "tests/test_smollm2.py": ("report", "sft"),
}
NEEDS |= {  # of an extra's tests, the extras that they import
    str(file): tuple(re.findall(r"^from extras\.(\w+)", file.read_text(), re.MULTILINE))
    for file in ROOT.glob("extras/*/tests/test_*.py")
}
NEEDS[str(ROOT / "extras/imitate/tests/test_rows.py")] = ("gym", "lookahead", "sft")
NEEDS[str(ROOT / "extras/verl/tests/test_against_verl.py")] = ("algorithms", "pf_ppo", "rollout_correction")
collect_ignore = [file for file, names in NEEDS.items() if not all((ROOT / "extras" / name).is_dir() for name in names)]


def pytest_configure() -> None:
    """One thread a process: on tensors as small as these a second gains nothing, and it takes the core of the other
    process of `make test`. What is slow on a busy machine is not for that reason wrong."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    set_environment()  # before torch is loaded
    # Behind `nohup … &` both are ignored, also in the processes that tests start, and send them to.
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, lambda *_: None)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)
    if find_spec("hypothesis"):  # `make gpu` does without
        from hypothesis import settings

        settings.register_profile("any machine", deadline=None)
        settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def shipped_configs_read_once() -> Iterator[None]:
    """A shipped yaml file, with what is chosen of the groups, is composed by Hydra once in a process of tests."""
    from configs import loader

    read, composed = loader.read_yaml, {}

    def read_once(arguments: loader.Arguments, chosen: dict[str, Any]) -> Any:
        if arguments.config_dir != loader.CONFIG_DIR or arguments.settings is not None:
            return read(arguments, chosen)
        key = arguments.config_name, str(sorted(chosen.items()))
        if key not in composed:
            composed[key] = read(arguments, chosen)
        return copy.deepcopy(composed[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "read_yaml", read_once)
        yield


# The longest first. What starts vLLM or Ray is one unit of work, in one process: each is started once, and no two
# clusters of Ray stand side by side, where runs of one would join the other.
ENGINES = (
    *("test_engine_contract.py", "test_vllm_rollout.py", "test_weight_transfer.py"),
    *("test_certificate.py", "test_ray_group.py", "test_cluster.py", "test_golden.py", "test_pools.py"),
    *("test_overlap.py", "test_fully_async.py", "test_restarted.py", "test_trainer.py::test_two_calls"),
    *("test_extras.py::test_the_core_alone_trains_on_ray", "test_packaging.py"),
)
LONG = (
    *("test_docs", "test_extras", "test_user_contracts", "test_contributing", "test_rollout", "test_env_wrapper"),
    *("test_resume", "test_generation", "test_sharding", "test_process_env"),
)


@pytest.hookimpl(optionalhook=True)  # `make gpu` does without xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hands whole files to the processes of `make test`, and ENGINES as if they were one."""
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "engines" if is_of_engines(nodeid) else super()._split_scope(nodeid)

    return Files(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files first, and what uses the Ray cluster together at the end of its unit."""
    longest = [*ENGINES, *(f"{name}.py" for name in LONG)]

    def order(item: pytest.Item) -> tuple[bool, bool, int]:
        engines, name = is_of_engines(item.nodeid), without_folder(item.nodeid)
        rank = next((number for number, start in enumerate(longest) if name.startswith(start)), len(longest))
        return not engines, engines and on_ray(item), rank

    items.sort(key=order)


def is_of_engines(nodeid: str) -> bool:
    return without_folder(nodeid).startswith(ENGINES)


def without_folder(nodeid: str) -> str:
    file, colons, test = nodeid.partition("::")
    return file.rpartition("/")[2] + colons + test


def on_ray(item: pytest.Item | None) -> bool:
    return "cluster" in getattr(item, "fixturenames", ())


@pytest.fixture
def cluster() -> None:
    """Ray as a caller of ours started it, with 2 CPUs: once for all tests in a row that use it. Its workers are forks
    of a process that has their imports done."""
    import ray

    from tests.forked import python_command

    if not ray.is_initialized():
        forks, no_idle_ones = {"py_executable": python_command()}, {"prestart_worker_first_driver": False}
        ray.init(num_cpus=2, include_dashboard=False, runtime_env=forks, _system_config=no_idle_ones)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if on_ray(item) and not on_ray(nextitem):
        import ray

        ray.shutdown()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: character tokenizer, random Llama of one narrow layer."""
    from custom.tiny_model import save_tiny_model

    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, seed=0, hidden_size=32, layers=1)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Any:
    """The tiny model's tokenizer, for the tests of a file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Any:
    """The tiny model as a policy, for the tests of a file, which leave its weights as they are."""
    from configs.schema import ModelConfig
    from workers.models import load_causal_lm

    return load_causal_lm(ModelConfig(path=str(tiny_model)))


@pytest.fixture
def restored_registries() -> Iterator[None]:
    """Forgets after the test what it registers, by hand or by a user's file."""
    from training.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    with patch.dict(ADV_ESTIMATOR_REGISTRY.data), patch.dict(POLICY_LOSS_REGISTRY.data):
        yield


@pytest.fixture(scope="session")
def wide_headed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: as tiny_model, with two layers and heads of 32, the narrowest that vLLM takes."""
    from custom.tiny_model import save_tiny_model

    folder = tmp_path_factory.mktemp("models") / "wide_headed"
    save_tiny_model(folder, seed=0, hidden_size=128, layers=2)
    return folder


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sequence classifier with one output and random weights, whose pad token is the eos, with the same tokenizer."""
    import torch
    from transformers import LlamaForSequenceClassification

    from custom.tiny_model import build_model, build_tokenizer

    folder, tokenizer = tmp_path_factory.mktemp("models") / "reward", build_tokenizer()
    config = build_model(tokenizer, seed=0, hidden_size=32, layers=2).config
    config.num_labels, config.pad_token_id = 1, tokenizer.eos_token_id
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], str]:
    """write(name, text) makes a file of the test's own, of a text that may be indented; its path."""

    def file(name: str, text: str) -> str:
        (tmp_path / name).write_text(textwrap.dedent(text))
        return str(tmp_path / name)

    return file


@pytest.fixture
def reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in with the two functions that are used of the optional package."""
    module = ModuleType("reasoning_gym")

    def create_dataset(name, size=2, seed=0, **settings):
        if name != "sums" or settings:
            raise ValueError(f"Dataset '{name}' not registered")
        entry = {"question": "1+1?", "answer": "2", "metadata": {"source_dataset": "sums"}}
        return [{**entry, "question": f"{seed}+{number}?"} for number in range(size)]

    def get_score_answer_fn(name):
        return lambda answer, entry: 1.0 if answer == entry["answer"] else 0.25

    module.create_dataset, module.get_score_answer_fn = create_dataset, get_score_answer_fn
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Any]:
    """Four ranks, as replicas of shards need; a run of two is in tests/test_ray_group.py."""
    from tests.ranks import Ranks

    ranks = Ranks(4)
    yield ranks
    ranks.pool.shutdown()
