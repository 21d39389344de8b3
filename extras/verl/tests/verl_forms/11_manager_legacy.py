from collections import defaultdict
from typing import Any

import torch

from verl import DataProto
from verl.utils.reward_score import default_compute_score
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


@register("word_count")
class WordCountManager(AbstractRewardManager):
    def __init__(
        self, tokenizer: Any, num_examine: int, compute_score=None, reward_fn_key: str = "data_source"
    ) -> None:
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score = compute_score or default_compute_score
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict: bool = False):
        if "rm_scores" in data.batch.keys():
            return data.batch["rm_scores"]
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        extra = defaultdict(list)
        for i in range(len(data)):
            item = data[i]
            width = item.batch["prompts"].shape[-1]
            length = int(item.batch["attention_mask"][width:].sum())
            text = self.tokenizer.decode(item.batch["responses"][:length], skip_special_tokens=True)
            source = item.non_tensor_batch[self.reward_fn_key]
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            assert isinstance(source, str)
            rewards[i, length - 1] = float(str(truth) in text)
            extra["words"].append(len(text.split()))
        return {"reward_tensor": rewards, "reward_extra_info": extra} if return_dict else rewards
