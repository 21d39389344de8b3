"""The rows and the reward of examples/char_count.py."""

import pytest

from examples.char_count import compute_score, make_rows, worked_out


def test_an_answer_goes_through_the_letters():
    assert worked_out("n", "nine") == "n = n\ni != n\nn = n\ne != n\n\\boxed{2}"


def test_rows_are_right_spread_over_the_counts_and_held_out():
    rows = {split: make_rows(split, 0, 400) for split in ("sft", "train", "val")}
    words = {split: {row["prompt"][0]["content"].split()[-1] for row in part} for split, part in rows.items()}
    assert not words["val"] & (words["sft"] | words["train"])
    for row in rows["val"]:
        _, _, letter, *_, word = row["prompt"][0]["content"].rstrip("?").split()
        assert row["reward_model"]["ground_truth"] == str(word.count(letter))
    assert {row["reward_model"]["ground_truth"] for row in rows["train"]} >= set("012345")
    assert all(compute_score("", row["response"], row["response"][-2]) == 1 for row in rows["sft"])


@pytest.mark.parametrize(
    ("answer", "score"),
    [("\\boxed{2}", 1), ("n = n\n\\boxed{2}\n", 1), ("\\boxed{3}", 0), ("2", 0), ("\\boxed{2} so", 0)],
)
def test_the_reward_reads_the_box_at_the_end(answer, score):
    assert compute_score("char_count", answer, "2") == score
