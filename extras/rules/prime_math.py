r"""PRIME's rule for competition mathematics: an answer found in prose, compared by text, number and algebra."""

import math
import re
from fractions import Fraction
from itertools import chain

from extras.rules.math_reward import as_text, last_boxed
from extras.rules.math_reward import normalise as normalise_latex
from extras.rules.symbolic import LONGEST, symbolically_equal

BEFORE_ANSWER = ("answer:", "answer is", "answers are")
AFTER_ANSWER = ("is answer", "is the answer", "are answers", "are the answers")
LAST_WORDS = ("be ", "is ", "are ", "=", ": ", "get ", "be\n", "is\n", "are\n", ":\n", "get\n")
UNITS = ("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year",
         "foot", "feet", "inch", "yard", "liter")  # fmt: skip
UNIT = re.compile(rf"({'|'.join(UNITS)})(es)?s? *(\^[0-9]+)?")
POWERS = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}
FRACTION = re.compile(r"-?\d+/\d+")
INTEGER = re.compile(r"-?(\d+|\d{1,3}(,\d{3})+)(\.0*)?")
SCIENTIFIC = re.compile(r"-?\d+(\.\d+)?e[+-]?\d{1,2}")
NUMBER = re.compile(r"[+-]?(\d[\d,]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
PRODUCT_OF_PI = re.compile(r"(-?)(\d*\.?\d*)\*?\\pi(?:/(\d+\.?\d*))?")
TOLERANCE = 1e-4  # relative
SCALES = (0.01, 1, 100)  # of an answer, which may be meant in percent
MATRIX = re.compile(r"\\begin\{[bp]?matrix\}(.*)\\end\{[bp]?matrix\}", re.DOTALL)


def compute_score(model_output: str, ground_truth: str | float) -> tuple[bool, bool, str]:
    """Returns whether the answer is right, whether it is that or an announced or boxed number, and what was read."""
    announced, answer = extract_answer(str(model_output))
    truth = str(as_text(ground_truth))
    if max(len(answer), len(truth)) > LONGEST:  # no number, and no formula
        return answer == truth, announced or answer == truth, answer
    if equal_as_text(answer, truth):
        return True, True, answer
    right = any(equal_as_number(answer, truth, pi) for pi in (math.pi, 3.14))
    return right, right or announced, answer


def extract_answer(text: str) -> tuple[bool, str]:
    """Returns (whether an answer was announced or boxed and has a digit, the answer, or what is left of the text)."""
    announced = False
    for marker in BEFORE_ANSWER:
        announced |= marker in text.lower()
        text = after_last(text, marker)
    for marker in AFTER_ANSWER:
        announced |= marker in text.lower()
        text = before_last(text, marker)
    boxed = last_boxed(text)
    if boxed is not None:
        announced, text = True, boxed[boxed.find("{") + 1 : -1]
    text = before_last(text, ". ")
    for words in LAST_WORDS:
        text = after_last(text, words)
    return announced and any(character.isdigit() for character in text), text


def after_last(text: str, marker: str) -> str:
    """Returns the text after the last `marker`, in any case of letters; all of `text` without one."""
    start = text.lower().rfind(marker)
    return text if start < 0 else text[start + len(marker) :].strip()


def before_last(text: str, marker: str) -> str:
    start = text.lower().rfind(marker)
    return text if start < 0 else text[:start].strip()


def equal_as_text(answer: str, truth: str) -> bool:
    """Grades A: equal in one of two spellings, or part by part: fractions as they are written, the rest by algebra."""
    try:
        if normalise_latex(unwrap(answer)) == normalise_latex(unwrap(truth)):
            return True
    except ValueError:
        if answer == truth:
            return True
    answer, truth = canonical(answer), canonical(truth)
    if answer == truth:
        return True
    if not answer:
        return False
    answer_parts, truth_parts = parts(answer), parts(truth)
    same_brackets = len(truth_parts) == 1 or (answer[0], answer[-1]) == (truth[0], truth[-1])
    return same_brackets and len(answer_parts) == len(truth_parts) and all(map(equal_part, answer_parts, truth_parts))


def equal_part(answer: str, truth: str) -> bool:
    """Compares by algebra; a fraction is to be reduced as the reference's is, and an integer to be one in both."""
    if FRACTION.fullmatch(answer) and FRACTION.fullmatch(truth):
        return answer == truth
    if bool(INTEGER.fullmatch(answer)) != bool(INTEGER.fullmatch(truth)):
        return False
    return answer == truth or symbolically_equal(answer, truth)


def unwrap(text: str) -> str:
    r"""Unwraps a \text{…} that is the whole text. Spaces of LaTeX become spaces, and 1{,}000 and 1\,000 have commas."""
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,)(?=\d{3})", ",", text)
    text = re.sub(r"(?<!\\)\\[ ,]|~", " ", text)
    match = re.fullmatch(r"\\text\{(.+?)\}", text.strip())
    return match[1] if match else text.strip()


