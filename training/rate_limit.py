"""So many requests, or tokens, a second, for calls of an async kind."""

import asyncio
import time
from collections.abc import Sequence

from configs.schema import ScoringConfig


class AsyncTokenBucket:
    """Grants `rate_limit` tokens a second, of which up to `max_tokens` (null: a second's) pile up; it starts full.

    Who takes more than there is owes the rest, and waits for as long as it takes to come: so one may take more than
    ever piles up, and nobody goes before those who asked earlier.
    """

    def __init__(self, rate_limit: float, max_tokens: float | None = None) -> None:
        self.rate_limit, self.max_tokens = rate_limit, max_tokens or rate_limit
        self.tokens = self.max_tokens
        self.last_update: float | None = None  # of the loop's clock; None: nobody has asked yet

    async def acquire(self, num_tokens: float = 1.0) -> None:
        """Waits until so many tokens are granted."""
        now = time.monotonic()
        if self.last_update is not None:
            self.tokens = min(self.max_tokens, self.tokens + (now - self.last_update) * self.rate_limit)
        self.last_update = now
        self.tokens -= num_tokens
        if self.tokens < 0:
            await asyncio.sleep(-self.tokens / self.rate_limit)


class RateLimits:
    """reward.max_rpm calls and reward.max_tpm tokens a minute, by reward.estimated_tokens_per_request."""

    def __init__(self, config: ScoringConfig) -> None:
        self.buckets: Sequence[tuple[AsyncTokenBucket, float]] = [
            (AsyncTokenBucket(most / 60), amount)
            for most, amount in ((config.max_rpm, 1.0), (config.max_tpm, float(config.estimated_tokens_per_request)))
            if most is not None
        ]

    async def acquire(self) -> None:
        """Waits until a call may begin."""
        for bucket, amount in self.buckets:
            await bucket.acquire(amount)
