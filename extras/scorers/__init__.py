"""Processes that call a user's reward function and can be killed: the pool, and the program of one of them.

Open it when a reward hangs, is killed, or scores too slowly; training/reward_function.py says what a reward may return.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class NotScored:
    """A manager's result for a row that could not be scored: `outcome` is timeout or error, `said` why."""

    outcome: str
    said: str
    trace: str = ""
