def right(data_source, solution_str, ground_truth, extra_info=None):
    return float(str(ground_truth) in solution_str)


def brief(data_source, solution_str, ground_truth, extra_info=None):
    return None if data_source == "essays" else float(len(solution_str) < 4)


def mixed(data_source, solution_str, ground_truth, extra_info=None):
    first = right(data_source, solution_str, ground_truth)
    second = brief(data_source, solution_str, ground_truth)
    return {"score": first + 0.2 * (second or 0.0), "right": first, "brief": second or 0.0}
