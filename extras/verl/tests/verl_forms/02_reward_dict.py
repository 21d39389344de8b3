def graded(data_source, solution_str, ground_truth, extra_info=None):
    answer = solution_str.strip().split()[-1] if solution_str.strip() else ""
    right = answer == str(ground_truth)
    return {"score": 1.0 if right else -1.0, "acc": right, "answer": answer}
