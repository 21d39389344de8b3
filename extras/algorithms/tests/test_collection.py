"""The data of a step: greedy baselines (ReMax), further prompts until enough groups differ (dynamic sampling)."""

import copy
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import main
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from data.sampler import PromptLoader, SequentialSampler
from data.types import SamplingParams
from tests.batches import Turn, episode_batch, padded
from tests.engines import trainer_on
from tests.runs import compose, learning_metrics, short_run, state_files
from tests.test_resume import run_until
from training.ray_trainer import RayPPOTrainer
from training.reward import RewardManager
from training.reward_function import FunctionReward
from training.tracking import Observers

TOKENIZER = build_tokenizer()
WIDTH = 3
ALL_SCORED = {"reward/timeout": 0.0, "reward/error": 0.0}


class Parrot:
    """Answers what a prompt's row has in store: the k-th of `answers` to its k-th sample, and `greedy`."""

    def __init__(self) -> None:
        self.asked: list[DataProto] = []
        self.sampled: list[bool] = []
        self.seeds: list[int] = []

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        self.asked.append(copy.deepcopy(prompts))
        self.sampled.append(sampling.do_sample)
        self.seeds.append(seed)
        seen, responses = Counter(), []
        for uid, answers, best in zip(prompts.uid, prompts.answers, prompts.greedy, strict=True):
            responses.append(TOKENIZER.encode(answers[seen[uid]] if sampling.do_sample else best))
            seen[uid] += 1
        rollouts = padded([*prompts.raw_prompt_ids], responses, 1, WIDTH, TOKENIZER.pad_token_id)
        return self.together(prompts, rollouts)

    def together(self, prompts: DataProto, answers: DataProto) -> DataProto:
        return DataProto(answers.batch, {**prompts.non_tensor_batch, **answers.non_tensor_batch}, prompts.meta_info)


def rows_of(*answers: tuple[str, ...], greedy: str = "0") -> list[dict[str, Any]]:
    """One prompt for each tuple of answers; the greedy answer to the k-th prompt is the k-th character of `greedy`."""
    bests = itertools.islice(itertools.cycle(greedy), len(answers))
    return [
        {"raw_prompt_ids": [TOKENIZER.convert_tokens_to_ids("?")], "place": place, "answers": [*said], "greedy": best}
        for place, (said, best) in enumerate(zip(answers, bests, strict=True))
    ]


def as_number(solution_str: str) -> float:
    return float(solution_str or 0)


def collector(
    rows: list[dict], *overrides: str, reward: RewardManager | None = None, prompts: int = 2, rollout: Any = None
) -> RayPPOTrainer:
    sizes = [f"data.train_batch_size={prompts}", f"actor_rollout_ref.rollout.n={len(rows[0]['answers'])}"]
    own = ["algorithm.adv_estimator=grpo", f"data.max_response_length={WIDTH}", *overrides]
    config = compose(*sizes, *own, name="ppo_trainer")
    loader = PromptLoader(rows, prompts, SequentialSampler(rows, config.data))
    return trainer_on(config, TOKENIZER, rollout or Parrot(), reward or FunctionReward(as_number), train_loader=loader)


def collected(parts: RayPPOTrainer, timing: dict[str, float] | None = None) -> tuple[DataProto, dict[str, float]]:
    rollouts = parts.collect(parts.global_step, {} if timing is None else timing)
    parts.left_out, metrics = rollouts.left_out, dict(rollouts.metrics)
    assert metrics.pop("training/epoch") == parts.train_loader.epoch
    return rollouts.batch, metrics


def texts(batch: DataProto) -> list[str]:
    return TOKENIZER.batch_decode(batch.batch["responses"], skip_special_tokens=True)


# ReMax

REMAX = "algorithm.adv_estimator=remax"


def test_the_baseline_of_each_row_is_the_score_of_the_greedy_answer_to_its_prompt():
    parts = collector(rows_of(("1", "2", "3"), ("4", "5", "6"), greedy="79"), REMAX)
    timing: dict[str, float] = {}
    batch, metrics = collected(parts, timing)
    assert batch.batch["reward_baselines"].tolist() == [7, 7, 7, 9, 9, 9]
    assert batch.batch["token_level_scores"].sum(1).tolist() == [1, 2, 3, 4, 5, 6]
    _, greedy = parts.rollout.asked
    assert parts.rollout.sampled == [True, False]
    assert greedy.place.tolist() == [0, 1]  # once a prompt
    assert {"data", "gen", "reward", "gen_max"} == timing.keys() and metrics == ALL_SCORED


