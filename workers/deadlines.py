"""Watches the workers that a call waits for: whether they are silent, stuck, or only slow.

A worker's process counts its work by `beat`. The process that waits (`Wait`) reads the worker's newest `Beat` every
BEAT_SECONDS.
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

from configs.errors import WorkerLost, notice

NOTICE_SECONDS = 60.0  # of waiting until a notice names the late workers; doubles after each notice
BEAT_SECONDS = 2.0  # between two beats of a worker, and between two looks at them
UNSURE_SECONDS = 5 * BEAT_SECONDS  # a worker silent for less may only be late
longest: dict[str, float] = {}  # seconds that the longest call of a verb has taken so far
IDLE = ("threading.py", "selectors.py", "queue.py", "thread.py")  # where idle threads wait


class Progress:
    """Holds how much this process has done: micro-batches, steps of an engine, parts of a checkpoint."""

    done = 0


def beat() -> None:
    """Counts a piece of work, so that whoever waits for this process can tell slow from stuck."""
    Progress.done += 1


def stacks() -> str:
    """Returns the stacks of the main thread and of all busy threads of this process, without the caller's."""
    main, caller = threading.main_thread().ident, threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != caller}
    busy = [key for key, frame in frames.items() if Path(frame.f_code.co_filename).name not in IDLE or key == main]
    return "\n".join(f"{names.get(ident, ident)}:\n{stack_of(frames[ident])}" for ident in busy)


def stack_of(frame: FrameType) -> str:
    try:
        return "".join(traceback.format_stack(frame))
    except AttributeError:  # the thread ran on, and the frame is gone
        return "  (it runs)\n"


class Beat(NamedTuple):
    """A sign of life of a worker's process: a number that grows, how much it has `done`, and its threads' stacks if it
    has done nothing since the last beat."""

    number: float
    done: int
    stacks: str


class Wait:
    """Watches, while the context is open, the ranks that a call waits for. Notices name the late ones and what they do:
    after NOTICE_SECONDS, or twice the verb's longest time so far, and each time that this has doubled.

    Args:
        processes: of all ranks, by RemoteWorker.pid_and_host.
        newest_beat: returns the newest beat of a rank; None: there is none.
        limit: seconds until `check` gives up; None: never.
        names: of all ranks, unless their numbers say enough.

    Attributes:
        late: ranks that have not come back.
        silent, idle: seconds for which a rank sent no beat, or did nothing new. Only seconds in which this process
            looked count: it may have been stopped itself.
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
        """Returns a Wait for both calls, which wait for each other; the ranks of `other` are numbered after these."""
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
        """Raises WorkerLost if a late rank is silent, or all of them are idle, for `limit` seconds."""
        if self.limit is None or not self.late:
            return
        silent, idle = ([seconds[rank] for rank in self.late] for seconds in (self.silent, self.idle))
        if max(*silent, min(idle)) >= self.limit:
            raise WorkerLost(f"{self.verb} gets no further for trainer.stall_timeout={self.limit:g} s, by {self}")

    def __str__(self) -> str:
        """Names the late ranks, silent ones first, and what each does; if none is silent, adds a stuck one's stacks."""
        late = sorted(self.late, key=lambda rank: self.silent[rank] <= UNSURE_SECONDS)
        stuck = [rank for rank in late if self.idle[rank] > UNSURE_SECONDS >= max(self.silent[other] for other in late)]
        stack = "".join(f"\n{self.name(rank).capitalize()} is here:\n{self.beats[rank].stacks}" for rank in stuck[:1])
        return ", ".join(map(self._describe, late)) + "." + stack.rstrip()

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
    """Names a process, and its state by this machine's kernel: running, sleeping, stopped …"""
    status = Path(f"/proc/{pid}/status")
    if host or not status.exists():
        return f"pid {pid}{host and f' on {host}'}"
    return f"pid {pid}, {re.search(r'State:.*[(](.*)[)]', status.read_text())[1]}"
