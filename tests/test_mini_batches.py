"""Mini-batches: whole prompts, every row once an epoch, and the counts that normalise their losses."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import ActorConfig, CriticConfig
from data.protocol import DataProto
from training.mini_batches import mini_batches, rows_after_first

CRITIC = CriticConfig(ppo_mini_batch_size=None, ppo_epochs=1, shuffle=False)


def make_batch(uids: list) -> DataProto:
    rows = len(uids)
    return DataProto.from_single_dict(
        {"row": torch.arange(rows), "response_mask": torch.ones(rows, 3, dtype=torch.int64), "uid": uids},
        {"temperature": 0.7},
    )


def rows_of(batches: list[DataProto]) -> list[list[int]]:
    return [batch.row.tolist() for batch in batches]


@settings(max_examples=50, deadline=None)
@given(
    uids=st.lists(st.integers(0, 6), min_size=1, max_size=24),
    size=st.one_of(st.none(), st.integers(1, 7)),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_every_row_once_an_epoch_and_groups_stay_whole(uids, size, epochs, shuffle):
    config = ActorConfig(ppo_mini_batch_size=size, ppo_epochs=epochs, shuffle=shuffle)
    batches = [*mini_batches(make_batch(uids), config, seed=5)]
    prompts = len(set(uids))
    assert len(batches) == epochs * math.ceil(prompts / (size or prompts))
    later = {row for rows in rows_of(batches[1:]) for row in rows}
    assert rows_after_first(make_batch(uids), config, seed=5) == sorted(later)
    per_epoch = len(batches) // epochs
    for epoch in range(epochs):
        part = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(row for rows in rows_of(part) for row in rows) == list(range(len(uids)))
        groups_of = [set(batch.uid) for batch in part]
        assert max(Counter(uid for groups in groups_of for uid in groups).values()) == 1
        sizes = [len(groups) for groups in groups_of]
        full = size or prompts
        assert sizes[:-1] == [full] * (len(sizes) - 1) and 1 <= sizes[-1] <= full


def test_without_shuffling_prompts_come_in_their_order_and_the_last_mini_batch_may_be_smaller():
    batch = make_batch(["a", "b", "a", "c", "b", "c"])
    batches = [*mini_batches(batch, ActorConfig(ppo_mini_batch_size=2, ppo_epochs=2), seed=0)]
    assert rows_of(batches) == [[0, 2, 1, 4], [3, 5]] * 2


def test_the_shuffle_depends_on_seed_and_epoch_alone():
    config = ActorConfig(ppo_mini_batch_size=3, ppo_epochs=2, shuffle=True)
    batch = make_batch(list(range(12)))
    first = rows_of(mini_batches(batch, config, seed=1))
    torch.manual_seed(123)
    assert rows_of(mini_batches(batch, config, seed=1)) == first
    assert rows_of(mini_batches(batch, config, seed=2)) != first
    assert first[:4] != first[4:]


def test_each_mini_batch_carries_its_counts_its_seed_and_the_batchs_meta():
    batch = make_batch(["a", "a", "b", "b", "c", "c"])
    batch.batch["response_mask"] = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]])
    batches = [*mini_batches(batch, ActorConfig(ppo_mini_batch_size=1), seed=0)]
    counts = [batch.meta_info["global_batch_info"] for batch in batches]
    # b's two rows hold 2 and 3 tokens; a has a failed row; c failed whole
    assert [count["batch_num_tokens"] for count in counts] == [2, 5, 0]
    assert [count["global_batch_size"] for count in counts] == [1, 2, 0]
    assert all(count["loss_scale_factor"] == 3 and count["dp_size"] == 1 for count in counts)
    assert all(batch.meta_info["temperature"] == 0.7 for batch in batches)
    assert len({batch.meta_info["seed"] for batch in batches}) == 3
    assert [batch.meta_info["is_first"] for batch in batches] == [True, False, False]
    assert "global_batch_info" not in batch.meta_info


@pytest.mark.parametrize(("config", "factor"), [(ActorConfig(loss_scale_factor=100.0), 100.0), (CRITIC, 3)])
def test_the_scale_factor_is_the_actors_setting_or_the_padded_width(config, factor):
    [batch] = mini_batches(make_batch(["a"]), config, seed=0)
    assert batch.meta_info["global_batch_info"]["loss_scale_factor"] == factor
