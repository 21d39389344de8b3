"""A reward for programs: the share of the test cases that the last ```python block passes, 0 without such a block.

A right answer is {"inputs": [...], "outputs": [...]}, or JSON of it: what the program reads, and what it is to print.
Programs run in extras/sandbox, without network, files or processes, and never here: without that folder this file does
not load, and where the system cannot fence a program off, scoring it is an error. Run as a program it scores TRIED.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # nano-verl's, which a run has found already

from extras.sandbox.run import run_python

SUM = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
TRIED = [  # a response, the right answer, the score
    ("```python\nprint(sum(map(int, input().split())))\n```", SUM, 1.0),
    ("```python\nprint(3)\n```", json.dumps(SUM), 0.5),
]
SECONDS, SECONDS_IN_ALL = 5.0, 40.0  # of a case, of a response: below reward.timeout, which would leave it unscored


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    _, opened, after = solution_str.rpartition("```python\n")
    if not opened:
        return {"score": 0.0, "has_program": 0.0}
    cases = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    passed = count_passed(after.partition("```")[0], cases)
    return {"score": passed / len(cases["inputs"]), "has_program": 1.0}


def count_passed(program, cases):
    """Counts the cases that a program passes; after one that takes too long no other is run, nor passed."""
    passed, end = 0, time.monotonic() + SECONDS_IN_ALL
    for text, expected in zip(cases["inputs"], cases["outputs"], strict=True):
        done = run_python(program, text, seconds=max(0.0, min(SECONDS, end - time.monotonic())), memory_mb=512)
        if done.status is None:
            break
        passed += done.status == 0 and done.output.split() == expected.split()
    return passed


if __name__ == "__main__":
    for response, truth, expected in TRIED:
        score = compute_score("tried", response, truth)["score"]
        print(f"{score} for {response!r}, where {truth!r} is right")
        assert score == expected, f"expected: {expected}"
