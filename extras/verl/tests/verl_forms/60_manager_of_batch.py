from verl.workers.reward_manager import register
from verl.workers.reward_manager.batch import BatchRewardManager


@register("measured")
class MeasuredManager(BatchRewardManager):
    def verify(self, data):
        lengths = data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :].sum(-1)
        return [{"score": float(length), "long": length > 5} for length in lengths.tolist()]
