"""All algorithms under verl's import path: training/estimators.py and training/losses.py define them."""

from training.estimators import *  # noqa: F403
from training.losses import *  # noqa: F403
