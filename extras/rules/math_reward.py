r"""The rule of MATH: the last \boxed{…} is the reference's, after Hendrycks' normalisation of LaTeX (2021)."""

import numbers
import re
from typing import Any

INTEGER = r"(-?(?:0|[1-9]\d*))"


def compute_score(solution_str: str, ground_truth: str | float) -> float:
    """Returns 1.0 if the boxed answer is `ground_truth`, in whatever spelling; else, and without a box, 0.0."""
    answer = extract_answer(solution_str)
    return float(answer is not None and is_equivalent(answer, as_text(ground_truth)))


def as_text(truth: Any) -> Any:
    """Writes a reference that is a number as answers do, 72 for 72.0; any other stays as it is."""
    if not isinstance(truth, numbers.Real):
        return truth
    is_whole = isinstance(truth, numbers.Integral) or float(truth).is_integer()
    return str(int(truth)) if is_whole else str(truth)


def extract_answer(text: str) -> str | None:
    r"""Returns the content of the last box; "\boxed 5" is up to the next $. None: no box, an \fbox, an open brace."""
    boxed = last_boxed_only_string(text)
    return None if boxed is None or boxed.startswith(r"\fbox") else remove_boxed(boxed)


def last_boxed_only_string(text: str) -> str | None:
    r"""Returns the last box with its command: "\boxed 5" up to the next $, else as `last_boxed`."""
    return r"\boxed " + text.split(r"\boxed ")[-1].split("$")[0] if r"\boxed " in text else last_boxed(text)


def remove_boxed(boxed: str) -> str:
    r"""Returns the content of "\boxed{…}" or "\boxed …"; anything else is refused (assert)."""
    spaced = boxed.startswith(r"\boxed ")
    assert spaced or (boxed.startswith(r"\boxed{") and boxed.endswith("}")), f"{boxed!r} is no \\boxed{{…}}"
    return boxed[len(r"\boxed ") :] if spaced else boxed[len(r"\boxed{") : -1]


def last_boxed(text: str, commands: tuple[str, ...] = (r"\boxed", r"\fbox")) -> str | None:
    r"""Returns the last boxed expression with its command, up to the brace that balances the first; None: none.

    The first of `commands` that occurs counts. A brace that is never closed makes it None, as in verl.
    """
    start = next((at for command in commands if (at := text.rfind(command)) >= 0), -1)
    if start < 0:
        return None
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0 and text[at] == "}":
            return text[start : at + 1]
    return None


def boxed_content(text: str) -> str | None:
    r"""Returns the content of the last \boxed{…}; None: there is none."""
    boxed = last_boxed(text, (r"\boxed{",))
    return None if boxed is None else boxed[len(r"\boxed{") : -1]


def is_equivalent(answer: str, truth: str) -> bool:
    """Says whether both are the same text when normalised; as they are, where that fails for either."""
    try:
        return normalise(answer) == normalise(truth)
    except ValueError:
        return answer == truth


def normalise(text: str) -> str:
    r"""Spells LaTeX in one way: no spaces, units, \left or degrees; \frac{a}{b} for 0.5 (that alone), a/b and \fracab.

    Raises:
        ValueError: two units, or a \sqrt or \frac at the end.
    """
    for old, new in (("\n", ""), (r"\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), (r"\left", ""),
                     (r"\right", ""), (r"^{\circ}", ""), (r"^\circ", ""), (r"\$", "")):  # fmt: skip
        text = text.replace(old, new)
    text, *units = text.split(r"\text{ ")
    if len(units) > 1:
        raise ValueError("several units")
    text = text.replace(r"\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if text.startswith("."):
        text = f"0{text}"
    name, *rest = text.split("=")
    if len(rest) == 1 and len(name) <= 2:
        text = rest[0]
    if text.endswith((r"\sqrt", r"\frac")):
        raise ValueError("an operator without an argument")
    text = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])(?:(\{)|(.))", add_braces, text)
    if text == "0.5":
        return r"\frac{1}{2}"
    return re.sub(f"^{INTEGER}/{INTEGER}$", r"\\frac{\1}{\2}", text)


def add_braces(fraction: re.Match[str]) -> str:
    r"""\frac12 with braces, and \frac1{…} with those it lacks."""
    numerator, brace, denominator = fraction.groups()
    return rf"\frac{{{numerator}}}" + (brace or f"{{{denominator}}}")