def canonical(text: str) -> str:
    """Spells in a second way: no units, percent or dollars; powers of ten for millions; 1+1/2 for 1 1/2."""
    text = re.sub(r"\\(?:text|textbf|mathrm|mbox)\{([^{}]*)\}", r"\1", unwrap(text))
    for old, new in (("\\%", ""), ("%", ""), ("\\$", ""), ("$", ""), (" or ", " , "), (" and ", " , "), *POWERS.items(),
                     ("dfrac", "frac"), ("tfrac", "frac"), (",\\!", ""), ("\\circ", ""), ("\\left", ""),
                     ("\\right", ""), ("−", "-")):  # fmt: skip
        text = text.replace(old, new)
    text = UNIT.sub("", text).removesuffix("^").strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1]
    text = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r" \1/\2", text)
    text = re.sub(r"(?<!\\)sqrt\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(r"(?<!\\)\bpi\b", r"\\pi", text)
    text = re.sub(r"(\d) +(\d)", r"\1+\2", re.sub(r"- *", "-", text))
    text = text.replace(" ", "").removesuffix(".").lower()
    text = str(Fraction(text)) if SCIENTIFIC.fullmatch(text) else text
    return str(int(text.replace(",", "").split(".")[0])) if INTEGER.fullmatch(text) else text


def parts(text: str) -> list[str]:
    """Returns the elements of a tuple or an interval; of anything else, itself."""
    inside = text[1:-1]
    bracketed = len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not re.search(r"[()\[\]]", inside)
    return inside.split(",") if bracketed else [text]


def equal_as_number(answer: str, truth: str, pi: float, scales: tuple[float, ...] = SCALES) -> bool:
    """Grades B: equal letters, a number within 0.01 % of the reference or of a hundredth or a hundred times it, or both
    element by element; a matrix has the reference's shape, and no percent."""
    answer, truth = without_signs(answer), without_signs(truth)
    if answer.lower() == truth.lower():
        return True
    value, target = number(answer, pi), number(truth, pi)
    if value is not None and target is not None:
        return any(math.isclose(value, target * scale, rel_tol=TOLERANCE) for scale in scales)
    if not answer or not truth:
        return False
    if {answer[0], truth[0]} == {"(", "["} or {answer[-1], truth[-1]} == {")", "]"}:
        return False  # an interval's end is in it or not
    if re.sub(r"[\[\](){}\s]", "", answer).lower() == re.sub(r"[\[\](){}\s]", "", truth).lower():
        return True
    scales = (1,) if MATRIX.fullmatch(truth) else scales
    rows, truth_rows = elements(answer), elements(truth)
    if [*map(len, rows)] != [*map(len, truth_rows)]:
        return False
    pairs = [*zip(chain(*rows), chain(*truth_rows), strict=True)]
    return len(pairs) > 1 and all(equal_as_number(*pair, pi, scales) for pair in pairs)


def without_signs(text: str) -> str:
    """Drops dollars, percent, and the base that a number is written in."""
    text = text.strip().strip("$").replace("\\%", "").strip("%").strip()
    return re.sub(r"(?<=\d)_\{?\d+\}?$", "", text)


def number(text: str, pi: float) -> float | None:
    """Returns the number that `text` spells, a multiple of π by the value `pi`; None if it is not a number."""
    text = text.replace(" ", "")
    if NUMBER.fullmatch(text):
        return float(text.replace(",", ""))
    product = PRODUCT_OF_PI.fullmatch(text)
    if product is None or product[2] == ".":
        return None
    divisor = float(product[3] or 1)
    return float(f"{product[1]}{product[2] or 1}") * pi / divisor if divisor else None


def elements(text: str) -> list[list[str]]:
    """Returns the elements of a matrix row by row, of a list, a point or a tuple as one row; else the text itself."""
    if matrix := MATRIX.fullmatch(text):
        return [row.split("&") for row in matrix[1].split("\\\\")]
    return [text[1:-1].split(",") if text[0] in "([" and text[-1] in ")]" else [text]]
