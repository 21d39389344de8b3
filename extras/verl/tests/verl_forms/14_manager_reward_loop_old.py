from verl import DataProto
from verl.experimental.reward.reward_loop import register
from verl.experimental.reward.reward_loop.base import RewardLoopManagerBase


@register("keyed")
class KeyedManager(RewardLoopManagerBase):
    made = 0

    def __init__(self, config, tokenizer, compute_score=None, reward_router_address=None, reward_model_tokenizer=None):
        super().__init__(config, tokenizer)
        self.compute_score = compute_score
        self.word = config.reward_model.get("reward_kwargs", {}).get("word", "?")

    @classmethod
    def init_class(cls, config, tokenizer):
        if cls._class_initialized:
            return
        super().init_class(config, tokenizer)
        cls.made += 1

    async def run_single(self, data: DataProto) -> dict:
        assert len(data) == 1, "one row at a time"
        return {"reward_score": 1.0 if self.word == "four" else 0.0, "reward_extra_info": {"made": self.made}}
