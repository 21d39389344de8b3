"""A reward of your own: change the two lines marked CHANGE, and TRIED with them.

Every other number beside `score` is logged, as reward/KEY/mean. An argument that has the name of a column of your data
gets the row's value. Run as a program it scores the answers in TRIED.
"""

TRIED = [("It is four.\nAnswer: 4", "4", 1.0), ("4 or 5", "4", 0.0)]  # a response, the right answer, the score


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    answer = solution_str.rpartition("Answer:")[2].strip()  # CHANGE: where a response has its answer
    score = float(answer == str(ground_truth))  # CHANGE: what that answer earns
    return {"score": score, "length": float(len(solution_str))}


if __name__ == "__main__":
    for response, truth, expected in TRIED:
        score = compute_score("tried", response, truth)["score"]
        print(f"{score} for {response!r}, where {truth!r} is right")
        assert score == expected, f"expected: {expected}"
