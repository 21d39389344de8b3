"""The questions of examples/arithmetic.py, and what answers to them earn."""

import pytest

from examples.arithmetic import TASKS, Question, compute_score, make_rows


@pytest.mark.parametrize(
    ("answer", "truth", "right"),
    [
        ("19", "19", True),
        ("12 + 7 = **19**", "19", True),
        ("The answer is 19.0", "19", True),
        ("19, as 12 + 7 is", "19", False),  # the last number is 7
        ("-19", "19", False),
        ("20-13", "13", True),  # a minus between numbers is no sign
        ("1.19", "19", False),
        ("1,234", "1234", True),
        ("1,234", "234", False),
        ("", "0", False),
    ],
)
def test_the_last_number_of_an_answer_counts(answer: str, truth: str, right: bool) -> None:
    assert compute_score("arithmetic", answer, truth) == {"score": float(right), "acc": float(right)}


def test_examples_are_worked_out_before_the_question() -> None:
    assert Question("chain_sum", (5, 4, -2)).worked_out == "5 + 4 = 9, 9 - 2 = 7."
    row = make_rows("chain_sum", "train", seed=0, count=1)[0]
    assert [message["role"] for message in row["prompt"]] == ["user", "assistant"] * 2 + ["user"]
    assert [message["content"] for message in row["prompt"][2:4]] == ["What is 8 - 3 + 6?", "8 - 3 = 5, 5 + 6 = 11."]
    assert all(not example.is_held_out for task in TASKS.values() for example in task.examples)


@pytest.mark.parametrize("task", TASKS)
def test_answers_are_right_and_never_negative(task: str) -> None:
    for row in make_rows(task, "train", seed=1, count=500):
        expression = row["prompt"][-1]["content"].split("?")[0].removeprefix("What is ")
        assert eval(expression) == int(row["reward_model"]["ground_truth"]) >= 0


@pytest.mark.parametrize("task", TASKS)
def test_no_seed_trains_on_a_question_that_any_seed_holds_out(task: str) -> None:
    def questions(split: str, seed: int, count: int) -> list[tuple[str, ...]]:
        """Lists the sorted words of each question, so that 3 + 4 equals 4 + 3."""
        texts = [row["prompt"][-1]["content"].split("?")[0] for row in make_rows(task, split, seed, count)]
        return [tuple(sorted(text.replace("- ", "-").split())) for text in texts]

    held_out = {question for seed in range(3) for question in questions("val", seed, 200)}
    assert held_out and not held_out & {question for seed in range(3) for question in questions("train", seed, 2000)}