def with_length(solution_str: str) -> dict[str, float]:
    return {"score": float(solution_str or 0), "double": 2 * float(solution_str or 0), "size": len(solution_str)}


class InPlace(Parrot):
    """An engine of the user's, which adds its columns to what it is given."""

    def together(self, prompts: DataProto, answers: DataProto) -> DataProto:
        return prompts.union(answers)


@pytest.mark.parametrize("engine", [Parrot, InPlace])
def test_what_the_reward_says_of_greedy_answers_enters_neither_columns_nor_metrics(engine):
    rows = rows_of(("1", "2"), ("4", "5"), greedy="89")
    batch, metrics = collected(collector(rows, REMAX, rollout=engine(), reward=FunctionReward(with_length)))
    assert batch.double.tolist() == [2, 4, 8, 10] and batch.meta_info["reward_extra_keys"] == ["double", "size"]
    assert metrics["reward/double/max"] == 10 and metrics["reward/double/mean"] == 6
    assert batch.batch["reward_baselines"].tolist() == [8, 8, 9, 9]


def test_where_the_greedy_answer_failed_its_prompts_samples_are_the_baseline():
    rows = rows_of(("1", "2"), ("4", "5"), greedy="?9")
    rows[0]["greedy"] = ""
    batch, _ = collected(collector(rows, REMAX))
    assert batch.batch["reward_baselines"].tolist() == [1.5, 1.5, 9, 9]


# Dynamic sampling

FILTER = "algorithm.filter_groups.enable=true"
MOST = "algorithm.filter_groups.max_num_gen_batches"
METRIC = "algorithm.filter_groups.metric"
TIE, DIFFER = ("1", "1"), ("1", "0")


def places(batch: DataProto) -> list[int]:
    return batch.place.tolist()


def test_zero_is_no_limit():
    parts = collector(rows_of(*[TIE] * 30, DIFFER, DIFFER), FILTER, f"{MOST}=0")
    batch, metrics = collected(parts)
    assert places(batch) == [30, 30, 31, 31] and metrics["train/num_gen_batches"] == 16
    assert compose(name="ppo_trainer").algorithm.filter_groups.max_num_gen_batches == 10


class Turning(Parrot):
    """An engine whose answer k is an episode of k + 1 turns, a row each, of which the last earns k."""

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        said = super().generate_sequences(prompts, sampling, seed)
        turns = [[Turn(1)] * int(text) + [Turn(1, 0, float(text))] for text in texts(said)]
        batch = episode_batch([turns], "turns")
        rows = batch.episode.astype(int)
        batch.non_tensor_batch |= {name: column[rows] for name, column in prompts.non_tensor_batch.items()}
        batch.non_tensor_batch["episode"] = np.array([f"{seed}-{row}" for row in rows], dtype=object)
        return batch


def test_groups_count_however_many_rows_their_episodes_have():
    rows = rows_of(TIE, ("2", "0"), ("0", "3"), ("4", "4"))
    parts = collector(rows, FILTER, rollout=Turning())
    batch, metrics = collected(parts)
    assert Counter(places(batch)) == {1: 3 + 1, 2: 1 + 4} and Counter(places(parts.left_out)) == {0: 2 + 2, 3: 5 + 5}
    assert metrics == {"train/num_gen_batches": 2, "group/kept_frac": 0.5}
    remax = collector(rows_of(("1", "2"), ("0", "3"), greedy="31"), REMAX, rollout=Turning())
    batch, _ = collected(remax)
    assert batch.batch["reward_baselines"].tolist() == [3] * 5 + [1] * 5


def test_the_metric_may_be_a_number_beside_the_score():
    rows = rows_of(("1", "2"), ("1", "22"), ("3", "33"), ("4", "55"))
    by_size = collector(rows, FILTER, f"{METRIC}=size", reward=FunctionReward(with_length))
    batch, metrics = collected(by_size)
    assert places(batch) == [1, 1, 2, 2]
    assert batch.size.tolist() == [1, 2, 1, 2]
    assert metrics["reward/size/mean"] == 11 / 8  # of all that was drawn


