from verl.utils.reward_score import gsm8k, math_dapo


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    if "####" in solution_str:
        return {"score": gsm8k.compute_score(solution_str, ground_truth, method="flexible"), "acc": True, "pred": ""}
    found = math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)
    found["pred"] = found["pred"] or ""
    return found
