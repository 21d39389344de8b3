def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    turns = extra_info["num_turns"]
    earlier = extra_info["rollout_reward_scores"]
    return {
        "score": float(str(ground_truth) in solution_str) + 0.1 * (turns > 2),
        "turns": turns,
        "earlier": len(earlier),
    }
