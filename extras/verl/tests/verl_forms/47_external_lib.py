from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn, register_policy_loss
from verl.workers.reward_manager import register as register_manager

vanilla = get_policy_loss_fn("vanilla")


@register_policy_loss("tripled")
def tripled(*args, **kwargs):
    loss, metrics = vanilla(*args, **kwargs)
    return 3 * loss, metrics


@register_manager("ext")
class External:
    def __init__(self, tokenizer, num_examine=0, compute_score=None, reward_fn_key="data_source", **kwargs):
        self.known = sorted(POLICY_LOSS_REGISTRY)

    def __call__(self, data, return_dict=False):
        rewards = data.batch["response_mask"].float() * 0
        return {"reward_tensor": rewards, "reward_extra_info": {"known": [len(self.known)] * len(data)}}
