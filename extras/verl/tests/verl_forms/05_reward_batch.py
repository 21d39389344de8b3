def compute_score(data_sources, solution_strs, ground_truths, extra_infos, **kwargs):
    rows = len(solution_strs)
    return [{"score": float(str(truth) in text), "in_call": rows} for text, truth in zip(solution_strs, ground_truths)]