def test_responses_that_could_not_be_scored_are_counted_in_all_draws():
    rows = rows_of(TIE, DIFFER, DIFFER, ("1", "8"))
    reward = FunctionReward(lambda solution_str: math.nan if solution_str == "8" else float(solution_str))
    _, metrics = collected(collector(rows, FILTER, reward=reward))
    assert metrics["train/num_gen_batches"] == 2 and metrics["reward/error"] == 1


def test_acc_is_the_score_of_a_reward_that_returns_a_lone_number_and_of_no_other():
    parts = collector(rows_of(TIE, DIFFER), FILTER, f"{METRIC}=acc", reward=FunctionReward(with_length))
    with pytest.raises(ValueError, match=r"filter_groups\.metric=acc: .* one of \['double', 'size'\]"):
        collected(parts)


def test_every_draw_has_uids_and_a_seed_of_its_own():
    parts = collector(rows_of(TIE, TIE, TIE, DIFFER, TIE, DIFFER), FILTER)
    uids: set[str] = set()
    for parts.global_step in (1, 2):
        collected(parts)
    asked = parts.rollout.asked
    for prompts in asked:
        assert set(Counter(prompts.uid).values()) == {2} and not uids & set(prompts.uid)
        uids |= set(prompts.uid)
    assert len(asked) == 6 and len(set(parts.rollout.seeds)) == 6


@example(kinds=[False] * 6, limit=2)
@example(kinds=[True, False, True], limit=1)
@settings(max_examples=20, deadline=None)
@given(
    kinds=st.lists(st.booleans(), min_size=6, max_size=24).filter(lambda kinds: len(kinds) % 3 == 0),
    limit=st.integers(1, 5),
)
def test_the_batch_is_the_first_groups_that_differ_and_then_the_first_that_tie(kinds: list[bool], limit: int):
    parts = collector(rows_of(*[DIFFER if kind else TIE for kind in kinds]), FILTER, f"{MOST}={limit}", prompts=3)
    batch, metrics = collected(parts)
    drawn: list[int] = []
    stream = itertools.cycle(range(len(kinds)))
    while len(drawn) < 3 * limit and sum(kinds[place] for place in drawn) < 3:
        drawn += itertools.islice(stream, 3)
    wanted = sorted(range(len(drawn)), key=lambda nth: not kinds[drawn[nth]])[:3]
    assert places(batch) == [drawn[nth] for nth in wanted for _ in range(2)]
    assert metrics["train/num_gen_batches"] == len(drawn) / 3
    assert math.isclose(metrics["group/kept_frac"], sum(kinds[place] for place in drawn) / len(drawn), rel_tol=1e-6)


# A score that moves the global generators, and a metric by which about half the groups of two samples tie.
MOVING = """
import random

def compute_reward(prompt, response, ground_truth):
    return {"score": len(set(response)) + random.random(), "vowel": any(c in "aeiou0123456789AEIOU" for c in response)}
"""


def test_a_run_that_filters_stopped_in_every_step_is_the_unbroken_run(tiny_model: Path, tmp_path: Path):
    """Stopped by turns within a step and after its checkpoint."""
    (tmp_path / "moving.py").write_text(MOVING)

    def overrides(folder: str) -> list[str]:
        return short_run(
            tiny_model,
            tmp_path / folder,
            f"reward.custom_reward_function.path={tmp_path}/moving.py",
            "reward.custom_reward_function.name=compute_reward",
            *(FILTER, f"{METRIC}=vowel", f"{MOST}=6"),
            *("data.max_response_length=4", "trainer.n_threads=1", "env.val_episodes=0"),
            *("trainer.total_training_steps=3", "trainer.save_freq=1"),
        )

    main.run(compose(*overrides("unbroken")))
    for step in range(1, 4):
        run_until(step, overrides("broken"), (RayPPOTrainer, "after_step") if step % 2 else (Observers, "stepped"))
    main.run(compose(*overrides("broken")))
    metrics = learning_metrics(tmp_path / "unbroken")
    assert learning_metrics(tmp_path / "broken") == metrics
    assert state_files(tmp_path / "broken", 3) == state_files(tmp_path / "unbroken", 3)
    draws = [metrics[step]["train/num_gen_batches"] for step in range(1, 4)]
    assert len(set(draws)) > 1 and max(draws) > 1  # positions in the data that no fixed stride would reach
    assert metrics[3]["training/epoch"] == (sum(draws) - 1) // 2 > 0, "of two batches each"
    assert sum(draws) > 3 and all(metrics[step]["actor/grad_norm"] > 0 for step in range(1, 4))
