"""A reward to begin with, and its test: python scripts/create_reward_template.py --task math|code|qa|env --output FILE

Writes FILE, which runs as it is, and test_FILE beside it. Edit both, then try the reward without a model:

    python -m pytest test_FILE
    python -m extras.try_reward FILE --data rows.jsonl --audit
"""

import argparse
from pathlib import Path

MATH = (
    '''"""Reward of MODULE.py: the number that a response boxes is the right one.

Train with it: reward.custom_reward_function.path=MODULE.py
Try it: python -m extras.try_reward MODULE.py --data rows.jsonl
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A dict: `score`, and beside it numbers that are logged as reward/NAME/mean.

    `solution_str`: the response; `ground_truth`: the row's; `extra_info`: whatever else the row says.
    """
    answer = extract_answer(solution_str)
    right = answer is not None and answer == as_number(ground_truth)
    return {"score": float(right), "answered": float(answer is not None)}


def extract_answer(text):
    """The number in the last \\\\boxed{…}; None: there is none, or something else beside it."""
    found = re.findall(r"\\\\boxed\\{([^{}]*)\\}", text)
    return as_number(found[-1]) if found else None


def as_number(text):
    try:
        number = float(str(text).replace(",", "").strip())
    except ValueError:
        return None
    return number if number == number else None  # "nan" is no number
''',
    """import pytest

from MODULE import compute_score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("so \\\\boxed{72}", 1.0),
        ("so \\\\boxed{72.0}", 1.0),
        ("\\\\boxed{7}, no: \\\\boxed{72}", 1.0),
        ("so 72", 0.0),  # not boxed
        ("\\\\boxed{72 or 7}", 0.0),
        ("\\\\boxed{nan}", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_right_answer_pays(response, score):
    assert compute_score("mine", response, "72")["score"] == score
""",
)

CODE = (
    '''"""Reward of MODULE.py: the share of test cases that the program in a response passes, in a sandbox.

A row's ground_truth is {"inputs": ["1 2"], "outputs": ["3"]}, or that as JSON: what the program reads and has to print.
Train with it: reward.custom_reward_function.path=MODULE.py
Try it: python -m extras.try_reward MODULE.py --data rows.jsonl
"""

import json

from extras.rules.prime_code import python_block
from extras.sandbox.run import run_python

SECONDS = 5.0  # of computing, for each case


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A dict: `score`, and beside it numbers that are logged as reward/NAME/mean."""
    code = python_block(solution_str)
    if code is None:
        return {"score": 0.0, "has_code": 0.0}
    cases = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    passed = [passes(code, given, wanted) for given, wanted in zip(cases["inputs"], cases["outputs"], strict=True)]
    return {"score": sum(passed) / len(passed), "has_code": 1.0}


def passes(code, given, wanted):
    """Whether the program ends in time and prints what is wanted."""
    done = run_python(code, given, seconds=4 * SECONDS, cpu_seconds=SECONDS, memory_mb=512)
    return done.status == 0 and done.output.split() == wanted.split()
''',
    """import pytest

from MODULE import compute_score

FENCE = "```"
CASES = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}


def written(code):
    return f"Here it is.\\n{FENCE}python\\n{code}\\n{FENCE}"


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (written("print(sum(map(int, input().split())))"), 1.0),
        (written("print(3)"), 0.5),
        (written("print(3"), 0.0),
        ("print(3)", 0.0),  # no block of code
        ("", 0.0),
    ],
)
def test_passing_cases_pay(response, score):
    assert compute_score("mine", response, CASES)["score"] == score
""",
)

