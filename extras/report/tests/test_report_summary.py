"""Words about runs, from records made by hand: what happened, and each finding beyond its threshold and not at it."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from extras.report.runs import Curve, RunRecord
from extras.report.summary import beside, facts, findings, sentences, stages

RL = {
    "data": {"train_files": ["sums.parquet"], "train_batch_size": 8},
    "env": {"id": None},
    "actor_rollout_ref": {"model": {"path": "smol"}, "rollout": {"n": 4}, "actor": {"use_kl_loss": False}},
    "algorithm": {"adv_estimator": "grpo"},
    "trainer": {"total_training_steps": 40, "seed": 0},
}
MACHINE = {"host": "lab", "cpu": "EPYC", "cores": 2, "memory_gb": 8.4, "gpus": ["H100", "H100"]}
START = {"machine": MACHINE, "threads": 1, "total_steps": 40, "versions": {"torch": "2.13.0"}, "commit": "abc"}
ACC = "val-core/sums/acc/mean@1"


def record(metrics: dict[str, Sequence[float | None]], folder: str | Path = "run", **fields) -> RunRecord:
    """A run whose metrics have these values from step 1 on."""
    curves = {name: Curve([*range(1, len(values) + 1)], [*values]) for name, values in metrics.items()}
    return RunRecord("mine", Path(folder), metrics=curves, **fields)


def test_a_run_in_words():
    metrics = {"critic/score/mean": [0.0] * 20 + [1.0] * 20}
    metrics |= {"timing_s/step": [2.0] * 40, "training/seconds": [150.0] * 40}
    run = record(metrics, config=RL, state="done", info={"starts": [START, START]})
    run.metrics[ACC] = Curve([0, 20, 40], [0.1, 0.9, 0.85])
    assert sentences(run) == [
        "smol was trained by reinforcement learning (grpo) on the prompts of sums.parquet: 8 prompts a step, "
        "4 samples of each.",
        "Validation on sums: success: 0.1 at step 0, 0.85 at step 40; the best was 0.9 at step 20.",
        "Mean score in training: 0 over the first 10 steps, 1 over the last.",
        "40 of 40 steps are done, in 2.5 minutes; a step takes 2 s (median).",
        "It ran on lab: EPYC, 2 cores, 8.4 GB of memory, 2 × H100, 1 thread a worker.",
        "It ended as planned, after step 40. It was started 2 times.",
    ]
    told = facts(run)
    assert (told["Versions"], told["Commit"], told["Seed"]) == ("torch 2.13.0", "abc", "0")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("running", "It goes on: step 3 was"),
        ("stopped", "It was stopped by SIGTERM after step 3."),
        ("failed", "It failed after step 3: SIGTERM"),
        ("killed", "It was killed after step 3, or"),
        ("ended", "How it ended is not known"),
    ],
)
def test_the_end_in_words(state, said):
    run = record({"a": [1.0] * 3}, state=state, info={"starts": [{"reason": "SIGTERM"}]})
    assert sentences(run)[-1].startswith(said)
    assert bool(findings(run)) == (state in ("failed", "killed"))


def test_the_seconds_of_a_step_are_those_of_its_stages_and_the_rest():
    timed = {"step": [None, 3.5], "mine": [None, 1.0], "testing": [0.5, None], "gen": [None, 2.0], "start": [2.0]}
    metrics = {"training/seconds": [3.0, 7.0], **{f"timing_s/{name}": seconds for name, seconds in timed.items()}}
    names, seconds = ["start", "gen", "testing", "mine", "other"], [[2, 0], [0, 2], [0.5, 0], [0, 1], [0.5, 1]]
    assert stages(record(metrics)) == {"steps": [1, 2], "names": names, "seconds": seconds, "width": 1}
    ahead = record(metrics | {"timing_s/wait": [0.5, 0.0], "timing_s/gen": [4.0, 4.0]})
    assert beside(ahead) == {"steps": [1, 2], "names": ["gen"], "seconds": [[4, 4]], "width": 1}
    assert "gen" not in stages(ahead)["names"] and beside(record(metrics))["names"] == []
    run = record({})
    run.metrics["training/seconds"] = Curve([1, 2, 4, 5, 6], [1.0, 2.0, 9.0, 10.0, 3.0])  # 4 and 6: not known
    assert stages(run) == {"steps": [1, 2, 5], "names": ["other"], "seconds": [[1, 1, 1]], "width": 1}
    assert stages(record({"training/seconds": [*range(251)]}))["width"] == 3


SCORE, SECONDS, ADVANTAGE = "critic/score", "training/seconds", "critic/advantages"
THRESHOLDS = [  # by metrics, their values at the threshold and beyond it, and words of the finding
    ({"actor/kl_loss": ([1.0] * 10, [1.01] * 10)}, "1.01 nats a token away from the reference"),
    ({"actor/ppo_kl": ([0.1] * 10, [0.11] * 10)}, "moves the policy by 0.11"),
    ({"actor/pg_clipfrac": ([0.3] * 10, [0.31] * 10)}, "clipped in 31% of the tokens"),
    ({"critic/vf_explained_var": ([0.0] * 10, [-0.1] * 10)}, "worse than a constant"),
    ({"end_reason/context_full": ([0.2] * 10, [0.21] * 10)}, "want of room"),
    ({"actor/entropy": ([1.0] * 10 + [0.1] * 10, [1.0] * 10 + [0.09] * 10)}, "entropy has collapsed"),
    ({"rollout_mismatch/abs_log_prob_diff": ([0.0, 0.05], [0.0, 0.051])},
     "differ by up to 0.051 nats a token, in step 2; too far in 1 step (trainer.max_rollout_mismatch=0.05)"),
    ({"response_length/clip_ratio": ([0.2] * 10, [0.21] * 10), "response_length/max": ([9.0] * 10,) * 2},
     "21% of the responses fill"),
    ({"actor/skipped_updates": ([0.0, 0.0], [0.0, 1.0])}, "skipped in 1 step, the first 2"),
    ({"other": ([None], [0.1]), "actor/loss": ([0.1], [0.1, None, None])}, "No numbers, the first in step 2: actor/"),
    ({"end_reason/env_error": ([0.01], [0.02]), "response/aborted_ratio": ([0.01], [0.02])},
     "2.0% of the rows failed (2.0% env_error)"),
    ({SECONDS: ([10.0], [10.0]), "timing_s/testing": ([3.0], [3.1]), "timing_s/gen": ([5.0], [4.9])},
     "testing takes 31% of the time (more than 30%)"),
    ({SECONDS: ([10.0], [10.0]), "timing_s/gen": ([8.0], [7.9])}, "other takes 21% of the time"),
    ({"train/grad_norm": ([1.0] * 9 + [30.0], [1.0] * 9 + [31.0])}, "31 in step 10"),
    ({ACC: ([0.2, 1.0, 0.9], [0.2, 1.0, 0.89])}, "Validation on sums: success was 1 at step 2 and is 0.89"),
    ({"val/loss": ([20.0, 10.0, 11.0], [20.0, 10.0, 11.1])}, "Validation: loss was 10 at step 2"),
    ({f"{SCORE}/mean": ([0.1, 0.2], [0.1, 0.21]), f"{SCORE}/min": ([0.0],) * 2, f"{SCORE}/max": ([1.0],) * 2,
      ACC: ([0.3, 0.3, 0.35],) * 2},
     "rose from 0.1 to 0.21, and validation on sums: success was not above 0.3 in 3 validations up to step 3"),
    ({"action/L/share": ([0.01] * 10, [0.009] * 10), "action/R/share": ([0.41] * 10,) * 2},
     "L: played in less than 1% of the answers late in the run (action/…/share), and R in 41%"),
    ({"action/L/share": ([0.0] * 10,) * 2, "action/R/share": ([0.4] * 10, [0.41] * 10)}, "and R in 41%"),
    ({"val-aux/a:B-v0/random_player/return/mean@1": ([0.2] * 2,) * 2,
      "val-core/a:B-v0/return/mean@1": ([0.2, 0.2], [0.1, 0.1])}, "return on a:B-v0 is 0.1 at step 2, that of random"),
    ({"group/zero_std_frac": ([0.8] * 10, [0.81] * 10)}, "score alike in 81% of the groups"),
    ({f"{SCORE}/min": ([0.0] * 9, [0.0] * 10), f"{SCORE}/max": ([0.0] * 9, [0.0] * 10)},
     "10 steps in a row, 1 to 10, taught nothing"),
    ({f"{SCORE}/max": ([1.0] * 10,) * 2, f"{ADVANTAGE}/max": ([0.0] * 9 + [0.1], [0.0] * 10),
      f"{ADVANTAGE}/min": ([0.0] * 10,) * 2}, "taught nothing"),
]  # fmt: skip


@pytest.mark.parametrize(("metrics", "text"), THRESHOLDS, ids=[words for _, words in THRESHOLDS])
def test_a_finding_is_made_beyond_its_threshold_and_not_at_it(metrics, text):
    at, beyond = ({name: values[place] for name, values in metrics.items()} for place in (0, 1))
    assert findings(record(at)) == []
    [finding] = findings(record(beyond))
    assert text in finding.text and finding.remedy.endswith(".")


def test_settings_of_the_run_are_its_thresholds():
    ties = {"critic/score/min": [0.0] * 5, "critic/score/max": [0.0] * 5}
    far = {"rollout_mismatch/abs_log_prob_diff": [0.3]}
    assert len(findings(record(ties, config={"trainer": {"no_signal_steps": 5}}))) == 1
    assert findings(record(ties | far, config={"trainer": {"no_signal_steps": 0, "max_rollout_mismatch": None}})) == []


@pytest.mark.parametrize(
    ("values", "least", "is_flat"),
    [
        ([0.3, 0.3, 0.34], 0.0, True),
        ([0.3, 0.34], 0.0, False),  # two
        ([0.3, 0.36, 0.36], 0.0, False),  # it rises
        ([0.91] * 3, 0.0, False),  # near the best score
        ([-0.1] * 3, -1.0, False),  # the same of scores below 0
        ([-0.9] * 3, -1.0, True),
        ([-210.0, -205.0, -201.0], -1.0, True),  # whole episodes, in another unit
    ],
)
def test_a_validation_is_flat_where_the_reward_rises_and_it_does_not(values, least, is_flat):
    best = least + 1.0
    scores = {"critic/score/min": [least], "critic/score/max": [best], "critic/score/mean": [best - 0.9, best - 0.1]}
    run = record(scores | {ACC: values, "critic/vf_explained_var": [-1.0]})
    last_lines = findings(run, at_end=True)
    assert ["was not above" in finding.text for finding in last_lines] == [True] * is_flat
    assert len(findings(run)) == 1 + is_flat  # the page has the others, too


def test_a_random_player_is_a_bar_from_the_middle_of_a_run_on():
    metrics = {"val-aux/B-v0/random_player/return/mean@1": [0.2] * 2, "val-aux/B-v0/return/mean@1": [0.1] * 2}
    [finding] = findings(record(metrics, config={"trainer": {"total_training_steps": 4}}))
    assert "worse than a random player" in finding.text
    early = record(metrics, config={"trainer": {"total_training_steps": 5}})
    assert findings(early) == []
    assert "The return on B-v0 is 0.1 in the last validation, a random player's 0.2." in sentences(early)


@pytest.mark.parametrize(
    ("metrics", "is_said"),
    [
        ({}, True),
        ({"response_length/max": [1.0]}, False),
        ({"reward/valid_action/mean": [0.9]}, False),
        ({"reward/valid_action/mean": [0.1]}, True),
        ({f"{SCORE}/{name}": [-1.0] for name in ("min", "mean", "max")}, False),  # a constant
        ({f"{SCORE}/min": [0.0], f"{SCORE}/mean": [0.95], f"{SCORE}/max": [1.0]}, False),
        ({f"{SCORE}/min": [0.0], f"{SCORE}/mean": [0.5], f"{SCORE}/max": [1.0]}, True),
    ],
)
def test_an_answer_is_cut_where_it_is_long_and_may_be_worth_less_for_it(metrics, is_said):
    run = record({"response_length/clip_ratio": [1.0], "response_length/max": [9.0], **metrics})
    assert ["may be cut" in finding.text for finding in findings(run)] == [True] * is_said


@pytest.mark.parametrize(("late_score", "is_said"), [(0.99, False), (0.91, False), (0.89, True), (0.5, True)])
def test_an_entropy_that_collapsed_is_said_only_where_the_score_is_not_near_its_best(late_score, is_said):
    scores = {"critic/score/min": [0.0] * 20, "critic/score/max": [0.0] + [1.0] * 19}
    scores |= {"critic/score/mean": [0.1] * 10 + [late_score] * 10}
    said = findings(record({"actor/entropy": [4.0] * 10 + [0.1] * 10} | scores))
    assert len(said) == is_said
    assert all(f"its mean score of {late_score:g} is not near the best" in finding.text for finding in said)


def test_an_entropy_that_was_never_above_zero_has_not_collapsed():
    assert findings(record({"actor/entropy": [-0.2] * 10 + [-1.2] * 10})) == []  # an estimate may be below it


@pytest.mark.parametrize(("in_use", "advised"), [(0.0, "0.2"), (0.05, "0.2"), (0.2, "0.4"), (0.5, "1")])
def test_the_entropy_coeff_that_is_advised_is_above_the_one_in_use(in_use, advised):
    config = {"actor_rollout_ref": {"actor": {"entropy_coeff": in_use}}}
    [finding] = findings(record({"actor/entropy": [1.0] * 10 + [0.0] * 10}, config=config))
    assert f"entropy_coeff={advised}, " in finding.remedy


def test_a_checkpoint_of_the_best_validation_is_named(tmp_path):
    (tmp_path / "global_step_2").mkdir()
    [finding] = findings(record({ACC: [0.2, 1.0, 0.5]}, tmp_path))
    assert f"{tmp_path}/global_step_2 has its model" in finding.remedy
