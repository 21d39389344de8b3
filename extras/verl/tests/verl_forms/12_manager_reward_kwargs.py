from verl.workers.reward_manager import register


@register("bounded")
class BoundedManager:
    def __init__(
        self,
        tokenizer,
        num_examine,
        compute_score=None,
        reward_fn_key="data_source",
        max_resp_len=None,
        overlong_buffer_cfg=None,
        bound=1,
        **reward_kwargs,
    ):
        assert bound == 2 and max_resp_len == 8, (bound, max_resp_len)
        self.tokenizer, self.bound = tokenizer, bound

    def __call__(self, data, return_dict=False):
        rewards = data.batch["response_mask"].float().clone() * 0
        for row in range(len(data)):
            length = int(data[row].batch["attention_mask"][-rewards.shape[1] :].sum())
            rewards[row, length - 1] = min(float(length), self.bound)
        return {"reward_tensor": rewards, "reward_extra_info": {}} if return_dict else rewards
