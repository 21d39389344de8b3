"""The order of rows is a function of (seed, epoch), and a run resumed anywhere sees what an unbroken one would."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from configs.schema import DataConfig, SamplerConfig
from data.protocol import DataProto
from data.sampler import (
    AbstractSampler,
    Dynamic,
    PromptLoader,
    RandomSampler,
    SequentialSampler,
    create_rl_sampler,
    takes_metrics,
)

CONFIG = DataConfig()


class Numbers(Dataset):
    """Row i is {"index": i}."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, i):
        return {"index": i}


def seen(batch):
    return batch["index"].tolist()


def make_sampler(dataset, shuffle=True, seed=0):
    return create_rl_sampler(DataConfig(shuffle=shuffle), dataset, seed)


def through_json(state):
    """A state as a checkpoint gives it back: by value, in plain types."""
    return json.loads(json.dumps(state))


def test_random_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        sampler = RandomSampler(Numbers(50), CONFIG, seed)
        list(sampler)  # what was drawn before must not matter
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 3) == order(0, 3)
    assert sorted(order(0, 3)) == list(range(50))
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_data_shuffle_and_data_seed_choose_the_order():
    rows = Numbers(20)
    assert type(create_rl_sampler(DataConfig(shuffle=False), rows, seed=1)) is SequentialSampler
    by_run_seed = [list(create_rl_sampler(DataConfig(), rows, seed)) for seed in (1, 2)]
    by_data_seed = [list(create_rl_sampler(DataConfig(seed=2), rows, seed)) for seed in (1, 2)]
    assert by_run_seed[0] != by_run_seed[1]
    assert by_data_seed[0] == by_data_seed[1] == by_run_seed[1]


def test_batches_by_hand_roll_over_to_the_next_epoch():
    loader = PromptLoader(Numbers(5), 2, make_sampler(Numbers(5), shuffle=False))
    assert len(loader) == 2
    places = []
    for _ in range(4):
        places.append((seen(loader.next_batch()), loader.epoch, loader.index))
    assert places == [([0, 1], 0, 2), ([2, 3], 0, 4), ([0, 1], 1, 2), ([2, 3], 1, 4)]


def test_without_drop_last_the_rest_is_a_batch():
    loader = PromptLoader(Numbers(5), 2, make_sampler(Numbers(5), shuffle=False), drop_last=False)
    assert len(loader) == 3
    assert [seen(loader.next_batch()) for _ in range(4)] == [[0, 1], [2, 3], [4], [0, 1]]
    assert [seen(batch) for batch in loader] == [[0, 1], [2, 3], [4]]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.integers(1, 5), st.booleans(), st.booleans())
def test_resuming_after_any_batch_continues_the_unbroken_run(num_rows, batch_size, drop_last, shuffle):
    if drop_last:
        num_rows += batch_size - 1
    rows = Numbers(num_rows)

    def loader():
        return PromptLoader(rows, batch_size, make_sampler(rows, shuffle), drop_last=drop_last)

    num_batches = 3 * len(loader()) + 1
    unbroken_loader = loader()
    unbroken, states = [], []
    for _ in range(num_batches):
        states.append(through_json(unbroken_loader.state_dict()))
        unbroken.append(seen(unbroken_loader.next_batch()))
    for k, state in enumerate(states):
        assert set(state) == {"epoch", "index", "num_rows"}
        resumed = loader()
        resumed.load_state_dict(state)
        assert [seen(resumed.next_batch()) for _ in range(num_batches - k)] == unbroken[k:], f"resumed after {k}"


def test_iterating_an_epoch_repeats_it_and_leaves_the_position():
    rows = Numbers(10)
    loader, untouched = (PromptLoader(rows, 3, make_sampler(rows)) for _ in range(2))
    assert seen(loader.next_batch()) == seen(untouched.next_batch())
    epoch = [seen(batch) for batch in loader]
    assert [seen(batch) for batch in loader] == epoch
    assert len(epoch) == len(loader)
    assert loader.state_dict() == untouched.state_dict()
    assert seen(loader.next_batch()) == seen(untouched.next_batch()) == epoch[1]


def test_too_few_rows_for_a_batch_name_the_key_and_the_remedy():
    rows = Numbers(3)
    with pytest.raises(ValueError, match=r"data.train_batch_size=4 .* an epoch has 3 rows. Lower"):
        PromptLoader(rows, 4, make_sampler(rows))
    with pytest.raises(ValueError, match=r"data.max_length may drop"):
        PromptLoader(rows, 4, make_sampler(rows), length_key="data.max_length")
    with pytest.raises(ValueError, match="an epoch has 0 rows"):
        PromptLoader(Numbers(0), 4, make_sampler(Numbers(0)), drop_last=False)


def test_a_sampler_that_yields_less_than_it_says_is_an_error_and_not_an_endless_loop():
    class Liar(SequentialSampler):
        def __iter__(self):
            return iter([0])

    with pytest.raises(ValueError, match="cannot be filled"):
        PromptLoader(Numbers(4), 2, Liar(Numbers(4), CONFIG)).next_batch()


def test_a_checkpoint_of_another_kind_of_dataset_is_refused():
    plain, growing = (PromptLoader(rows, 2, make_sampler(rows)) for rows in (Numbers(5), Levels([0] * 5)))
    with pytest.raises(ValueError, match="holds no state of the dataset, but Levels has one"):
        growing.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="holds a state of the dataset, but Numbers has none"):
        plain.load_state_dict(growing.state_dict())


