"""Watches those that a call waits for: whether they say nothing, get no further, or are only slow.

A worker's process counts the pieces of its work by `beat`. Whoever waits for it (`Wait`) looks every BEAT_SECONDS at
the newest `Beat` that is heard of it.
"""

import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Self

from configs.errors import notice
from training.roles import WorkerLost

NOTICE_SECONDS = 60.0  # of waiting until a notice says for whom; the next ones come after twice as long each
BEAT_SECONDS = 2.0  # between two beats of a worker, and between two looks at them
UNSURE_SECONDS = 5 * BEAT_SECONDS  # for which it may only be late
longest: dict[str, float] = {}  # seconds that a verb has taken so far
IDLE = ("threading.py", "selectors.py", "queue.py", "thread.py")  # where threads wait that have nothing to do


class Progress:
    """Holds how much this process has done: micro-batches, steps of an engine, parts of a checkpoint."""

    done = 0


def beat() -> None:
    """Counts a piece of work, so that whoever waits for this process can tell slow from stuck."""
    Progress.done += 1


def stacks() -> str:
    """Says where the threads of this process are that do something, but for the one that asks, and the main one."""
    main, caller = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != caller}
    busy = [key for key, frame in frames.items() if Path(frame.f_code.co_filename).name not in IDLE or key == main]
    return "\n".join(f"{names.get(ident, ident)}:\n{stack_of(frames[ident])}" for ident in busy)


def stack_of(frame: FrameType) -> str:
    try:
        return "".join(traceback.format_stack(frame))
    except AttributeError:  # the thread ran on meanwhile, and its frames are others' by now
        return "  (it runs)\n"


class Beat(NamedTuple):
    """The newest that is heard of a worker's process: the number of this beat, how much it has `done`, and where
    its threads are if that was no more than at the beat before."""

    number: float
    done: int
    stacks: str


class Wait:
    """Watches, while the context is open, those that a call waits for. Notices say who has not come back, and what it
    does: after NOTICE_SECONDS, or twice as long as the verb took before, and whenever that time has doubled.

    Args:
        processes: of all ranks, as RemoteWorker.pid_and_host returns them.
        newest_beat: returns the newest beat of a rank; None: there is none.
        limit: seconds until `check` gives up; None: never.
        names: of all ranks, unless their numbers say enough.

    Attributes:
        late: ranks that have not come back.
        silent, idle: seconds for which nothing was heard of a rank, or nothing new that it has done. Only seconds in
            which this process looked: it may have been stopped itself.
    """

    def __init__(
        self,
        verb: str,
        processes: Sequence[tuple[int, str]],
        newest_beat: Callable[[int], Beat | None],
        limit: float | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.verb, self.processes, self.newest_beat, self.limit, self.names = verb, processes, newest_beat, limit, names
        self.late: Sequence[int] = range(len(processes))
        self.beats: dict[int, Beat] = {}
        self.silent, self.idle = Counter[int](), Counter[int]()
        self.over, self.began = threading.Event(), 0.0

    def beside(self, other: "Wait") -> "Wait":
        """Watches those of both, who wait for each other: `other`'s ranks go on after these."""
        ends = [(wait, rank) for wait in (self, other) for rank in range(len(wait.processes))]
        names = [f"rank {rank} in {wait.verb}" for wait, rank in ends]
        verb, processes = f"{self.verb} with {other.verb}", [*self.processes, *other.processes]
        return Wait(verb, processes, lambda end: ends[end][0].newest_beat(ends[end][1]), self.limit, names)

    def __enter__(self) -> Self:
        self.began = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        longest[self.verb] = max(longest.get(self.verb, 0.0), time.monotonic() - self.began)

    def _watch(self) -> None:
        due, waited = max(NOTICE_SECONDS, 2 * longest.get(self.verb, 0.0)), 0.0
        while not self.over.wait(pause := min(BEAT_SECONDS, due - waited)):
            waited += pause
            self._look(pause)
            if waited >= due:
                notice(f"{self.verb} has not come back for {due:.0f} s from {self}")
                due *= 2

    def _look(self, seconds: float) -> None:
        for rank in self.late:
            last, new = self.beats.get(rank), self.newest_beat(rank)
            self.silent[rank] = self.silent[rank] + seconds if new == last else 0
            self.idle[rank] = 0 if new and (last is None or new.done > last.done) else self.idle[rank] + seconds
            if new:
                self.beats[rank] = new

    def check(self) -> None:
        """Raises WorkerLost if a late rank is silent for `limit` seconds, or all are idle: some may wait for one."""
        if self.limit is None or not self.late:
            return
        silent, idle = ([seconds[rank] for rank in self.late] for seconds in (self.silent, self.idle))
        if max(*silent, min(idle)) >= self.limit:
            raise WorkerLost(f"{self.verb} gets no further for trainer.stall_timeout={self.limit:g} s, by {self}")

    def __str__(self) -> str:
        """Names the late ones, the silent first, and what each does; below, where one is stuck if none is silent."""
        late = sorted(self.late, key=lambda rank: self.silent[rank] <= UNSURE_SECONDS)
        stuck = [rank for rank in late if self.idle[rank] > UNSURE_SECONDS >= max(self.silent[other] for other in late)]
        where = "".join(f"\n{self.name(rank).capitalize()} is here:\n{self.beats[rank].stacks}" for rank in stuck[:1])
        return ", ".join(map(self._describe, late)) + "." + where.rstrip()

    def name(self, rank: int) -> str:
        return self.names[rank] if self.names else f"rank {rank}"

    def _describe(self, rank: int) -> str:
        if rank >= len(self.processes):
            return f"{self.name(rank)} (has not started yet: on a busy machine or disk that takes minutes)"
        text = f"{self.name(rank)} ({describe_process(*self.processes[rank])}"
        silent, idle = self.silent[rank], self.idle[rank]
        if silent > UNSURE_SECONDS:
            return f"{text}; says nothing for {silent:.0f} s: stopped, swapped out, or its machine is gone)"
        return f"{text})" if idle <= UNSURE_SECONDS else f"{text}; without progress for {idle:.0f} s)"


def own_beat(rank: int = 0) -> Beat:
    """Makes a beat of this process."""
    return Beat(time.monotonic(), Progress.done, stacks())


def describe_process(pid: int, host: str = "") -> str:
    """Names a process, and says what the kernel of this machine does of it: running, sleeping, stopped …"""
    status = Path(f"/proc/{pid}/status")
    if host or not status.exists():
        return f"pid {pid}{host and f' on {host}'}"
    return f"pid {pid}, {re.search(r'State:.*[(](.*)[)]', status.read_text())[1]}"
