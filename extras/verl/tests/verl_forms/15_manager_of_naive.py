from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager


@register("doubled")
class DoubledManager(NaiveRewardManager):
    async def run_single(self, data):
        found = await super().run_single(data)
        found["reward_score"] *= 2
        return found
