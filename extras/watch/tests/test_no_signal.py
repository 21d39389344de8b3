"""A run whose rewards teach nothing says so, seldom, with the likeliest cause."""

import math
import re

import pytest
import torch

from configs.paths import ROOT
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from extras.watch.health import ENTROPY_COEFF, MEAN_MISMATCH, MismatchAlarm, NoSignal, likeliest_cause, teaches_nothing
from tests.batches import padded


def scores(most: float, mean: float, least: float, advantage: float) -> dict[str, float]:
    """Metrics of a step, whose advantages go as far up as down."""
    ends = {"critic/advantages/max": advantage, "critic/advantages/min": -advantage}
    return {"critic/score/max": most, "critic/score/mean": mean, "critic/score/min": least, **ends}


TIES, TEACHES, LOST = scores(0.0, 0.0, 0.0, 0.0), scores(1.0, 0.5, 0.0, 0.7), scores(-1.0, -1.0, -1.0, 0.0)
FULL = {"episode/tokens/policy/mean": 9.0, "end_reason/context_full": 0.7, "end_reason/max_tokens": 0.2}
LENGTHS = {"response_length/max": 8.0, "response_length/clip_ratio": 0.0, "training/global_step": 7.0}
TOKENIZER = build_tokenizer()


def scored(responses: list[str]) -> DataProto:
    """A batch of these responses to "?", which all score 0."""
    prompts, texts = ([TOKENIZER.encode(text) for text in found] for found in (["?"] * len(responses), responses))
    batch = padded(prompts, texts, 1, max(map(len, responses)), TOKENIZER.pad_token_id)
    batch.batch["token_level_scores"] = 0.0 * batch.batch["response_mask"]
    batch.batch["advantages"] = torch.ones(batch.batch["responses"].shape)
    batch.meta_info["reward_extra_keys"] = []
    return batch.union(DataProto.from_single_dict({"raw_prompt_ids": prompts}))


BATCH = scored(["none", "of", "these", "pays"])


@pytest.mark.parametrize(
    ("metrics", "nothing"),
    [
        (TIES, True),
        (TEACHES, False),
        (scores(1.0, 0.5, 0.0, 0.0), True),  # ties within every group
        (scores(0.0, 0.0, 0.0, 0.4), True),  # a critic's noise, gae
        ({"response/aborted_ratio": 1.0}, True),
    ],
)
def test_a_step_teaches_nothing_if_scores_tie_or_advantages_vanish(metrics, nothing):
    assert teaches_nothing(metrics) is nothing


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        ({"response/aborted_ratio": 1.0}, "every rollout failed"),
        ({**TIES, "reward/valid_action/mean": 0.02}, "^the 2% of the responses that were legal actions .* earned what"),
        ({**TIES, "reward/valid_action/mean": 0.0}, r"0% of the responses could be read as an action .*; 0% of the"),
        ({**TEACHES, "reward/valid_action/mean": 0.02}, "2% of the responses could be read"),
        ({**scores(1.0, 1.0, 1.0, 0.0), "response_length/clip_ratio": 1.0}, "^the reward returns 1 for every response"),
        ({**TIES, "response_length/clip_ratio": 0.9}, "every response scores 0, and 90% of the responses reach data"),
        ({**TIES, "response_length/clip_ratio": 1.0, "response_length/max": 1.0}, "too rare to be found by chance"),
        ({**TIES, "response_length/clip_ratio": 1.0, "reward/valid_action/mean": 0.9}, "too rare to be found"),
        (LOST, "^the reward returns -1 for every .*try_reward.*If it does, no answer is right.$"),
        ({**LOST, "response_length/clip_ratio": 0.9}, "^the reward returns -1 .*, or all are cut: 90% .*_length.$"),
        ({**LOST, "reward/valid_action/mean": 0.9}, "^every response scores -1. The reward is the same"),
        ({**TEACHES, "critic/advantages/max": 0.0}, "samples of a prompt always score alike.*entropy_coeff=0.2"),
        ({**TEACHES, "critic/score/mean": 0.004}, "^nearly every response scores 0. The reward is the same"),
        ({**TEACHES, "critic/score/mean": 0.99}, "^nearly every response scores 1. .* or the task is mastered"),
        (TIES | FULL, "^most episodes end for want of room, 70% with .* context_full and 20% .*Raise data.max_respo"),
        (
            {**TIES, **FULL, "end_reason/context_full": 0.1, "end_reason/answer_cut": 0.7},
            "own limit has cut, 70%.*per_t",
        ),
        ({**TIES, "end_reason/max_tokens": 1.0}, "^every response scores 0"),  # an answer of one token ends so
        ({**TIES, "reward/timeout": 3.0, "reward/error": 1.0}, "^3 responses were not scored in time, and 1 by an"),
        ({"reward/timeout": 0.0, "reward/error": 4.0}, "^0 responses were not scored in time, and 4 by an error"),
    ],
)
def test_the_likeliest_cause_is_the_first_that_fits(metrics, cause):
    assert re.search(cause, likeliest_cause({**LENGTHS, **metrics}))


