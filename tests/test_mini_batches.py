"""Mini-batches: whole prompts, every row once an epoch, and the counts that normalise their losses."""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import ActorConfig, CriticConfig
from data.protocol import DataProto
from tests.runs import compose
from training.mini_batches import PolicyUpdates, Update, mini_batches

CONFIG = compose("actor_rollout_ref.rollout.temperature=0.7", name="ppo_trainer")
CRITIC = CriticConfig(ppo_mini_batch_size=None, ppo_epochs=1, shuffle=False)


def make_batch(uids: list) -> DataProto:
    rows = len(uids)
    mask = torch.ones(rows, 3, dtype=torch.int64)
    return DataProto.from_single_dict(
        {"row": torch.arange(rows), "response_mask": mask, "loss_mask": mask, "uid": uids}
    )


def cut(
    batch: DataProto, role: ActorConfig | CriticConfig, seed: int = 0, step: int = 1
) -> list[tuple[DataProto, Update]]:
    config = replace(CONFIG, trainer=replace(CONFIG.trainer, seed=seed))
    return [*mini_batches(batch, config, role, step)]


def rows_of(pairs: Iterable[tuple[DataProto, Update]]) -> list[list[int]]:
    return [mini_batch.row.tolist() for mini_batch, _ in pairs]


@settings(max_examples=50, deadline=None)
@given(
    uids=st.lists(st.integers(0, 6), min_size=1, max_size=24),
    size=st.one_of(st.none(), st.integers(1, 7)),
    epochs=st.integers(1, 3),
    shuffle=st.booleans(),
)
def test_every_row_once_an_epoch_and_groups_stay_whole(uids, size, epochs, shuffle):
    config = ActorConfig(ppo_mini_batch_size=size, ppo_epochs=epochs, shuffle=shuffle)
    pairs, prompts = cut(make_batch(uids), config, seed=5), len(set(uids))
    full = size or prompts
    per_epoch = math.ceil(prompts / full)
    assert len(pairs) == epochs * per_epoch
    for first in range(0, len(pairs), per_epoch):
        epoch = pairs[first : first + per_epoch]
        assert sorted(row for rows in rows_of(epoch) for row in rows) == list(range(len(uids)))
        groups = [set(batch.uid) for batch, _ in epoch]
        assert sum(map(len, groups)) == prompts, "a prompt is in one mini-batch"
        assert {*map(len, groups[:-1])} <= {full} and 1 <= len(groups[-1]) <= full


def test_the_shuffle_depends_on_seed_step_and_epoch_alone():
    config = ActorConfig(ppo_mini_batch_size=3, ppo_epochs=2, shuffle=True)
    batch = make_batch(list(range(12)))
    first = rows_of(cut(batch, config, seed=1))
    torch.manual_seed(123)
    assert rows_of(cut(batch, config, seed=1)) == first
    assert rows_of(cut(batch, config, seed=2)) != first
    assert rows_of(cut(batch, config, seed=1, step=2)) != first
    assert first[:4] != first[4:]


def test_each_update_is_told_its_counts_seed_step_and_temperature():
    batch = make_batch(["a", "a", "b", "b", "c", "c"])
    batch.batch["loss_mask"] = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]])
    pairs = cut(batch, ActorConfig(ppo_mini_batch_size=1), step=4)
    updates = [update for _, update in pairs]
    # b's two rows hold 2 and 3 tokens; a has a failed row; c failed whole
    assert [update.counts["batch_num_tokens"] for update in updates] == [2, 5, 0]
    assert [update.counts["global_batch_size"] for update in updates] == [1, 2, 0]
    assert all(update.counts["loss_scale_factor"] == 3 and update.counts["dp_size"] == 1 for update in updates)
    assert {(update.step, update.temperature) for update in updates} == {(3, 0.7)}
    assert len({update.seed for update in updates}) == 3


def test_an_update_sees_the_loss_mask_as_its_response_mask_and_the_batch_keeps_both():
    batch = make_batch(["a", "b"])
    batch.batch["loss_mask"] = torch.tensor([[1, 0, 1], [0, 1, 1]])
    [(mini_batch, _)] = cut(batch, ActorConfig())
    assert torch.equal(mini_batch.response_mask, batch.loss_mask) and "loss_mask" not in mini_batch
    assert batch.response_mask.all() and not batch.loss_mask.all()


def test_a_drawn_row_brings_all_its_columns_to_the_place_it_was_drawn_for():
    """A draw leaves mini-batches as many and as large as they were: the places keep their prompts."""
    batch = make_batch(["a", "a", "b", "b"])
    batch.batch["loss_mask"] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1], [0, 1, 0]])
    batch.batch["drawn_row"] = torch.tensor([3, 3, 0, 2])
    pairs = cut(batch, ActorConfig(ppo_mini_batch_size=1))
    assert rows_of(pairs) == [[3, 3], [0, 2]]
    assert [update.counts["batch_num_tokens"] for _, update in pairs] == [2, 4]
    for mini_batch, _ in pairs:
        assert torch.equal(mini_batch.response_mask, batch.loss_mask[mini_batch.row])


def test_the_first_update_of_a_batch_goes_without_old_log_probs():
    config = compose("actor_rollout_ref.actor.ppo_mini_batch_size=1", name="ppo_trainer")
    batch = make_batch(["a", "b", "c"])
    batch.batch["old_log_probs"] = batch.batch["advantages"] = torch.ones(3, 3)
    pairs = [*PolicyUpdates(config)(batch, step=1)]
    assert ["old_log_probs" in mini_batch for mini_batch, _ in pairs] == [False, True, True]
    assert "old_log_probs" in batch


def test_rows_that_teach_nothing_are_left_out_and_the_counts_stay():
    config = compose("actor_rollout_ref.actor.ppo_mini_batch_size=2", name="ppo_trainer")
    batch = make_batch(["a", "a", "b", "c", "c", "d"])
    batch.batch["advantages"] = torch.tensor([0.0, 1.0, 2.0, 0.0, 0.0, 0.0])[:, None].expand(6, 3)
    pairs = [*PolicyUpdates(config)(batch, step=1)]
    assert rows_of(pairs) == [[1, 2], [3]]  # one row stays where none teaches, so that the optimiser steps
    assert [update.counts["global_batch_size"] for _, update in pairs] == [3, 3]
    assert rows_of(mini_batches(batch, config, config.actor_rollout_ref.actor, 1)) == [[0, 1, 2], [3, 4, 5]]
