from verl.utils.reward_score import default_compute_score


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if data_source == "my/sums":
        return 0.5 * float(str(ground_truth) in solution_str)
    return default_compute_score(data_source, solution_str, ground_truth, extra_info)