@pytest.mark.parametrize(("alike", "cause"), [(8, "^in 8 of 8 states of this step .*alike"), (4, "^2% of the")])
def test_moves_that_are_paid_alike_are_the_first_cause_of_ties(alike, cause):
    moves = pytest.importorskip("extras.gym.actions").Moves(8, alike, frozenset([0.0]))
    assert re.search(cause, likeliest_cause({**LENGTHS, **TIES, "reward/valid_action/mean": 0.02}, moves=moves))


def test_the_entropy_coeff_that_is_advised_is_one_figure_everywhere_and_above_the_one_in_use():
    ties = {**LENGTHS, **TEACHES, "critic/advantages/max": 0.0}
    assert "entropy_coeff=0.6: see docs" in likeliest_cause(ties, 0.3)
    assert f"coeff: {ENTROPY_COEFF:g}  #" in (ROOT / "extras/report/summary.yaml").read_text()
    page = (ROOT / "docs/environments.md").read_text()
    advice = re.findall(r"[Ss]et `actor_rollout_ref.actor.entropy_coeff=(.*?)`", page)
    assert {*map(float, advice)} == {ENTROPY_COEFF}


def test_it_is_said_once_in_a_row_and_again_the_tenth_time(caplog):
    watch = NoSignal(3, TOKENIZER)
    for metrics in [TIES, TIES, TEACHES, TIES, TIES]:
        watch.check({**LENGTHS, **metrics}, BATCH)
    assert not caplog.records
    for _ in range(5):
        watch.check({**LENGTHS, **TIES}, BATCH)
    [record] = caplog.records
    assert record.getMessage().startswith("3 steps in a row taught nothing (trainer.no_signal_steps):")
    for times in range(2, 30):
        for metrics in [TEACHES, TIES, TIES, TIES]:
            watch.check({**LENGTHS, **metrics}, BATCH)
        assert len(caplog.records) == 1 + (times >= 10)
    assert "taught nothing, for the 10th time (" in caplog.text


def test_one_stray_sample_does_not_hide_that_nothing_is_taught(caplog):
    """One row of four has an advantage, in one of ten steps."""
    stray = BATCH.select_idxs([0, 1, 2, 3])
    stray.batch["advantages"] = torch.zeros_like(stray.batch["advantages"])
    stray.batch["advantages"][2] = 0.7
    watch = NoSignal(10, TOKENIZER)
    for step in range(25):
        metrics, batch = (TEACHES, stray) if step in (4, 14, 20) else (TIES, BATCH)
        watch.check({**LENGTHS, **metrics}, batch)
    [record] = caplog.records
    assert record.getMessage().startswith("10 steps in a row taught nothing")


def test_two_responses_are_shown_with_it(caplog, capsys):
    watch = NoSignal(1, TOKENIZER)
    watch.check({**LENGTHS, **TIES}, BATCH)
    shown = capsys.readouterr().out
    assert "of a step that taught nothing · 1 of 2" in shown and "2 of 2" in shown
    assert [text for text in ("none", "of these", "pays") if f"?» {text} « " in shown] == ["none", "pays"]


def test_it_is_said_once_in_a_row_and_again_after_a_step_below(caplog):
    alarm = MismatchAlarm(0.05)
    for value in (0.01, 0.05):
        alarm.check({MEAN_MISMATCH: value}, None)
    assert not caplog.records
    for value in (0.06, 0.2, math.nan):
        alarm.check({MEAN_MISMATCH: value}, None)
    alarm.check({}, None)
    alarm.check({MEAN_MISMATCH: 1.0}, None)
    assert len(caplog.records) == 1 and "0.06 nats a token" in caplog.records[0].getMessage()
    for value in (0.01, math.nan):
        alarm.check({MEAN_MISMATCH: value}, None)
    assert len(caplog.records) == 2


def test_tokens_of_older_weights_are_no_mismatch(caplog):
    alarm = MismatchAlarm(0.05)
    for staleness in (1.0, 3.0):
        alarm.check({MEAN_MISMATCH: 0.2, "staleness/max": staleness}, None)
    assert not caplog.records
    alarm.check({MEAN_MISMATCH: 0.2, "staleness/max": 0.0}, None)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("ratio", "correction", "words"),
    [
        (1.4, {}, "algorithm.rollout_correction=decoupled_token_is, as all tokens differ a little"),
        (40.0, {}, "rollout_correction=decoupled_seq_is, as single tokens are more than 10 times as likely"),
        (40.0, {"rollout_is": "token"}, "algorithm.rollout_correction is set"),
    ],
)
def test_the_mismatch_alarm_names_the_preset_to_set(caplog, ratio, correction, words):
    section = pytest.importorskip("extras.rollout_correction.settings").RolloutCorrectionConfig(**correction)
    MismatchAlarm(0.05, section).check({MEAN_MISMATCH: 0.2, "rollout_mismatch/max_ratio": ratio}, None)
    assert words in caplog.records[0].getMessage()
