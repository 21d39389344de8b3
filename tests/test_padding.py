"""Samples and the padded columns made of them; what is read off such columns."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data.padding import collate, last_token, repeats_prompt
from data.protocol import DataProto
from data.types import Sample

IDS = st.integers(0, 5)  # few, so that the pad id is among them
LOG_PROBS = st.floats(-20, 0, width=32)
PARTS = st.lists(
    st.tuples(st.lists(st.tuples(IDS, LOG_PROBS), max_size=4), st.booleans(), st.integers(0, 3)), max_size=3
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """An episode: what the policy said and what it was told, in any order."""
    sample = Sample(draw(st.lists(IDS, max_size=5)), end_reason=draw(st.sampled_from([None, "terminated"])))
    for tokens, policy, version in draw(PARTS):
        log_probs = [log_prob for _, log_prob in tokens] if policy else None
        sample.extend([token for token, _ in tokens], log_probs, policy, version)
    sample.extras["turns"] = draw(st.lists(IDS, max_size=2))
    return sample


def token_by_token(samples: list[Sample], prompt_width: int, response_width: int, pad_id: int) -> DataProto:
    """The slow way: every number written where it belongs."""
    b, width = len(samples), prompt_width + response_width
    ids, real = torch.full((b, width), pad_id), torch.zeros(b, width, dtype=torch.long)
    positions = torch.zeros(b, width, dtype=torch.long)
    policy, log_probs = torch.zeros(b, response_width, dtype=torch.long), torch.zeros(b, response_width)
    versions = torch.full((b, response_width), -1)
    for row, sample in enumerate(samples):
        sequence, start = [*sample.prompt_ids, *sample.token_ids], prompt_width - len(sample.prompt_ids)
        for place, token in enumerate(sequence):
            ids[row, start + place], real[row, start + place] = token, 1
        for column in range(width):  # after the end, the last position is repeated
            positions[row, column] = min(max(column - start, 0), max(len(sequence) - 1, 0))
        for place in range(len(sample.token_ids)):
            policy[row, place], log_probs[row, place] = sample.policy_mask[place], sample.log_probs[place]
            versions[row, place] = sample.weight_versions[place]
    columns = {
        "prompts": ids[:, :prompt_width],
        "responses": ids[:, prompt_width:],
        "input_ids": ids,
        "attention_mask": real,
        "position_ids": positions,
        "response_mask": policy,
        "rollout_log_probs": log_probs,
        "weight_versions": versions,
    }
    return DataProto.from_single_dict(
        columns | {"end_reason": [one.end_reason for one in samples], "turns": [one.extras["turns"] for one in samples]}
    )


@given(st.lists(samples(), min_size=1, max_size=5), st.integers(0, 2), st.integers(0, 2), IDS)
def test_columns_equal_those_written_token_by_token(rows: list[Sample], left: int, right: int, pad_id: int):
    widths = max(len(row.prompt_ids) for row in rows) + left, max(len(row.token_ids) for row in rows) + right
    found, wanted = collate(rows, *widths, pad_id), token_by_token(rows, *widths, pad_id)
    assert found.tensors.keys() == wanted.tensors.keys()
    for name, column in wanted.tensors.items():
        assert torch.equal(found.batch[name], column) and found.batch[name].dtype == column.dtype, name
    assert {name: column.tolist() for name, column in found.non_tensor_batch.items()} == {
        name: column.tolist() for name, column in wanted.non_tensor_batch.items()
    }


@given(samples(), st.integers(0, 3))
def test_a_sample_has_one_entry_a_token_and_refuses_more_or_fewer(sample: Sample, count: int):
    lists = [sample.policy_mask, sample.log_probs, sample.weight_versions, sample.rewards, sample.turns]
    assert {len(entries) for entries in lists} == {len(sample.token_ids)}
    before = [*sample.token_ids]
    with pytest.raises(AssertionError, match=f"{count} tokens with {count + 1} log-probs"):
        sample.extend([7] * count, [-1.0] * (count + 1), policy=True)
    assert sample.token_ids == before
    with pytest.raises(AssertionError, match=r"one entry a token each, not .*'policy_mask': 0"):
        Sample([1], token_ids=[*before, 3])


def test_a_sample_by_hand():
    sample = Sample([1, 2])
    sample.extend([5, 6], [-0.5, -0.25], policy=True, weight_version=3)
    sample.extend([7], None, policy=False, weight_version=4)
    assert sample == Sample([1, 2], [5, 6, 7], [1, 1, 0], [-0.5, -0.25, 0.0], [3, 3, 4], [0.0, 0.0, 0.0], [0, 0, 0])


def test_what_does_not_fit_or_has_other_extras_is_refused():
    long = Sample([1, 2, 3])
    long.extend([4, 5], None, policy=True)
    for widths in ((2, 2), (3, 1)):
        with pytest.raises(AssertionError, match=rf"3 tokens of prompt, 2 of response: wider than {widths[0]}, "):
            collate([Sample([1]), long], *widths, pad_token_id=0)
    with pytest.raises(AssertionError, match="different extras"):
        collate([Sample([1]), Sample([1], extras={"turns": 2})], 1, 1, pad_token_id=0)


def test_the_last_token_of_the_policy():
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])  # an observation in row 0; row 2 failed
    assert last_token(mask).tolist() == [[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_a_prompt_is_repeated_where_tokens_and_lengths_are_those_of_the_row_before():
    """A repeated prompt is found whatever the pad id: 0 is a token of the third prompt."""
    prompts = [[1], [1], [0, 1], [0, 1], [1], [1, 1]]
    batch = collate([Sample(ids) for ids in prompts], 3, 1, pad_token_id=0)
    assert repeats_prompt(batch).tolist() == [False, True, False, True, False, False]
