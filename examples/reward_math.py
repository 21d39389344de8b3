r"""A reward for mathematics: 1 for the right answer, which stands in the last \boxed{…} or after the last ####, else 0.

Where a number is right, answers are compared by value: 1,200 is 1200.0, and -\frac{1}{2} is -0.5. They must be written
as numbers: 48+24 does not pay for 72. All others are compared as texts, and by algebra in a process of its own
(extras/rules, without which this file does not load). Run as a program it scores the answers in TRIED.
"""

import re
import sys
from fractions import Fraction
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # nano-verl's, which a run has found already

from extras.rules.math_reward import boxed_content
from extras.rules.symbolic import symbolically_equal

TRIED = [  # a response, the right answer, the score
    ("That is $\\frac{2400}{2}$, so \\boxed{1,200}.", "1200", 1.0),
    ("48 + 24 is \\boxed{48+24}", "72", 0.0),
]
BESIDE_NUMBERS = re.compile(r"^[a-zA-Z]\s*=|\\text\{[^{}]*\}$|\^\{?\\circ\}?$|\\[!,;: ]|\\?[$%]")
FRACTION = re.compile(r"\\[dt]?frac(?:\{(-?\d+)\}|(\d))(?:\{(\d+)\}|(\d))")
NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d*|/\d+)?")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    answer, truth = final_answer(solution_str), str(ground_truth)
    right = answer is not None and is_right(answer, final_answer(truth) or truth)
    return {"score": float(right), "answered": float(answer is not None)}


def final_answer(text):
    """Returns the content of the last box, else the line after the last ####; None: there is neither."""
    boxed, marked = boxed_content(text), re.findall(r"####\s*(.+)", text)
    return boxed if boxed is not None or not marked else marked[-1].strip()


def is_right(answer, truth):
    if (number := value_of(truth)) is not None:
        return value_of(answer) == number
    return words_of(answer) == words_of(truth) or symbolically_equal(answer, truth)


def words_of(text):
    return re.sub(r"\\text\{([^{}]*)\}|\s", r"\1", text)


def value_of(text):
    """Reads a number, with dollars, percent or a unit beside it, as a fraction; None: it is no number."""
    text = BESIDE_NUMBERS.sub("", text.strip().replace("−", "-").replace("{,}", ",")).strip()
    text = FRACTION.sub(r"\1\2/\3\4", text)
    try:
        return Fraction(text.replace(",", "")) if NUMBER.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):  # a sign alone, a number of too many digits
        return None


if __name__ == "__main__":
    for response, truth, expected in TRIED:
        score = compute_score("tried", response, truth)["score"]
        print(f"{score} for {response!r}, where {truth!r} is right")
        assert score == expected, f"expected: {expected}"
