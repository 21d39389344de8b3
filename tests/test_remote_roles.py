"""Rows of any number are dealt out to any number of workers, here in one process, and come back in their order."""

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import RolloutConfig
from data.padding import collate
from data.protocol import DataProto
from data.seqlen_balancing import calculate_workload
from data.types import Sample, SamplingParams
from training.environment import AGENT_COLUMN, SINGLE_TURN, TOOL_AGENT
from training.roles import ROLES
from workers.group import Done, Role, RolloutRole, check_shares, shares_of
from workers.hf_rollout import HFRollout
from workers.vllm_rollout_spmd import vLLMRollout

few = settings(max_examples=60, deadline=None)
GREEDY = SamplingParams(False, 1.0, -1, 1.0, 4)
LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9), st.integers(1, 3)), max_size=9)


class Workers:
    """A group of `size` workers, each of which answers for the rows of its share alone."""

    def __init__(self, size: int) -> None:
        self.size, self.shares = size, list[DataProto]()

    def submit(self, role: str, method: str, shares: Sequence[tuple]) -> Done:
        check_shares(shares, self.size)
        self.shares = [share[0] for share in shares]
        return Done([getattr(self, method)(*share) for share in shares])

    def compute_values(self, share: DataProto) -> DataProto:
        return DataProto.from_dict({"values": share.batch["responses"].float()})

    def compute_log_prob(self, share: DataProto, temperature: float, columns: Sequence[str]) -> DataProto:
        return DataProto.from_dict({columns[0]: share.batch["responses"].float()})

    def compute_rm_score(self, share: DataProto) -> DataProto:
        assert len(share.raw_prompt) == len(share)
        return DataProto.from_dict({"rm_scores": share.batch["responses"][:, 0].float()})

    def generate_sequences(
        self, share: DataProto, sampling: SamplingParams, seed: int, first_row: int, episodes: bool
    ) -> DataProto:
        """Returns the numbers of the share's rows in the whole; of episodes, also a column for each of its kinds."""
        rows = torch.arange(first_row, first_row + len(share))
        kinds = {str(agent): rows.tolist() for agent in share.get(AGENT_COLUMN, []) if episodes}
        return DataProto.from_single_dict({"row": rows, "place": rows.tolist(), **kinds})


def batch_of(groups: list[tuple[int, int, int]]) -> DataProto:
    """Groups of (tokens of the prompt, tokens of a response, samples); responses begin with the row's number."""
    samples: list[Sample] = []
    for number, (prompt, response, count) in enumerate(groups):
        for _ in range(count):
            sample = Sample([number + 1] * prompt, end_reason="terminated", extras={"raw_prompt": str(number)})
            sample.extend([len(samples)] * (response + 1), None, policy=True)
            samples.append(sample)
    return collate(samples, 6, 10, 0)


@few
@given(LENGTHS, st.integers(1, 12))
def test_shares_are_neighbours_in_order_and_none_has_more_than_a_row_above_its_part(groups, workers: int):
    batch = batch_of(groups)
    shares = shares_of(batch, workers)
    assert len(shares) == workers
    assert torch.equal(torch.cat([share.batch["responses"] for share in shares]), batch.batch["responses"])
    rows = [
        length
        for prompt, response, count in groups
        for length in (prompt + response + 1, *[response + 1] * (count - 1))
    ]
    work, ends = [calculate_workload(length) for length in rows], 0
    for share in shares:
        part, ends = work[ends : ends + len(share)], ends + len(share)
        assert sum(part) <= sum(work) / workers + max(work, default=0)


@few
@given(LENGTHS.filter(bool), st.integers(1, 12))
def test_answers_of_all_workers_are_those_of_one(groups, workers: int):
    batch, group = batch_of(groups), Workers(workers)
    wanted = batch.batch["responses"].float()
    for name, answers in {"critic": wanted, "ref": wanted, "rm": wanted[:, 0]}.items():
        [column] = ROLES[name].columns
        assert torch.equal(Role(group, ROLES[name]).compute(batch, [column], 1.0).batch[column], answers)
    lengths = [share.batch["attention_mask"].sum(1).tolist() for share in group.shares]
    work = [sum(map(calculate_workload, share)) for share in lengths]
    longest = max(calculate_workload(length) for share in lengths for length in share)
    assert max(work) <= sum(work) / workers + longest, "by tokens, not by rows"


@few
@given(
    st.lists(st.sampled_from([SINGLE_TURN, TOOL_AGENT]), min_size=1, max_size=9), st.integers(1, 4), st.integers(1, 3)
)
def test_prompts_reach_the_first_worker_of_each_engine_and_come_back_in_order(agents, engines: int, parts: int):
    """Prompts may be fewer than engines, and a worker may get other kinds of episodes than the next."""
    group, prompts = Workers(engines * parts), DataProto.from_single_dict({AGENT_COLUMN: agents})
    found = RolloutRole(group, ROLES["rollout"], workers_per_engine=parts).generate_sequences(prompts, GREEDY, 0)
    assert found.batch["row"].tolist() == found.place.tolist() == [*range(len(agents))]
    sizes = [len(share) for share in group.shares]
    assert all(size == 0 for place, size in enumerate(sizes) if place % parts)
    assert max(sizes) - min(sizes[::parts]) <= 1
    if TOOL_AGENT in agents:
        for kind in set(agents):
            told = found.get(kind).tolist()
            assert all(value is None or value == row for row, value in enumerate(told))


def test_an_engine_that_is_not_split_has_a_worker_for_itself():
    """The engine hf has one worker even where a command of verl's asks for 2, verl's default."""
    asked = {"tensor_model_parallel_size": 2, "prompt_length": 1, "response_length": 1}
    assert [one.workers_per_engine(RolloutConfig(**asked)) for one in (HFRollout, vLLMRollout)] == [1, 2]
