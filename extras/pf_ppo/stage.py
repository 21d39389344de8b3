"""Draws the rows that are learnt from by their score (PF-PPO, arXiv:2409.06957)."""

import torch
from torch import Tensor

from data.protocol import DataProto
from data.seeding import derive_seed
from data.types import Metrics, Stage
from extras.pf_ppo.settings import PFPPOConfig
from training.episode_rows import EpisodeRows


class PFPPO(Stage):
    """Adds the column drawn_row, [B]: the row that each place of a mini-batch is filled with."""

    at = "advantaged"

    def __call__(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        seed = derive_seed(self.config.trainer.seed, "pf_ppo", self.trainer.global_step)
        batch.batch["drawn_row"] = draw_rows(batch, self.config.algorithm.pf_ppo, seed)
        return {}


def draw_rows(batch: DataProto, settings: PFPPOConfig, seed: int) -> Tensor:
    """Draws the row that is learnt from in each place, by PF-PPO: [B] int64.

    Rows are drawn with replacement, each as often as `pf_ppo_weights` of its episode's score says. Failed rows are
    never drawn; if all failed, each stays. Places keep their uids, so mini-batches are as many and as large as without.
    """
    completed = batch.batch["response_mask"].any(1).nonzero()[:, 0]
    if len(completed) == 0:
        return torch.arange(len(batch))
    episodes = EpisodeRows(batch)
    scores = episodes.scores()[episodes.episode_of_row[completed]]
    weights = pf_ppo_weights(scores, settings.reweight_method, settings.weight_pow)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.multinomial(weights, len(batch), replacement=True, generator=generator)
    return completed[drawn]


def pf_ppo_weights(scores: Tensor, reweight_method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """Weighs rows for PF-PPO, which draws them with replacement in proportion: [B] -> [B].

    "pow" |score|^weight_pow; "max_min" 1 for the highest and the lowest score of the batch, else 0; "max_random" 0.4
    for the highest, else 0.1; all + 1e-8. `scores` are those of rows that did not fail.
    Raises ValueError on another method.
    """
    match reweight_method:
        case "pow":
            weights = scores.abs() ** weight_pow
        case "max_min":
            weights = ((scores == scores.max()) | (scores == scores.min())).to(scores)
        case "max_random":
            weights = 0.1 + 0.3 * (scores == scores.max()).to(scores)
        case _:
            raise ValueError(f"reweight_method is {reweight_method!r}, but must be 'pow', 'max_min' or 'max_random'")
    return weights + 1e-8
