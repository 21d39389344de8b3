"""Computes optimal play from the transition table of a small environment: best actions, and shortest paths.

gymnasium's toy_text environments keep such a table. custom/gym/text_env.py decides which function a reward uses.
"""

from collections import deque

import gymnasium as gym
import numpy as np

Table = dict[int, dict[int, list[tuple[float, int, float, bool]]]]  # P[state][action]: probability, next, reward, done


def transition_table(env: gym.Env) -> Table | None:
    """Returns the table `P` of an environment that keeps one, and its state as `s`, as gymnasium's toy_text does."""
    table = vars(env.unwrapped).get("P")
    return table if isinstance(table, dict) and isinstance(table.get(0), dict) else None


def best_actions(table: Table, discount: float = 0.99, tie: float = 1e-9) -> np.ndarray:
    """Marks the best actions of each state, [S, A] bool, by value iteration: those within `tie` of the best value.

    Values are in units of the largest reward; the table's states and actions are numbered from 0.
    """
    width = max(len(outcomes) for row in table.values() for outcomes in row.values())
    padded = [[list(table[s][a]) + [(0.0, 0, 0.0, True)] * (width - len(table[s][a])) for a in table[s]] for s in table]
    probability, following, reward, terminated = np.moveaxis(np.array(padded, dtype=np.float64), -1, 0)  # [S, A, K]
    expected = (probability * reward).sum(-1) / max(np.abs(reward).max(), 1e-300)  # [S, A]
    weight, following = discount * probability * (1 - terminated), following.astype(np.int64)
    values, previous = np.zeros(len(table)), None
    while previous is None or np.abs(values - previous).max() > 1e-12:
        action_values = expected + (weight * values[following]).sum(-1)  # [S, A]
        values, previous = action_values.max(-1), values
    return action_values >= values[:, None] - tie


def shortest_paths(table: Table, start: int) -> dict[int, tuple[int, ...]]:
    """Maps non-terminal states to the actions of a shortest path from `start`; {} if any transition is random."""
    paths, frontier = {start: ()}, deque([start])
    while frontier:
        state = frontier.popleft()
        for action, outcomes in table[state].items():
            if len(outcomes) > 1:
                return {}
            [(_, following, _, terminated)] = outcomes
            if not terminated and following not in paths:
                paths[following] = (*paths[state], action)
                frontier.append(following)
    return paths


def decisive_paths(table: Table, best: np.ndarray, start: int) -> list[tuple[int, ...]] | None:
    """Lists the shortest paths to states in which some action is better than another; None: a transition is random."""
    paths = shortest_paths(table, start)
    return [path for state, path in paths.items() if not best[state].all()] if paths else None


def worst_reward(table: Table) -> float:
    """Returns the lowest reward that any action can earn."""
    outcomes = [outcome for row in table.values() for outcomes in row.values() for outcome in outcomes]
    return min(float(reward) for probability, _, reward, _ in outcomes if probability > 0)
