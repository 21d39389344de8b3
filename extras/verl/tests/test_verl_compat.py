"""Names that code written for verl imports: verl's numbers, and agreement with what the project itself uses."""

import importlib
import math
import re
import sys
from uuid import UUID

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import extras.rules.gsm8k
import training.api
import training.core_algos
from configs.schema import RewardConfig, RewardFunctionConfig
from data.protocol import DataProto, object_array
from data.tools import BaseTool
from extras.verl.compat import (
    ActorConfig,
    OpenAIFunctionParametersSchema,
    OpenAIFunctionSchema,
    OpenAIFunctionToolSchema,
    compute_entropy_loss,
    compute_policy_loss,
    compute_policy_loss_reinforce,
    deserialize_single_tensor,
    pad_dataproto_to_divisor,
    serialize_single_tensor,
    unpad_dataproto,
)
from extras.verl.imports import StandIns, names_of_verl
from extras.verl.numerics import as_torch_index
from tests.batches import close
from tests.forked import python
from tests.test_protocol import CustomProto, assert_same, few, make, rows
from training.core_algos import get_policy_loss_fn
from training.reward import load_reward_manager

StandIns.install()  # as the first of a user's files does
# verl's anchor of the policy losses (spec 12.2): old log-probs, new ones, advantages, mask.
ANCHOR = (
    torch.tensor([[0.5, 0.4, 0.3, 0.2], [0.6, 0.2, 0.1, 0.9]]).log(),
    torch.tensor([[0.6, 0.2, 0.9, 0.2], [0.3, 0.25, 0.1, 0.9]]).log(),
    torch.tensor([[1.0, -1.0, -2.0, 1.0], [0.5, 0.5, -0.5, 1.0]]),
    torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 9), st.integers(1, 9))
def test_padding_repeats_from_the_first_row_and_unpadding_drops_it(n, divisor):
    data = DataProto.from_single_dict({"obs": torch.arange(n), "label": [f"r{i}" for i in range(n)]}, {"name": "abc"})
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) == math.ceil(n / divisor) * divisor == n + pad_size  # an empty batch stays empty
    assert padded.obs.tolist() == [i % n for i in range(len(padded))]
    assert padded.label.tolist() == [f"r{i % n}" for i in range(len(padded))]
    assert padded.meta_info is data.meta_info
    assert (padded is data) == (pad_size == 0)
    unpadded = unpad_dataproto(padded, pad_size)
    assert unpadded.obs.tolist() == data.obs.tolist() and unpadded.label.tolist() == data.label.tolist()


@pytest.mark.parametrize(
    ("labels", "numbers"),
    [
        ([2, 2, 7, 5], [2, 2, 7, 5]),
        (torch.tensor([[3, 0], [3, 1]], dtype=torch.uint8), [3, 0, 3, 1]),
        (np.array([1.0000001, 2.0, 0.9999999]), [1, 2, 1]),
        (np.array([4, 9], dtype=object), [4, 9]),
        (torch.tensor([1.5, 1.2, 2.7]), [1, 0, 2]),
        ([UUID(int=9), UUID(int=3), UUID(int=9)], [1, 0, 1]),
        (np.array(["b", 3, "a", "b"], dtype=object), [2, 0, 1, 2]),
        ([], []),
    ],
)
def test_labels_become_numbers(labels, numbers):
    codes = as_torch_index(labels)
    assert codes.dtype == torch.int64 and codes.tolist() == numbers


def test_losses_are_called_as_verls_own_tests_call_them():
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size=2, clip_ratio=0.2)
    names = ("rollout_log_prob", "log_prob", "advantages", "response_mask")
    given = dict(zip(names, ANCHOR, strict=True), config=config)
    for mode, loss in (("vanilla", 0.607143), ("gspo", 0.241507), ("cispo", -0.094284), ("geo_mean", 0.312173)):
        close(get_policy_loss_fn(mode)(*ANCHOR, config=config)[0], loss)
    close(compute_policy_loss_reinforce(**given)[0], -(ANCHOR[2] * ANCHOR[1] * ANCHOR[3]).sum() / 2)
    with pytest.raises(TypeError, match="clip_ration"):
        ActorConfig(clip_ration=0.1)
    low_and_high = compute_policy_loss(*ANCHOR, cliprange_low=0.05, cliprange_high=0.05)
    assert compute_policy_loss(*ANCHOR, 0.05) == low_and_high
    assert low_and_high != compute_policy_loss(*ANCHOR, 0.05, cliprange_high=0.4) != compute_policy_loss(*ANCHOR, 0.4)
    with pytest.raises(ValueError, match="pass cliprange, or both"):
        compute_policy_loss(*ANCHOR, cliprange_low=0.2)


