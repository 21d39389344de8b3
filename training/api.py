"""Names the classes that train from Python or a notebook (docs/python.md); they are those of extras/python:

from training.api import GRPOTrainer

GRPOTrainer(model, reward, rows).train()
"""

from configs.import_utils import find

Trainer, GRPOTrainer, PPOTrainer, TrainingConfig = (
    find("optional", name) for name in ("Trainer", "GRPOTrainer", "PPOTrainer", "TrainingConfig")
)
