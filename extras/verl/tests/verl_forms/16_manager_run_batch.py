from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


@register("ranked")
class RankedManager(RewardManagerBase):
    async def run_single(self, data):
        return (await self.run_batch(data))[0]

    async def run_batch(self, data):
        lengths = [int(data[row].batch["attention_mask"].sum()) for row in range(len(data))]
        best = max(lengths)
        return [{"reward_score": float(length == best), "reward_extra_info": {}} for length in lengths]
