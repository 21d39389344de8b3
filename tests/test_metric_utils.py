"""Metrics of steps and validations: by hand, and a slow twin; extras/verl/tests holds them against verl's own."""

import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.protocol import DataProto
from training import metric_utils
from training.metric_utils import compute_group_metrics, process_validation_metrics

FLOATS = ("token_level_scores", "token_level_rewards", "advantages", "returns", "values")


def ragged_mask(lengths: list[int], width: int, left_padded: bool) -> torch.Tensor:
    rows = [[1] * length + [0] * (width - length) for length in lengths]
    return torch.tensor([row[::-1] if left_padded else row for row in rows])


def make_batch(prompt_lengths: list[int], response_lengths: list[int], width: tuple[int, int], **columns) -> DataProto:
    """Padded rows of the given lengths; the float columns default to 0, `response_mask` to the attention's tail."""
    prompt_mask = ragged_mask(prompt_lengths, width[0], left_padded=True)
    response_mask = ragged_mask(response_lengths, width[1], left_padded=False)
    own = {"responses": torch.zeros_like(response_mask), "response_mask": response_mask}
    own |= {"attention_mask": torch.cat([prompt_mask, response_mask], dim=1)}
    own |= {name: torch.zeros(response_mask.shape) for name in FLOATS}
    return DataProto.from_single_dict(own | columns)


@pytest.fixture
def batch() -> DataProto:
    """Widths 3 + 4: a full response, one with an observation in its middle, and one without any token."""
    return make_batch(
        *([2, 3, 1], [4, 3, 0], (3, 4)),
        response_mask=torch.tensor([[1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0]]),
        token_level_scores=torch.tensor([[0.0, 0.0, 0.0, 1.0], [0.5, 0.0, -1.0, 0.0], [9.0, 0.0, 0.0, 0.0]]),
    )


def mean_max_min(name: str, mean: float, maximum: float, minimum: float) -> dict[str, float]:
    return {f"{name}/mean": mean, f"{name}/max": maximum, f"{name}/min": minimum}


def test_turns_and_tool_calls_are_reported_where_they_are_known(batch):
    batch.non_tensor_batch["__num_turns__"] = np.array([2, 4, 6])
    batch.non_tensor_batch["tool_call_counts"] = np.array([0, 1, 5], dtype=object)
    metrics = metric_utils.compute_data_metrics(batch)
    # the third row failed, and so did its turns
    expected = mean_max_min("num_turns", 3, 4, 2) | mean_max_min("tool_call_counts", 0.5, 1, 0)
    assert {name: metrics[name] for name in expected} == expected


def test_what_agent_loops_say_is_averaged_over_episodes(batch):
    """The first episode has two rows, the second one; what a row says that is not its episode's last does not count."""
    batch.non_tensor_batch["episode"] = np.array(["a", "a", "b"], dtype=object)
    batch.non_tensor_batch["__agent_metrics__"] = np.array([{"rows": 2}, {"rows": 2}, {"rows": 1}], dtype=object)
    metrics = metric_utils.compute_data_metrics(batch)
    expected = mean_max_min("agent_loop/rows", 1.5, 2, 1)
    assert {name: metrics[name] for name in expected} == expected


def slow_data_metrics(batch: DataProto, width: tuple[int, int]) -> dict[str, float]:
    """The same statistics row by row and token by token, in python floats."""
    collected: dict[str, list[float]] = {}

    def collect(name: str, value: float) -> None:
        collected.setdefault(name, []).append(value)

    for row in batch:
        prompt_length = int(row.attention_mask[: width[0]].sum())
        response_length = int(row.attention_mask[width[0] :].sum())
        failed = row.end_reason in ("env_error", "timeout", "aborted") or response_length == 0
        collect("prompt_length", prompt_length)
        collect("response_length", response_length)
        collect("aborted", float(failed))
        if failed:
            continue
        collect("response_length_non_aborted", response_length)
        collect("critic/score", sum(row.token_level_scores.tolist()))
        collect("critic/rewards", sum(row.token_level_rewards.tolist()))
        for t in range(width[1]):
            if row.response_mask[t]:
                for name in ("advantages", "returns", "values"):
                    collect(f"critic/{name}", row.get(name)[t].item())
    metrics = {"response/aborted_ratio": statistics.fmean(collected.pop("aborted"))}
    for name, values in collected.items():
        metrics |= mean_max_min(name, statistics.fmean(values), max(values), min(values))
        if "length" in name:
            full = width[0] if name == "prompt_length" else width[1]
            metrics[f"{name}/clip_ratio"] = values.count(full) / len(values)
    returns = collected.get("critic/returns", [])
    if len(returns) > 1:
        errors = [target - value for target, value in zip(returns, collected["critic/values"], strict=True)]
        metrics["critic/vf_explained_var"] = 1 - statistics.variance(errors) / (statistics.variance(returns) + 1e-5)
    return metrics


