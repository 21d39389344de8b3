"""A batch that is sent comes back equal to the bit, in few bytes; its slow twin sends every tensor as it is."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.padding import collate
from data.types import Sample
from data.wire import pack, pack_tensor, unpack, unpack_tensor
from tests.runs import compose
from tests.test_remote_roles import Workers
from tests.wire_bytes import CALLS, Plain, before_and_after, made_up, sent
from training.core_algos import POLICY_LOSS_REGISTRY, register_policy_loss
from training.roles import ROLES, SEQUENCES, UPDATE_COLUMNS
from workers.group import Role, roles_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.complex64]
NUMBERS = st.sampled_from([0, 1, -1, 255, 256, 65_535, 65_536, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63)])


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_kind = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same_kind and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn, torch.complex128])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (0, 3), (2, 0), (2, 3, 4)])
def test_a_tensor_of_any_type_and_shape_survives(dtype, shape):
    for tensor in (torch.randint(0, 2, shape).to(dtype), (100 * torch.randn(shape)).to(dtype)):
        assert same_bits(unpack_tensor(*pickle.loads(pickle.dumps(pack_tensor(tensor)))), tensor)


@given(st.lists(NUMBERS, max_size=6))
def test_integers_of_any_size_survive(numbers: list[int]):
    tensor = torch.tensor(numbers, dtype=torch.long)
    assert same_bits(unpack_tensor(*pack_tensor(tensor)), tensor)


def test_zeros_with_a_sign_and_numbers_that_are_none_survive():
    tensor = torch.tensor([[0.0, -0.0, float("nan")], [-0.0, float("-inf"), 0.0], [1e-45, 2.0, 0.0]])
    assert same_bits(unpack_tensor(*pack_tensor(tensor)), tensor)


ROWS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9), st.sampled_from([3, 70_000])), max_size=6)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.booleans(), st.booleans(), st.data())
def test_a_batch_comes_back_as_its_twin_that_is_sent_as_it_is(lengths, changed: bool, one_row: bool, data):
    samples = [Sample([token] * prompt, end_reason="length") for prompt, _, token in lengths]
    for sample, (_, response, token) in zip(samples, lengths, strict=True):
        sample.extend([token + place for place in range(response)], [-0.5] * response, True, token)
    batch = collate(samples, 6, 9, 0)
    if changed and samples:  # then what usually follows from another column does not
        name = data.draw(st.sampled_from(["prompts", "responses", "position_ids", "attention_mask"]))
        batch.batch[name] = batch.batch[name].clone()
        batch.batch[name][-1, -1] += 1
    twin, item = Plain(batch.batch, batch.non_tensor_batch), batch[-1] if one_row and samples else batch
    twin, again = pickle.loads(pickle.dumps(twin)), pickle.loads(pickle.dumps(item))
    assert [*again.batch.keys()] == [*batch.batch.keys()]
    for name, column in item.tensors.items():
        assert same_bits(again.batch[name], column), name
        assert same_bits(twin.batch[name], batch.batch[name]), "files of earlier versions"


def test_what_follows_is_not_sent():
    states = pack(made_up(2, 2, 8, 16).tensors)
    assert {name: state for name, state in states.items() if len(state) == 1} == {
        "prompts": (8,), "responses": (16,), "position_ids": (24,),
    }  # fmt: skip
    assert unpack({}) == {}


def test_a_step_sends_a_tenth_of_the_bytes():
    batch = made_up(16, 8, 512, 1024)
    before, after = (sum(sent(before_and_after(batch, *call, 4)[index])[0] for call in CALLS) for index in (0, 1))
    assert after < before / 10, "0.04 GB instead of 0.65 of 256 x 8 such rows"


def test_a_verb_is_given_what_it_reads_and_one_without_reads_everything():
    batch, group = made_up(3, 2, 4, 6), Workers(2)
    for reads in ({"compute_log_prob": ("returns", "absent")}, {}):
        Role(group, ROLES["ref"], reads=reads).compute(batch, ["ref_log_prob"], 1.0)
        names = {name for share in group.shares for name in share.tensors}
        assert names == ({*SEQUENCES, "returns"} if reads else set(batch.tensors))


def test_the_policys_update_is_given_what_its_loss_reads(restored_registries):
    @register_policy_loss("of_values")
    def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", *, config, values):
        return (log_prob * values).sum(), {}

    assert "of_values" in POLICY_LOSS_REGISTRY
    config = compose("actor_rollout_ref.actor.policy_loss.loss_mode=of_values")
    reads = roles_of({"actor": Workers(1)}, config)["actor"].reads
    assert {*UPDATE_COLUMNS, "values"} <= set(reads["update_policy"]) and "returns" not in reads["update_policy"]