def test_a_users_sampler_gets_the_data_and_its_config_by_keyword(tmp_path):
    file = tmp_path / "reversed_order.py"
    file.write_text(
        "from data.sampler import AbstractSampler\n\n"
        "class Reversed(AbstractSampler):\n"
        "    def __init__(self, *, data_source, data_config):\n"
        "        super().__init__(data_source, data_config)\n"
        "    def __iter__(self):\n        return reversed(range(len(self)))\n"
        "    def __len__(self):\n        return len(self.data_source)\n"
    )
    config = DataConfig(sampler=SamplerConfig(class_path=str(file), class_name="Reversed"))
    sampler = create_rl_sampler(config, Numbers(3), seed=0)
    assert isinstance(sampler, AbstractSampler) and sampler.data_config is config
    assert list(sampler) == [2, 1, 0]


def test_a_plain_sampler_of_pytorch_is_one_of_ours(tmp_path):
    (tmp_path / "plain.py").write_text(
        "from torch.utils.data import Sampler\n\nclass Plain(Sampler):\n    def __init__(self, data_source):\n"
        "        self.size = len(data_source)\n    def __iter__(self):\n        return iter([2, 0])\n"
        "    def __len__(self):\n        return 2\n"
    )
    config = DataConfig(sampler=SamplerConfig(class_path=str(tmp_path / "plain.py"), class_name="Plain"))
    loader = PromptLoader(Numbers(3), 2, create_rl_sampler(config, Numbers(3), seed=0))
    assert [list(loader.next_batch()["dataset_position"]) for _ in range(2)] == [[2, 0], [2, 0]]
    config.sampler.extras["kwarg"] = {"size": 2}
    with pytest.raises(ValueError, match=r"^data\.sampler\.kwarg .*Plain.* takes no data_config"):
        create_rl_sampler(config, Numbers(3), seed=0)


class Levels(Dataset):
    """Rows with a level, and a source; may grow."""

    def __init__(self, levels, sources=None):
        self.levels, self.sources = list(levels), sources

    def __len__(self):
        return len(self.levels)

    def __getitem__(self, i):
        source = self.sources[i % len(self.sources)] if self.sources else "one"
        return {"index": i, "data_source": source, "extra_info": {"difficulty": self.levels[i]}}

    def on_batch_end(self, batch):
        self.levels.append(0)

    def state_dict(self):
        return {"levels": self.levels}

    def load_state_dict(self, state):
        self.levels = list(state["levels"])


class Told(AbstractSampler):
    """Verl's form of a curriculum, with state of its own: it goes on by what it heard of batches."""

    def __init__(self, data_source, data_config):
        super().__init__(data_source, data_config)
        self.told = self.place = 0

    def __len__(self):
        return len(self.data_source)

    def __iter__(self):
        while self.place < self.rows_of_epoch():
            self.place += 1
            yield self.told % self.rows_of_epoch()
        self.place = 0

    def update(self, batch):
        self.told += int(sum(batch.index)) + 1

    def state_dict(self):
        return {"told": self.told, "place": self.place}

    def load_state_dict(self, state):
        self.told, self.place = state["told"], state["place"]


def heard(loader, batch, reward):
    """Tells the sampler and the dataset that the step behind `batch` is over."""
    places = batch["dataset_position"].astype(np.int64)
    if takes_metrics(loader.sampler):
        loader.sampler.update(places, {"reward": np.array([reward(place) for place in places])})
    else:
        loader.sampler.update(DataProto.from_single_dict(batch))
    if isinstance(loader.dataset, Dynamic):
        loader.dataset.on_batch_end(batch)


CURRICULA = {"a user's": {"sampler": SamplerConfig(__file__, "Told")}, "random": {}}


@pytest.mark.parametrize("name", CURRICULA)
def test_resuming_in_the_middle_of_a_curriculum_over_a_growing_dataset_is_exact(name):
    assert_resuming_is_exact(DataConfig(**CURRICULA[name]))


def assert_resuming_is_exact(config):

    def fresh():
        dataset = Levels([0, 0, 1, 1, 2, 2, 0], sources="ab")
        return PromptLoader(dataset, 2, create_rl_sampler(config, dataset, 3))

    def reward(place):
        return float(place % 3 > 0)

    straight, states, batches = fresh(), [], []
    for _ in range(14):
        states.append(through_json(straight.state_dict()))
        batch = straight.next_batch()
        batches.append(seen(batch))
        heard(straight, batch, reward)
    assert straight.epoch > 0 and max(map(max, batches)) > 6, "rows that were added are drawn, from the next epoch on"
    for step, state in enumerate(states):
        resumed = fresh()
        resumed.load_state_dict(state)
        for expected in batches[step:]:
            batch = resumed.next_batch()
            assert seen(batch) == expected
            heard(resumed, batch, reward)


def test_a_dataset_that_shrinks_is_told():
    dataset = Numbers(4)
    loader = PromptLoader(dataset, 2, make_sampler(dataset, shuffle=False))
    dataset.num_rows = 1
    with pytest.raises(ValueError, match="row 1 of 1: a dataset may grow in a run, but not shrink"):
        loader.next_batch()


def test_settings_of_a_sampler_that_it_does_not_take_are_refused():
    chosen = SamplerConfig(__file__, "Told", {"ke": "level"})
    with pytest.raises(ValueError, match=r"Told.* unexpected keyword argument 'ke'"):
        create_rl_sampler(DataConfig(sampler=chosen), Levels([0]), 0)
