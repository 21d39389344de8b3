"""Several reward functions: how their scores are summed and logged, whose rows each scores, what is refused."""

from pathlib import Path

import pytest

from configs.checks import check_config
from configs.errors import ConfigError
from configs.schema import RewardConfig
from extras.weighted.settings import WeightedFunctionConfig
from tests import test_reward
from tests.runs import compose
from tests.test_reward import TOKENIZER, rollout
from training.reward import add_scores, load_reward_manager, reward_metrics

PARTS = """
def correct(response, ground_truth):
    return {"score": float(response == ground_truth), "pred": response}
def brevity(responses, most=10):
    return [1 - len(text) / most for text in responses]
def broken(response):
    raise KeyError("lost")
def of_data(data):
    return [0.0] * len(data)
def score(response):
    return {"score": 1.0, "pred": response}
def maths(response):
    return {"score": 1.0, "digits": len(response)} if response.isdigit() else None
def words(response):
    return None if not response.isalpha() else 0.5
"""


def functions(folder: Path, *entries: dict, **settings) -> RewardConfig:
    (folder / "parts.py").write_text(PARTS)
    entries = [WeightedFunctionConfig(**{"path": str(folder / "parts.py")} | entry) for entry in entries]
    return RewardConfig(functions=entries, **test_reward.HERE | settings)


def test_several_functions_are_summed_by_weight_and_logged_by_name(tmp_path):
    entries = [{"name": "correct", "weight": 2.0}, {"name": "brevity", "weight": -0.5, "reward_kwargs": {"most": 8}}]
    config = functions(tmp_path, *entries)
    reward = load_reward_manager(config, TOKENIZER, None)
    batch = rollout("42", "no", reward_model=[{"ground_truth": "42"}] * 2)
    batch = add_scores(batch, reward, TOKENIZER, config)
    assert batch.token_level_scores.sum(1).tolist() == [2.0 - 0.375, -0.375]
    metrics = reward_metrics(batch)
    assert metrics["reward/correct/mean"] == 0.5 and metrics["reward/brevity/mean"] == 0.75
    assert [*batch.get("correct/pred")] == ["42", "no"]
    (tmp_path / "alone.py").write_text(PARTS.split("def brevity")[0])
    [part] = load_reward_manager(functions(tmp_path, {"path": str(tmp_path / "alone.py")}), TOKENIZER, None).parts
    assert part.label == "correct", "the only function of its file"


@pytest.mark.parametrize("names", [("score", "brevity"), ("brevity", "score")])
def test_a_part_that_is_called_score_is_not_the_score(tmp_path, names):
    """0.60 became 1.10, or 1.0, by the order of the functions."""
    weights = {"score": 0.1, "brevity": 0.5}
    config = functions(tmp_path, *({"name": name, "weight": weights[name]} for name in names))
    batch = add_scores(rollout("ab"), load_reward_manager(config, TOKENIZER, None), TOKENIZER, config)
    assert batch.token_level_scores.sum().item() == pytest.approx(0.1 * 1.0 + 0.5 * 0.8)
    metrics = reward_metrics(batch)
    assert metrics["reward/parts.score/mean"] == 1 and metrics["reward/brevity/mean"] == pytest.approx(0.8)


def test_a_function_that_returns_none_has_no_part_in_a_response(tmp_path):
    entries = [{"name": "maths", "weight": 2.0}, {"name": "words"}, {"name": "correct", "weight": 0.0}]
    config = functions(tmp_path, *entries)
    batch = rollout("42", "no", "6", reward_model=[{"ground_truth": "42"}] * 3)
    batch = add_scores(batch, load_reward_manager(config, TOKENIZER, None), TOKENIZER, config)
    assert batch.token_level_scores.sum(1).tolist() == [2.0, 0.5, 2.0] and set(batch.reward_outcome) == {"ok"}
    assert [*batch.maths] == [1.0, None, 1.0] and [*batch.words] == [None, 0.5, None]
    assert reward_metrics(batch)["reward/maths/digits/mean"] == 1.5

    config = functions(tmp_path, *entries[:2])
    batch = rollout("42", "no", "6!", end_reason=["terminated"] * 3)
    batch = add_scores(batch, load_reward_manager(config, TOKENIZER, None), TOKENIZER, config)
    assert [*batch.reward_outcome] == ["ok", "ok", "error"], "nobody scores the last"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"name": "brevity"}, {"name": "briefly"}], r"reward.functions\[1\]: .*has no 'briefly'; it has .*brevity"),
        ([{"name": "of_data"}], r"reward.functions\[0\]: of_data in .*takes a DataProto"),
        ([{"name": "brevity"}] * 2, r"\[1\] and reward.functions\[0\] would both be logged as reward/parts.brevity"),
        ([{"name": "brevity", "reward_kwargs": {"least": 1}}], r"reward.functions\[0\].reward_kwargs"),
    ],
)
def test_an_entry_that_cannot_work_is_named(tmp_path, entries, message):
    with pytest.raises(ValueError, match=message):
        load_reward_manager(functions(tmp_path, *entries), TOKENIZER, None)


def test_of_several_functions_one_scores_the_rows_of_its_data_sources(tmp_path):
    (tmp_path / "parts.py").write_text(
        "def right(solution_str, ground_truth): return float(solution_str == ground_truth)\n"
        "def short(solution_strs): return [float(len(text) < 2) for text in solution_strs]\n"
    )
    entries = [
        WeightedFunctionConfig(f"{tmp_path}/parts.py", "right"),
        WeightedFunctionConfig(f"{tmp_path}/parts.py", "short", weight=0.5, data_sources=["essays", "poems"]),
    ]
    config = RewardConfig(functions=entries, **test_reward.HERE)
    batch = rollout("4", "4", "57", data_source=["sums", "essays", "poems"], reward_model=[{"ground_truth": "4"}] * 3)
    batch = add_scores(batch, load_reward_manager(config, TOKENIZER, None), TOKENIZER, config)
    assert batch.token_level_scores.sum(1).tolist() == [1.0, 1.5, 0.0]
    assert batch.short.tolist() == [None, 1.0, 0.0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["custom_reward_function.path=a.py", "functions=[{path: b.py, name: f}]"], r"=\[f\] and .*=a.py: set one of"),
        (["functions=[{path: b.py}, {name: brevity}]"], r"reward.functions\[1\] \(brevity\) has no path"),
        (["functions=[{path: b.py}]", "reward_manager.path=mine.py"], r"mine.py.* scores answers, .*\[compute_score\]"),
        (["functions=[{path: a.py, wight: 0.5}]"], r"reward\.functions.*wight"),
        (["functions=[{path: a.py, weight: heavy}]"], r"reward\.functions.*heavy"),
    ],
)
def test_functions_without_a_file_or_beside_another_reward_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_config(compose(*(f"reward.{override}" for override in overrides)))


def test_an_entry_has_defaults_as_settings_have():
    config = compose("env.id=null", "data.train_files=datasets:x", "reward.functions=[{path: a.py, weight: 0.5}]")
    [entry] = config.reward.functions
    assert (entry.path, entry.name, entry.weight, entry.reward_kwargs) == ("a.py", "compute_score", 0.5, {})
