"""A trainer with a stage of its own: answers that the run has rarely seen earn a bonus.

    python main.py --config-name frozenlake trainer.cls=examples/novelty_trainer.py:NoveltyTrainer

The n-th time that a prompt gets the same answer, the answer earns BONUS / √n beside its score (Strehl and Littman,
2008, "An analysis of model-based interval estimation").
"""

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from data.padding import last_token
from data.protocol import DataProto
from training.metric_utils import timer
from training.ray_trainer import RayPPOTrainer
from training.run import Metrics

BONUS = 0.1


class NoveltyTrainer(RayPPOTrainer):
    """RayPPOTrainer whose rewards hold a bonus for novelty; a checkpoint keeps what has been seen."""

    def __init__(self, *args: Any, **parts: Any) -> None:
        super().__init__(*args, **parts)
        self.seen: Counter[tuple[int, ...]] = Counter()

    def compute_advantages(self, batch: DataProto, timing: dict[str, float]) -> Metrics:
        """Adds the bonus to the scores, on each row's last policy token, before they become advantages."""
        with timer("novelty", timing):
            bonus = self.novelty(batch)
            scores = batch.batch["token_level_scores"]
            batch.batch["token_level_scores"] = scores + bonus[:, None] * last_token(batch.batch["response_mask"])
        return super().compute_advantages(batch, timing) | {"novelty/bonus": bonus.mean().item()}

    def novelty(self, batch: DataProto) -> Tensor:
        """The bonus of each row, [B] float32; counts the row as seen."""
        ids, attention = batch.batch["input_ids"], batch.batch["attention_mask"].bool()
        answers = [tuple(row[attended].tolist()) for row, attended in zip(ids, attention, strict=True)]
        self.seen.update(answers)
        return BONUS / torch.tensor([self.seen[answer] for answer in answers]).sqrt()

    def state(self) -> dict[str, Any]:
        return super().state() | {"seen": dict(self.seen)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self.seen = Counter(state["seen"])