QA = (
    '''"""Reward of MODULE.py: what stands in <answer>…</answer> is the right answer, but for case and articles.

A row's ground_truth is a text, or a list of texts of which any is right.
Train with it: reward.custom_reward_function.path=MODULE.py
Try it: python -m extras.try_reward MODULE.py --data rows.jsonl
"""

import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A dict: `score`, and beside it numbers that are logged as reward/NAME/mean."""
    answers = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    if len(answers) != 1:  # none, or several to choose from
        return {"score": 0.0, "answered": 0.0}
    targets = [ground_truth] if isinstance(ground_truth, str) else list(ground_truth)
    right = normalised(answers[0]) in [normalised(target) for target in targets]
    return {"score": float(right), "answered": 1.0}


def normalised(text):
    """Words in small letters, without articles and what is neither letter nor digit."""
    words = re.findall(r"[^\\W_]+", text.lower())
    return " ".join(word for word in words if word not in ("a", "an", "the"))
''',
    """import pytest

from MODULE import compute_score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("I think <answer>The Eiffel tower.</answer>", 1.0),
        ("<answer>tour Eiffel</answer>", 1.0),
        ("<answer>Eiffel tower or Louvre</answer>", 0.0),
        ("<answer>Louvre</answer><answer>Eiffel tower</answer>", 0.0),
        ("Eiffel tower", 0.0),  # not between the tags
        ("", 0.0),
    ],
)
def test_only_the_right_answer_pays(response, score):
    assert compute_score("mine", response, ["Eiffel Tower", "Tour Eiffel"])["score"] == score
""",
)

ENV = (
    '''"""Environment of MODULE.py, with its reward: a number is to be moved to a target.

Train in it: env.id=MODULE.py:Target-v0 (docs/environments.md)
"""

import gymnasium as gym

from custom.env_wrapper import ENVIRONMENTS


class Target(gym.Env):
    """Numbers from 0 to 8. A step that comes closer to the target pays 1; the episode ends there."""

    action_space = gym.spaces.Discrete(2)  # down, up

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.number, self.target = self.np_random.choice(9, size=2, replace=False).tolist()
        return (self.number, self.target), {}

    def step(self, action):
        before = abs(self.number - self.target)
        self.number = min(max(self.number + (-1, 1)[action], 0), 8)
        after = abs(self.number - self.target)
        return (self.number, self.target), float(after < before), after == 0, False, {}


def to_text(env, observation):
    """Writes a state as text for the policy."""
    number, target = observation
    return f"You are at {number}, the target is {target}. Answer with one word: up or down."


def to_action(text):
    """The action that an answer names; None: no legal one."""
    return {"down": 0, "up": 1}.get(text.strip().lower())


if "Target-v0" not in gym.registry:
    gym.register("Target-v0", Target, max_episode_steps=20)
ENVIRONMENTS["Target-v0"] = {
    "observation_to_text": to_text,
    "text_to_action": to_action,
    "success": {"terminated": True},  # nothing but the target ends an episode
}
''',
    """import pytest

from MODULE import Target, to_action, to_text


def test_a_step_closer_pays_and_the_target_ends_the_episode():
    env = Target()
    env.reset(seed=0)
    env.number, env.target = 2, 4
    assert env.step(to_action("down"))[1:3] == (0.0, False)
    env.number = 2
    assert env.step(to_action("up"))[1:3] == (1.0, False)
    assert env.step(to_action("up"))[1:3] == (1.0, True)


@pytest.mark.parametrize("text", ["", "up or down", "nan", "sideways"])
def test_what_names_no_action_is_none(text):
    assert to_action(text) is None


def test_the_policy_reads_where_it_is():
    assert to_text(Target(), (2, 4)).startswith("You are at 2, the target is 4.")
""",
)

TASKS = {"math": MATH, "code": CODE, "qa": QA, "env": ENV}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", required=True, choices=TASKS)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="a .py file that is not there yet")
    arguments = parser.parse_args(argv)
    output = arguments.output
    test = output.with_name(f"test_{output.name}")
    if output.suffix != ".py" or not output.stem.isidentifier():
        parser.error(f"--output {output}: a module is written, so its name is one that can be imported, with .py.")
    if found := [str(path) for path in (output, test) if path.exists()]:
        parser.error(f"--output {output}: {' and '.join(found)} would be overwritten; choose another name.")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        for path, text in zip((output, test), TASKS[arguments.task], strict=True):
            path.write_text(text.replace("MODULE", output.stem))
    except OSError as error:
        parser.error(f"--output {output} cannot be written: {error.strerror}.")
    print(f"{output}, and its test: python -m pytest {test}")


if __name__ == "__main__":
    main()