def test_entropy_of_masked_nans_is_none_of_the_loss():
    """extras/verl/tests/versus.py has its numbers."""
    mask = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]])
    logits = torch.randn(3, 3, 5).masked_fill(mask[..., None] == 0, math.nan).requires_grad_()
    loss = compute_entropy_loss(logits, mask)
    [gradient] = torch.autograd.grad(loss, logits)
    assert loss.isfinite() and not gradient[mask == 0].any() and gradient[mask == 1].all()


# `import verl` in a user's file


def test_every_name_of_verl_in_the_table_is_there():
    for module, names in names_of_verl().items():
        for name in names:
            assert getattr(importlib.import_module(module), name, None) is not None, f"{module}.{name}"


ABSENT = [  # (an import, how its error goes on)
    ("from verl.protocol import BatchData", "verl.protocol.BatchData is not here: use what the roles return"),
    ("from verl.models.transformers.llama import Llama", "verl.models is not here: use transformers' Auto"),
    ("from verl.utils.reward_score import gsm8kk", "Did you mean verl.utils.reward_score.gsm8k?"),
    ("from verl.trainer.ppo.ray_trainer import apply_kl_penalty", "use training.advantage.kl_in_reward"),
    ("from verl.trainer.ppo.v1.trainer_base import PPOTrainer", "subclass RayPPOTrainer (trainer.cls=FILE)"),
    ("from verl.workers import RolloutWorker", "use training.api.GRPOTrainer(model, reward, rows).generate(prompts)"),
    ("from verl.workers.rollout.vllm_rollout import vLLMRollout", "use actor_rollout_ref.rollout.name=vllm"),
    ("import verl.nothing.at_all", "extras/verl/names.yaml lists the names of verl that are"),
]


@pytest.mark.parametrize(("line", "said"), ABSENT)
def test_a_name_that_is_not_here_is_an_import_error_of_one_line(line, said):
    with pytest.raises(ImportError, match=re.escape(said)) as caught:
        exec(line, {})
    assert "\n" not in str(caught.value)


def test_the_forms_of_import_give_our_own_objects():
    names = {}
    exec("from verl.utils.reward_score import gsm8k\nimport verl.utils.torch_functional as verl_F\nimport verl", names)
    assert names["gsm8k"].compute_score is extras.rules.gsm8k.compute_score
    assert names["verl_F"].masked_mean is training.core_algos.masked_mean
    assert names["verl"].utils.reward_score.search_r1_like_qa_em.subem_check("The cat sat", ["a dog", "cat"]) == 1
    assert names["verl"].GRPOTrainer is training.api.GRPOTrainer and names["verl"].trainer.TrainingConfig
    assert names["verl"].DataProto is DataProto and names["verl"].utils.fs.copy_to_local("a") == "a"
    assert not hasattr(names["verl"], "nothing")
    exec("from verl.trainer.ppo.core_algos import *\nfrom verl.utils import hf_processor, hf_tokenizer", names)
    assert names["agg_loss"] is training.core_algos.agg_loss and names["hf_processor"]("m") is None
    with pytest.raises(AttributeError, match="cannot be replaced from outside"):
        names["verl"].trainer.ppo.core_algos.agg_loss = None


@pytest.mark.parametrize(("init", "found"), [("__init__.py", "real"), ("README.md", None)])
def test_an_installed_verl_goes_first_and_the_folder_of_a_clone_does_not(tmp_path, monkeypatch, init, found):
    (tmp_path / "verl").mkdir()
    (tmp_path / "verl" / init).write_text("kind = 'real'")
    monkeypatch.syspath_prepend(tmp_path)
    kept = {name: sys.modules.pop(name) for name in [*sys.modules] if f"{name}.".startswith("verl.")}
    module = importlib.import_module("verl")
    assert module.kind == "real" if found else module.DataProto is DataProto
    for name in [name for name in sys.modules if f"{name}.".startswith("verl.")]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_a_function_that_imports_when_it_is_called_does_so_in_a_process_of_its_own(tmp_path):
    (tmp_path / "late.py").write_text(
        "def compute_score(solution_str, ground_truth):\n"
        "    from verl.utils.reward_score import gsm8k\n"
        "    return gsm8k.compute_score(solution_str, ground_truth)\n"
    )
    reward = load_reward_manager(RewardConfig(RewardFunctionConfig(str(tmp_path / "late.py"))), None, None)
    assert reward(DataProto.from_single_dict({"responses": ["#### 4", "#### 5"], "ground_truths": ["4"] * 2})) == [1, 0]


