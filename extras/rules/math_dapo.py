r"""DAPO's rule: the last "Answer: …" line is the reference's after Minerva's normalisation; scores are 1 and -1."""

import re
from typing import Any

from extras.rules.math_reward import as_text, boxed_content

LOOKED_AT, BOX_LOOKED_AT = 300, 100  # characters at the end of a response
ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
NO_ANSWER = "[INVALID]"
SUBSTITUTIONS = (
    ("an ", ""), ("a ", ""), (".$", "$"), (r"\$", ""), (r"\ ", ""), (" ", ""), ("mbox", "text"),
    (r",\text{and}", ","), (r"\text{and}", ","), (r"\text{m}", r"\text{}"),
)  # fmt: skip
REMOVED = (
    "square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", r"\ldots", "sue", "points",
    "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students",
    "childrentickets", "multiples", r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}",
    r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots",
)  # fmt: skip
UNWRAPPED = (r"\\text\{(.*?)\}", r"\\textbf\{(.*?)\}", r"\\overline\{(.*?)\}", r"\\boxed\{(.*)\}")


def compute_score(
    solution_str: str,
    ground_truth: str | float,
    strict_box_verify: bool = False,
    pause_tokens_index: list[int] | None = None,
) -> dict[str, Any]:
    r"""Returns {score: 1.0 or -1.0, acc: bool, pred: what was read, or "[INVALID]"} of the last 300 characters.

    Without an "Answer:" line a \boxed{…} near the end counts, letter by letter, as it always does with
    `strict_box_verify`; there `pred` is None if there is none.
    """
    end, truth = solution_str[-LOOKED_AT:], as_text(ground_truth)
    answers = ANSWER.findall(end)
    box = boxed_near_the_end(end, pause_tokens_index) if strict_box_verify or not answers else None
    if strict_box_verify or box is not None:
        return judge(box, box == truth)
    answer = normalise(answers[-1] if answers else NO_ANSWER)
    return judge(answer, answer == normalise(truth))


def judge(answer: str | None, is_right: bool) -> dict[str, Any]:
    return {"score": 1.0 if is_right else -1.0, "acc": is_right, "pred": answer}


def boxed_near_the_end(text: str, pause_tokens_index: list[int] | None) -> str | None:
    """Returns the boxed text in the last 100 characters, or from 100 before the last of four places on."""
    if pause_tokens_index is None:
        return boxed_content(text[-BOX_LOOKED_AT:])
    if len(pause_tokens_index) != 4:
        raise ValueError(f"pause_tokens_index has {len(pause_tokens_index)} places; the rule of math_dapo wants four.")
    return boxed_content(text[pause_tokens_index[-1] - BOX_LOOKED_AT :])


def normalise(answer: str) -> str:
    """Spells an answer as Lewkowycz et al. (2022) compare them: no units, articles, spaces or dollars."""
    answer = answer.split("=")[-1]
    for old, new in SUBSTITUTIONS:
        answer = answer.replace(old, new)
    for word in REMOVED:
        answer = answer.replace(word, "")
    answer = re.sub(r".*?\$(.*?)\$.*", r"$\1$", answer)
    for wrapper in UNWRAPPED:
        answer = re.sub(wrapper, r"\1", answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer).replace("$", "")
    if answer.replace(",", "").isdigit():
        answer = answer.replace(",", "")
    return answer.strip()
