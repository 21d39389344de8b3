"""Groups the rows of a batch by episode: with env.history=turns an episode is several rows, one a turn.

Estimators, the statistics of groups and metrics count episodes.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.protocol import DataProto
from data.types import ENVIRONMENT_FAILURES, FAILED_END_REASONS
from training.core_algos import Groups

LOOP_SCORE = "__reward_score__"  # column [B]: the score that the agent loop gave a row; None: the reward scores it
# Columns that `join` leaves out: each row of an episode has a prompt of its own.
PROMPT_COLUMNS = ("prompts", "input_ids", "attention_mask", "position_ids")

logger = logging.getLogger(__name__)


class EpisodeRows:
    """Groups the rows of a batch by the column episode; without that column, each row is an episode.

    Rows of an episode are in the order of its turns (a program's: of their tokens), perhaps with other rows between.

    Attributes:
        count: E; episodes are numbered in the order of their first rows.
        episode_of_row: [B] int64, the episode of each row.
        last_row: [E] int64, the row in which each episode ended; an array, as numpy takes a tensor of one element for
            an integer.
    """

    def __init__(self, batch: DataProto) -> None:
        rows = range(len(batch))
        numbers: dict[Hashable, int] = {}
        names = batch.episode if "episode" in batch else rows
        episode_of_row = [numbers.setdefault(name, len(numbers)) for name in names]
        last_row = dict(zip(episode_of_row, rows, strict=True))  # a later row overwrites, and keeps the key's position
        self.batch = batch
        self.count = len(numbers)
        self.episode_of_row = torch.tensor(episode_of_row, dtype=torch.int64)
        self.last_row = np.array([*last_row.values()], dtype=np.int64)

    def total(self, per_row: Tensor) -> Tensor:
        """Returns the sum over each episode's rows, [B] -> [E]."""
        return per_row.new_zeros(self.count).index_add(0, self.episode_of_row, per_row)

    def is_complete(self) -> Tensor:
        """Marks the episodes that did not fail, [E] bool: those with a token of the policy."""
        return self.total(self.batch.batch["response_mask"].sum(1)) > 0

    def scores(self, column: str = "token_level_scores") -> Tensor:
        """Returns [E] float32: the sum of all rewards of each episode."""
        return self.total(self.batch.batch[column].sum(1))

    def join(self) -> DataProto:
        """Joins the responses of each episode end to end, [E, W], without the padding between them.

        W is the number of response tokens of the longest episode. Other columns keep the last row's values; those of
        the prompts are left out. Returns the batch itself if each episode is one row.
        """
        if self.count == len(self.batch):
            return self.batch
        last_rows = self.batch.select_idxs(self.last_row)
        shape = self.batch.batch["response_mask"].shape
        of_episodes = {name: column for name, column in last_rows.tensors.items() if name not in PROMPT_COLUMNS}
        per_token = [name for name, column in of_episodes.items() if column.shape[1:] == shape[1:]]
        real, positions, width = self._layout()
        for name in per_token:
            column = self.batch.batch[name]
            long = column.new_zeros(self.count * width)
            long[positions] = column[real]
            of_episodes[name] = long.view(self.count, width)
        return DataProto.from_dict(of_episodes, last_rows.non_tensor_batch, last_rows.meta_info)

    def cut(self, joined: Tensor) -> Tensor:
        """Cuts a [E, W] column of `join` back into rows, [B, R]; 0 under the padding."""
        if self.count == len(self.batch):
            return joined
        real, positions, _ = self._layout()
        column = joined.new_zeros(real.shape)
        column[real] = joined.flatten()[positions]
        return column

    def _layout(self) -> tuple[Tensor, Tensor, int]:
        """Returns a mask of the N tokens that are not padding, [B, R]; their positions in E·W, [N]; W."""
        width = self.batch.batch["response_mask"].shape[1]
        real = self.batch.batch["attention_mask"][:, -width:].bool()
        starts, ends = [], defaultdict(int)
        for episode, length in zip(self.episode_of_row.tolist(), real.sum(1).tolist(), strict=True):
            starts.append(ends[episode])
            ends[episode] += length
        longest = max(1, *ends.values())
        positions = (self.episode_of_row * longest + torch.tensor(starts))[:, None] + real.cumsum(1) - 1
        return real, positions[real], longest


def greedy_scores(greedy: DataProto, batch: DataProto) -> Tensor:
    """Returns ReMax's baselines, [B] float32: the score of the prompt's episode in `greedy`; if it failed, the mean of
    the prompt's samples that did not fail (a single sample then has advantage 0)."""
    baselines, samples = EpisodeRows(greedy), EpisodeRows(batch)
    groups = Groups(batch.uid[samples.last_row], samples.is_complete()[:, None])
    means = groups.reduce(samples.scores(), "mean")[samples.episode_of_row].tolist()
    ends = zip(greedy.uid[baselines.last_row], baselines.scores().tolist(), baselines.is_complete(), strict=True)
    of_uid = {uid: score for uid, score, is_complete in ends if is_complete}
    return torch.tensor([of_uid.get(uid, mean) for uid, mean in zip(batch.uid, means, strict=True)])


def describe_conversations(batch: DataProto) -> list[dict[str, Any]]:
    """Returns each row's extra_info with, as in verl: num_turns (2 for each answer, or as a user's agent loop counted),
    rollout_reward_scores ({}), of conversations tool_call_counts, tool_rewards (one a call) and turn_scores (one for
    each turn of the simulated user), and what tools put into tool_extra_fields."""
    columns, absent = batch.non_tensor_batch, [None] * len(batch)
    facts = {name: columns[name] for name in ("tool_call_counts", "tool_rewards", "turn_scores") if name in columns}
    turns, loops = columns.get("__num_turns__", [1] * len(batch)), columns.get("__agent_metrics__", absent)
    facts["num_turns"] = [2 * count if loop is None else count for count, loop in zip(turns, loops, strict=True)]
    infos, fields = columns.get("extra_info", absent), columns.get("tool_extra_fields", absent)
    return [
        {**(info or {}), "rollout_reward_scores": {}, **dict(zip(facts, row, strict=True)), **(field or {})}
        for info, field, *row in zip(infos, fields, *facts.values(), strict=True)
    ]


def check_failures(batch: DataProto, limit: float) -> None:
    """Warns of failed episodes, or ends the run if their share is above `limit` (env.max_failed_fraction).

    A group may fail as a whole: nothing is learnt from it.

    Raises:
        RuntimeError: too many failed; says how many of each kind, and the most frequent cause with file and line.
    """
    ends = batch.select_idxs(EpisodeRows(batch).last_row)
    causes = [cause for cause, end in zip(ends.failure, ends.end_reason, strict=True) if end in ENVIRONMENT_FAILURES]
    if not causes:
        return
    kinds = Counter(end for end in ends.end_reason if end in ENVIRONMENT_FAILURES)
    counts = ", ".join(f"{count} by {kind}" for kind, count in kinds.most_common())
    [(location, times)] = Counter(map(place_of, causes)).most_common(1)
    example = next(cause for cause in causes if place_of(cause) == location)
    failed = f"{len(causes)} of {len(ends)} episodes failed ({counts})"
    example = f"Most frequent, {times} times: {example}"
    if len(causes) <= limit * len(ends):
        logger.warning("%s, and are left out. %s", failed, example)
        return
    raise RuntimeError(
        f"{failed}, more than env.max_failed_fraction={limit:g} allows. {example}. Mend what raises or hangs there, "
        f"or raise {deadline_of(ends)}."
    )


def deadline_of(ends: DataProto) -> str:
    """Names the setting that limits how long these episodes wait: for an environment, a program or a tool."""
    if "reset_seed" in ends:
        return "env.timeout"
    kind = "agent.program_timeout" if "program" in ends.get("agent_name", []) else "multi_turn.tool_timeout"
    return f"actor_rollout_ref.rollout.{kind}"


def valid_episodes(batch: DataProto) -> DataProto:
    """Returns the last row of each episode that did not fail: those that metrics are computed from."""
    last_rows = EpisodeRows(batch).last_row.tolist()
    return batch.select_idxs([row for row in last_rows if batch.end_reason[row] not in FAILED_END_REASONS])


def place_of(cause: str) -> str:
    """Returns file:line of a cause that ends in "(at file:line)", or else the whole cause."""
    return cause.rpartition(" (at ")[2]
