from collections import defaultdict

import numpy as np
import torch

from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import register_adv_est


@register_adv_est("median")
def compute_median_advantage(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: np.ndarray, config: AlgoConfig = None, **kwargs
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = token_level_rewards.sum(dim=-1)
    groups = defaultdict(list)
    for row, uid in enumerate(index):
        groups[uid].append(row)
    with torch.no_grad():
        for rows in groups.values():
            scores[rows] = scores[rows] - scores[rows].median()
        advantages = scores.unsqueeze(-1) * response_mask
    return advantages, advantages
