"""Responses scored one by one, each with a deadline, in a process that a reward cannot take this one down with.

What training/try_reward.py and training/audit_reward.py score by. Neither torch nor transformers is loaded unless the
reward asks for them.
"""

import math
import multiprocessing
import numbers
import os
import reprlib
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from configs.errors import users_line
from data.types import Row
from training.reward_function import FunctionReward


@dataclass(frozen=True)
class Outcome:
    """What came of scoring a response: `status` ok, timeout or error, what is `said` of the last two, `seconds`."""

    status: str
    score: float = math.nan
    extra: dict[str, Any] = field(default_factory=dict)
    said: str = ""
    seconds: float = 0.0


class View:
    """Rows as a reward function is shown them (`reward_view` of training/reward.py), without tensors."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows, self.meta_info = rows, {}

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, column: str, default: Any) -> Any:
        return [row[column] for row in self.rows] if column in self.rows[0] else default


class Scorer:
    """Scores rows by a reward in a process of its own, which is killed, with all it started, at a deadline.

    Args:
        seconds: for each row; a function of a whole batch has that for each of its rows.
    """

    def __init__(self, reward: FunctionReward, seconds: float) -> None:
        self.reward, self.seconds = reward, seconds

    def __call__(self, rows: list[Row]) -> list[Outcome]:
        parts = [[row] for row in rows] if self.reward.takes_one_response else [rows]
        return [outcome for part in self._outcomes(parts) for outcome in part]

    def _outcomes(self, parts: list[list[Row]]) -> Iterator[list[Outcome]]:
        context = multiprocessing.get_context("fork")  # the function is loaded already
        done = 0
        while done < len(parts):
            ours, theirs = context.Pipe()
            child = context.Process(target=self._serve, args=(parts[done:], theirs), daemon=False)
            child.start()
            theirs.close()
            try:
                for part in parts[done:]:
                    done += 1
                    outcomes, ended = self._next(ours, child, len(part))
                    yield outcomes
                    if ended:
                        break
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.kill()
                child.join()
                ours.close()

    def _next(self, pipe: Any, child: Any, count: int) -> tuple[list[Outcome], bool]:
        """What came of the next part, of `count` rows, and whether the process is to be given up."""
        seconds = self.seconds * count
        if not pipe.poll(seconds):
            said = f"not done after {seconds:g} seconds"
            return [Outcome("timeout", said=said, seconds=seconds)] * count, True
        try:
            return pipe.recv(), False
        except EOFError:
            child.join()
            return [Outcome("error", said=f"its process ended with status {child.exitcode}")] * count, True

    def _serve(self, parts: list[list[Row]], pipe: Any) -> None:
        os.setsid()  # a group of its own, to be killed as one
        for part in parts:
            began = time.perf_counter()
            try:
                results, said = self._results(part), None
            except BaseException as error:  # whatever the user's function raises is what came of the row
                place = users_line(error)
                said = f"{type(error).__name__}: {error}" + (f" ({place})" if place else "")
            seconds = (time.perf_counter() - began) / len(part)
            if said is not None:
                pipe.send([Outcome("error", said=said, seconds=seconds)] * len(part))
            else:
                pipe.send([read_result(result, seconds) for result in results])

    def _results(self, rows: list[Row]) -> list[Any]:
        if self.reward.columns:
            results = self.reward(View(rows))
        else:
            from data.protocol import DataProto  # and with it torch: this form is given one

            columns = {name: [row.get(name) for row in rows] for name in rows[0]}
            results = self.reward(DataProto.from_single_dict(columns))
        results = results if isinstance(results, list | tuple) else results.tolist()  # of an array, or a tensor
        if len(results) != len(rows):
            raise ValueError(f"it returned {len(results)} scores for {len(rows)} responses")
        return [sum(result) if isinstance(result, list) else result for result in results]  # a score for each token


def read_result(result: Any, seconds: float) -> Outcome:
    """A number, or a dict with it as `score`, as an outcome; anything else is an error."""
    extra = {}
    if isinstance(result, dict):
        extra = {name: value for name, value in result.items() if name != "score"}
        result = result.get("score")
    with suppress(AttributeError, ValueError, RuntimeError):  # only numpy's numbers and tensors of one have it
        result = result.item()
    if not isinstance(result, numbers.Real):
        said = f"it returned {reprlib.repr(result)}: a score is a number, or a dict with it as 'score'"
        return Outcome("error", said=said, seconds=seconds)
    if not math.isfinite(result):
        return Outcome("error", said=f"it returned {result}: a score is finite", seconds=seconds)
    return Outcome("ok", float(result), extra, seconds=seconds)
