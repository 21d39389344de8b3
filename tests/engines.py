"""What tests of rollout engines share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data.seeding import derive_seed
from training.roles import SamplingParams
from workers.rollout import Completion, Request, Rollout


def drain(engine: Rollout) -> dict[int, Completion]:
    """Steps until nothing is left; every request may come out once."""
    found: dict[int, Completion] = {}
    while engine.has_unfinished_requests():
        for done in engine.step():
            assert done.id not in found
            found[done.id] = done
    return found


@dataclass(frozen=True)
class Plan:
    """An episode: its first prompt; how each turn is sampled, what it is told after each, and how many steps of the
    engine later, if any run, its next turn comes. `changed`: the turn before which a token of the past changes."""

    prompt: list[int]
    samplings: list[SamplingParams]
    told: list[list[int]]
    pauses: list[int]
    changed: int | None = None


def plans(seed: int, samplings: Sequence[SamplingParams], vocabulary: int) -> list[Plan]:
    """Two ragged episodes for each of 1 to 5 turns, of at most 48 tokens, two with equal first prompts."""
    rng = np.random.default_rng(seed)
    found = []
    for place in range(10):
        turns = 1 + place % 5
        sampled = [samplings[int(rng.integers(len(samplings)))] for _ in range(turns)]
        told = [rng.integers(6, vocabulary, int(size)).tolist() for size in rng.integers(1, 5, turns)]
        prompt = found[3].prompt if place == 4 else rng.integers(6, vocabulary, int(rng.integers(1, 12))).tolist()
        found.append(Plan(prompt, sampled, told, rng.integers(0, 6, turns).tolist(), 3 if place == 9 else None))
    return found


def play(engine: Rollout, plans: Sequence[Plan], keeps: bool) -> dict[tuple[int, int], tuple[list[int], Completion]]:
    """All episodes at once: (episode, turn) → its prompt and what was answered; `keeps`: the engine is told of them."""
    due = {(place, 0): list(plan.prompt) for place, plan in enumerate(plans)}
    wait, found = {(place, 0): plan.pauses[-1] for place, plan in enumerate(plans)}, {}
    while due:
        for key in [key for key, left in wait.items() if left <= 0]:
            (place, turn), own = key, plans[key[0]]
            seed, episode = derive_seed(3, *key), 100 + place if keeps else None
            engine.add(Request(10 * place + turn, due[key], own.samplings[turn], seed, episode=episode))
            del wait[key]
        wait = {key: left - 1 for key, left in wait.items()}
        for done in engine.step():
            place, turn = key = divmod(done.id, 10)
            prompt, plan = due.pop(key), plans[place]
            found[key] = prompt, done
            if turn + 1 == len(plan.samplings):
                engine.forget([100 + place])
                continue
            past = [5, *prompt[1:]] if plan.changed == turn + 1 else prompt
            due[place, turn + 1] = [*past, *done.token_ids, *plan.told[turn]]
            wait[place, turn + 1] = plan.pauses[turn]
    return found
