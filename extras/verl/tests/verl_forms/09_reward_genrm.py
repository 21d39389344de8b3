import json
import urllib.request


async def compute_score_judged(
    data_source, solution_str, ground_truth, extra_info, reward_router_address, reward_model_tokenizer
):
    question = [{"role": "user", "content": f"Is {solution_str!r} equal to {ground_truth!r}? Answer yes or no."}]
    length = len(reward_model_tokenizer.apply_chat_template(question, tokenize=True))
    body = json.dumps({"messages": question, "max_tokens": 4, "temperature": 0.0}).encode()
    request = urllib.request.Request(
        f"http://{reward_router_address}/v1/chat/completions", body, {"Content-Type": "application/json"}
    )
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    return {"score": float("yes" in said.lower()), "judge_tokens": length}