@settings(max_examples=40, deadline=None)
@given(
    prompt_lengths=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    width=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
def test_data_metrics_equal_their_slow_twin_on_ragged_rows(prompt_lengths, width, seed):
    rng = np.random.default_rng(seed)
    size = len(prompt_lengths), width
    response_lengths = rng.integers(0, width + 1, size[0]).tolist()
    tail = ragged_mask(response_lengths, width, left_padded=False)
    batch = make_batch(
        prompt_lengths,
        response_lengths,
        width=(4, width),
        response_mask=tail * torch.from_numpy(rng.integers(0, 2, size)),  # holes: observations
        end_reason=rng.choice(["terminated", "max_tokens", "env_error", "timeout", "aborted"], size[0]).tolist(),
        **{name: torch.from_numpy(rng.normal(size=size).astype(np.float32)) for name in FLOATS},
    )
    expected = slow_data_metrics(batch, (4, width))
    assert metric_utils.compute_data_metrics(batch) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def scored_batch(groups: dict[str, list[float]], **columns) -> DataProto:
    """One-token responses with the given scores; groups are interleaved row by row."""
    rows = [(uid, score) for uid, scores in groups.items() for score in scores][::-1]
    scores = torch.tensor([[score] for _, score in rows])
    ones = [1] * len(rows)
    return make_batch(ones, ones, (1, 1), token_level_scores=scores, uid=[uid for uid, _ in rows], **columns)


@pytest.mark.parametrize(
    ("groups", "zero_std", "all_fail", "all_pass", "tie"),
    [
        ({"a": [0.0, 1.0], "b": [1.0, 1.0], "c": [0.0, 0.0], "d": [0.5, 0.5, 0.5]}, 0.75, 0.25, 0.25, 0.25),
        ({"a": [-1.0, -1.0], "b": [2.0, -1.0], "c": [-1.0, -1.0], "d": [0.0, 1.0]}, 0.5, 0.5, 0, 0),
        ({"a": [0.0, 0.0], "b": [0.0, 0.0]}, 1, 1, 0, 0),  # a constant reward: its sign decides
        ({"a": [-1.0, -1.0]}, 1, 1, 0, 0),
        ({"a": [1.0, 1.0], "b": [1.0, 1.0]}, 1, 0, 1, 0),
        ({"a": [0.0, 1.0], "b": [0.3, 0.3 + 6e-8], "alone": [0.7]}, 0.5, 0, 0, 0.5),  # rounding is no spread
        ({"a": [0.0, 1.0], "b": [0.0, 1e-3]}, 0, 0, 0, 0),
    ],
)
def test_groups_without_spread_are_split_by_how_they_scored(groups, zero_std, all_fail, all_pass, tie):
    shares = {"zero_std": zero_std, "all_fail": all_fail, "all_pass": all_pass, "tie": tie}
    assert compute_group_metrics(scored_batch(groups)) == {
        f"group/{name}_frac": share for name, share in shares.items()
    }


def test_failed_rows_leave_their_group():
    # Without its failed rows, group a scores alike and group b is a single row. Rows are stored in reverse order.
    groups = {"a": [1.0, 1.0, 0.0], "b": [0.0, 1.0], "c": [0.0, 1.0]}
    reasons = ["terminated", "terminated", "env_error", "timeout", "terminated", "terminated", "max_turns"][::-1]
    metrics = compute_group_metrics(scored_batch(groups, end_reason=reasons))
    assert metrics["group/zero_std_frac"] == metrics["group/all_pass_frac"] == 0.5


def test_every_end_reason_has_its_share():
    reasons = ["terminated", "max_tokens", "terminated", "out_of_cheese"]
    metrics = compute_group_metrics(scored_batch({"a": [0.0, 1.0], "b": [0.0, 1.0]}, end_reason=reasons))
    shares = {name: share for name, share in metrics.items() if name.startswith("end_reason/")}
    wanted = dict.fromkeys(metric_utils.END_REASONS, 0) | {"terminated": 0.5, "max_tokens": 0.25, "out_of_cheese": 0.25}
    assert shares == {f"end_reason/{reason}": share for reason, share in wanted.items()}


def test_timer_accumulates_even_when_its_body_raises(monkeypatch):
    readings = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(metric_utils, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    timing: dict[str, float] = {}
    with metric_utils.timer("gen", timing):
        pass
    with pytest.raises(KeyError), metric_utils.timer("gen", timing):
        raise KeyError
    assert timing == {"gen": 3.5}


def verl_bootstrap(data: list, subset_size: int, reduce_fn, n_bootstrap: int = 1000) -> tuple[float, float]:
    """The definition: seed the global generator, draw one resample after the other, reduce each."""
    np.random.seed(42)
    results = []
    for _ in range(n_bootstrap):
        picks = np.random.choice(len(data), size=subset_size, replace=True)
        results.append(reduce_fn([data[i] for i in picks]))
    return float(np.mean(results)), float(np.std(results))


def test_validation_metrics_are_computed_per_prompt_and_averaged_over_prompts():
    # Prompt p has four samples, q four; rows of both are mixed.
    uids = ["p", "q", "p", "q", "p", "q", "p", "q"]
    reward = [1.0, 0.0, 0.0, 0.5, 1.0, 0.0, 0.0, 0.5]
    answer = ["4", "9", "5", "7", "4", "9", "6", "7"]
    np.random.seed(7)
    nested = process_validation_metrics(["gsm8k"] * 8, uids, {"reward": reward, "pred": answer, "notes": []})
    assert np.random.random() == np.random.RandomState(7).random(), "the global generator is the user's"
    of_p, of_q = [1.0, 0.0, 1.0, 0.0], [0.0, 0.5, 0.0, 0.5]
    expected = {"mean@4": 0.375, "std@4": 0.375}
    for n in (2, 4):
        for kind, reduce_fn in (("best", np.max), ("worst", np.min)):
            mean, std = np.mean([verl_bootstrap(of_p, n, reduce_fn), verl_bootstrap(of_q, n, reduce_fn)], axis=0)
            expected |= {f"{kind}@{n}/mean": mean, f"{kind}@{n}/std": std}
        votes_p = list(zip(["4", "5", "4", "6"], of_p, strict=True))
        votes_q = list(zip(["9", "7", "9", "7"], of_q, strict=True))
        mean, std = np.mean([verl_bootstrap(votes, n, slow_majority) for votes in (votes_p, votes_q)], axis=0)
        expected |= {f"maj@{n}/mean": mean, f"maj@{n}/std": std}
    assert list(nested) == ["gsm8k"] and list(nested["gsm8k"]) == ["reward"]
    assert nested["gsm8k"]["reward"] == pytest.approx(expected)
    lists = {"reward": reward, "pred": [[int(number)] for number in answer]}
    assert process_validation_metrics(["gsm8k"] * 8, uids, lists) == nested, "answers of any kind are votes"


def slow_majority(votes: list[tuple[str, float]]) -> float:
    answers = [answer for answer, _ in votes]
    winner = max(answers, key=answers.count)
    return votes[answers.index(winner)][1]


@pytest.mark.parametrize(("num_samples", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (5, [2, 4, 5]), (8, [2, 4, 8])])
def test_subset_sizes_double_up_to_the_number_of_samples(num_samples, sizes):
    metrics = process_validation_metrics(["s"] * num_samples, ["p"] * num_samples, {"acc": [True] * num_samples})
    assert [name for name in metrics["s"]["acc"] if name.startswith("best") and name.endswith("mean")] == [
        f"best@{n}/mean" for n in sizes
    ]
    assert metrics["s"]["acc"][f"mean@{num_samples}"] == 1.0


def test_missing_values_are_dropped_and_their_answers_with_them():
    infos = {"acc": [1.0, None, 0.0], "pred": ["x", "x", "x"], "late": [None, None, None]}
    nested = process_validation_metrics(["s"] * 3, ["p"] * 3, infos)
    assert list(nested["s"]) == ["acc"]
    assert nested["s"]["acc"]["mean@3"] == 0.5
    assert nested["s"]["acc"]["maj@2/mean"] == pytest.approx(verl_bootstrap([1.0, 0.0], 2, lambda row: row[0])[0])


def test_a_prompt_with_a_missing_value_counts_under_the_same_names_as_others():
    scores = [1.0, 1.0, 1.0, 1.0, 0.0, None, 0.0, 0.0]
    metrics = process_validation_metrics(["s"] * 8, [*"ppppqqqq"], {"reward": scores, "pred": [*"1111222x"]})
    found = metrics["s"]["reward"]
    assert found["mean@4"] == 0.5 and found["best@4/mean"] == found["maj@4/mean"] == 0.5
    complete = process_validation_metrics(["s"] * 4, [*"pppp"], {"reward": scores[:4], "pred": [*"1111"]})
    assert found.keys() == complete["s"]["reward"].keys()


def test_variables_of_other_types_have_no_metrics():
    of_other_types = {"feedback": ["good", "bad"], "turns": [[1, 2], [3]], "mixed": [1.0, "n/a"]}
    infos = {"reward": [np.float32(0.5), np.True_], **of_other_types}
    nested = process_validation_metrics(["s", "s"], ["p", "p"], infos)
    assert list(nested["s"]) == ["reward"]
    assert "maj@2/mean" not in nested["s"]["reward"]


def test_core_metrics_are_those_of_the_largest_n_of_the_core_variable():
    at_2 = {"best@2/mean": 1.0, "best@2/std": 0.0, "worst@2/mean": 0.0, "maj@2/mean": 1.0}
    at_4 = {"mean@4": 0.5, "std@4": 0.5, "best@4/mean": 1.0, "best@4/std": 0.1, "worst@4/mean": 0.0, "maj@4/mean": 1.0}
    nested = {
        "math": {"reward": {"mean@1": 0.1}, "acc": {**at_2, **at_4}},
        "maze": {"reward": {"mean@1": 0.7}},
        "pole": {"return": {"mean@1": 9.0}},
    }
    assert metric_utils.flatten_validation_metrics(nested, num_turns=[1, 2, 6]) == {
        "val-aux/math/reward/mean@1": 0.1,
        **{f"val-aux/math/acc/{metric}": value for metric, value in at_2.items()},
        "val-core/math/acc/mean@4": 0.5,
        "val-aux/math/acc/std@4": 0.5,
        "val-core/math/acc/best@4/mean": 1.0,
        "val-core/math/acc/best@4/std": 0.1,
        "val-aux/math/acc/worst@4/mean": 0.0,
        "val-core/math/acc/maj@4/mean": 1.0,
        "val-core/maze/reward/mean@1": 0.7,
        "val-core/pole/return/mean@1": 9.0,
        **mean_max_min("val-aux/num_turns", 3, 6, 1),
    }


def test_metrics_of_sources_by_hand_where_a_batch_has_several(batch):
    assert metric_utils.compute_source_metrics(batch) == {}
    batch.non_tensor_batch["data_source"] = np.array(["a", "b", "a"], dtype=object)
    # Of a, the second row is aborted: it counts as drawn, and is no measurement.
    assert metric_utils.compute_source_metrics(batch) == pytest.approx(
        {"source/a/share": 2 / 3, "source/a/score/mean": 1.0, "source/b/share": 1 / 3, "source/b/score/mean": -0.5}
    )
    batch.non_tensor_batch["data_source"] = np.array(["a", "a", "a"], dtype=object)
    assert metric_utils.compute_source_metrics(batch) == {}