# Methods of DataProto


def test_a_batch_finds_them_though_nothing_imported_verl():
    program = (
        "import sys, torch; from data.protocol import DataProto as D; batch = D.from_dict({'x': torch.arange(4)});"
        "assert 'extras.verl.compat' not in sys.modules; batch.reorder(torch.tensor([3, 2, 1, 0]));"
        "print([part.x.tolist() for part in batch.chunk(2)], hasattr(batch, 'y'))"
    )
    assert python("-c", program, check=True).stdout == "[[3, 2], [1, 0]] False\n"


def test_columns_swap_their_names_in_place():
    data = make(2)
    obs, score = data.obs, data.score
    assert data.rename(["obs", "score"], ["score", "obs"]) is data
    assert data.score is obs and data.obs is score


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda data: data.chunk(5), AssertionError, r"only support equal chunk\. Got size of DataProto 6 and chunk 5"),
        (lambda data: data.rename(["obs"], ["a", "b"]), ValueError, "needs one new name"),
        (lambda data: data.rename(["obs", "score"], ["a", "a"]), ValueError, "needs one new name"),
        (lambda data: data.rename("obs", "score"), ValueError, "unlike the other columns"),
        (lambda data: data.rename("obs", "label"), ValueError, "unlike the other columns"),
        (lambda data: data.rename("missing", "a"), AssertionError, r"asked for \['missing'\], but there are only"),
    ],
)
def test_what_would_lose_rows_or_a_column_is_refused_and_changes_nothing(call, error, words):
    data = make(6)
    with pytest.raises(error, match=words):
        call(data)
    assert_same(data, make(6))


def test_a_batch_becomes_a_tensordict_and_comes_back():
    nested = object_array([[], [0.5, {"a": 1}], None])
    data = DataProto.from_dict({"x": torch.arange(3)}, {"scores": nested}, {"step": 3})
    back = DataProto.from_tensordict(data.to_tensordict(), {"step": 4})
    assert back.non_tensor_batch["scores"].tolist() == nested.tolist() and torch.equal(back.batch["x"], data.batch["x"])
    assert back.meta_info == {"step": 4}
    with pytest.raises(AssertionError, match="stands in two of"):
        DataProto.from_dict({"x": torch.arange(3)}, meta_info={"x": 1}).to_tensordict()


def test_verls_schema_classes_are_read_by_attribute_and_by_key():
    parameters = OpenAIFunctionParametersSchema(type="object", properties={"x": {"type": "string"}}, required=["x"])
    function = OpenAIFunctionSchema(name="f", description="Does.", parameters=parameters)
    schema = OpenAIFunctionToolSchema(type="function", function=function)
    assert schema.function.parameters.properties.x.type == "string"
    assert OpenAIFunctionToolSchema.model_validate(schema.model_dump(exclude_unset=True)) == schema
    assert BaseTool({}, schema).name == "f"
    schema.model_dump()["function"]["name"] = "other"  # of a dict of its own
    assert schema["function"]["name"] == "f"
    with pytest.raises(AttributeError, match="the schema has no 'nam'"):
        schema.nam  # noqa: B018


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_comes_back_as_it_was(dtype: torch.dtype):
    tensor = torch.arange(6).reshape(2, 3).to(dtype)[:, 1:]
    assert torch.equal(deserialize_single_tensor(serialize_single_tensor(tensor)), tensor)


@few
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_every_epoch_visits_every_row_once(size, count, epochs, shuffle):
    data = make(size * count, CustomProto, name="abc")
    batches = list(data.make_iterator(size, epochs, seed=1, dataloader_kwargs={"shuffle": shuffle}))
    assert [len(batch) for batch in batches] == [size] * count * epochs
    assert all(batch.meta_info is data.meta_info and type(batch) is CustomProto for batch in batches)
    for epoch in range(epochs):
        visited = [row for batch in batches[epoch * count : (epoch + 1) * count] for row in rows(batch)]
        assert sorted(visited) == sorted(rows(data))
        assert shuffle or visited == rows(data)
