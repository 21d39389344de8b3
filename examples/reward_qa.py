"""A reward for short answers: 1 for one of the right ones, in the last <answer>…</answer> or else on the last line.

Case, punctuation, articles and the commas of thousands do not count. A right answer is a text, a number, a list of
them, or {"target": any of these}. Run as a program it scores the answers in TRIED.
"""

import re

TRIED = [  # a response, the right answers, the score
    ("I think so. <answer>The Eiffel-Tower!</answer>", ["eiffel tower", "la tour Eiffel"], 1.0),
    ("Answer: Paris or London", "Paris", 0.0),
]
ARTICLES = {"a", "an", "the"}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    truths = ground_truth["target"] if isinstance(ground_truth, dict) else ground_truth
    truths = [truths] if isinstance(truths, str | int | float) else truths
    answer = normalise(final_answer(solution_str))
    right = answer != "" and answer in [normalise(str(truth)) for truth in truths]
    return {"score": float(right), "words": float(len(answer.split()))}


def final_answer(text):
    """Returns what stands in the last tags, else on the last line, there after "answer is" or "Answer:"."""
    before, closed, _ = text.rpartition("</answer>")
    if closed:
        return before.rpartition("<answer>")[2]
    return re.split(r"(?i)\banswer(?: is\b|:)", text.strip().rpartition("\n")[2])[-1]


def normalise(text):
    """Writes an answer in small letters, without punctuation but a number's, and without articles beside words."""
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text.casefold())
    text = re.sub(r"(?<=\w)[-–—/](?=\w)", " ", text)
    words = re.sub(r"(?!\.\d|-\d)[^\w\s]", "", text).split()
    return " ".join([word for word in words if word not in ARTICLES] or words)


if __name__ == "__main__":
    for response, truth, expected in TRIED:
        score = compute_score("tried", response, truth)["score"]
        print(f"{score} for {response!r}, where {truth!r} is right")
        assert score == expected, f"expected: {expected}"
