import inspect

from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.utils.reward_score import default_compute_score


@register("careful")
class CarefulManager(RewardManagerBase):
    def __init__(self, config, tokenizer, compute_score, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer, compute_score)
        self.compute_score = compute_score or default_compute_score
        self.is_async = inspect.iscoroutinefunction(self.compute_score)
        self.width = config.actor_rollout_ref.rollout.response_length

    async def run_single(self, data: DataProto) -> dict:
        item = data[-1]
        responses = item.batch["responses"]
        length = int(item.batch["attention_mask"][-responses.shape[-1] :].sum())
        text = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(responses[:length], skip_special_tokens=True)
        )
        truth = item.non_tensor_batch["reward_model"]["ground_truth"]
        return {"reward_score": float(str(truth) in text), "reward_extra_info": {"tokens": length, "width": self.width}}
