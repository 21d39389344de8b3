def scaled(data_source, solution_str, ground_truth, extra_info=None, scale=1.0, **kwargs):
    return scale * float(str(ground_truth) in solution_str)
