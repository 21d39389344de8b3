"""What tests of rollout engines share."""

from workers.rollout import Completion, Rollout


def drain(engine: Rollout) -> dict[int, Completion]:
    """Steps until nothing is left; every request may come out once."""
    found: dict[int, Completion] = {}
    while engine.has_unfinished_requests():
        for done in engine.step():
            assert done.id not in found
            found[done.id] = done
    return found
