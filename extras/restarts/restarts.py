"""Starts a run again, in a child of the command's process, which loads neither torch nor Ray and so outlives it."""

import atexit
import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from configs.errors import TEMPORARY, notice
from configs.process import ENDING, SAVING, in_words
from configs.settings import with_settings
from data.files import read_metrics

FIRST_PAUSES = {TEMPORARY: 60.0}  # seconds before a restart, by exit code: a server or a disk takes longer
SHORT_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # after another end; pauses double until there is a new checkpoint
POLL = 0.1  # seconds between two looks at the child, and for a signal to reach both processes
IN_ALL = 20  # times trainer.max_restarts: restarts of a command, however many checkpoints there were between them
END_SECONDS = 10.0  # for what a dead run has left behind to end by itself; agents of a dead Ray do not for a minute
BY_ITSELF = 0  # beside numbers of signals
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def supervise(config: Any) -> Any:
    """Returns the config in a child of this process, and in a next one where that has ended by what may pass; ends this
    process as the last of them has ended."""
    trainer, folder, most = config.trainer, Path(config.trainer.default_local_dir), config.trainer.max_restarts
    checkpoint, in_a_row, pause, last, settings = newest_checkpoint(folder), 0, 0.0, None, {}
    control(PR_SET_CHILD_SUBREAPER, 1)
    while True:
        child, pipe = start_child()
        if child == 0:
            return with_settings(config, settings)
        code, _, may_pass = watch(child, pipe)
        if not may_pass:
            end_after(code)
        before, checkpoint = checkpoint, newest_checkpoint(folder)
        ending = f"this run {in_words_of(code)} after step {steps_done(folder)}"
        if checkpoint != before:
            settings = {"trainer.resume_mode": "auto", "trainer.resume_from_path": None}
            in_a_row, pause = 0, 0.0
        elif ending == last and code != TEMPORARY:  # a server may take longer than the first pause
            notice(f"{ending} again, without a new checkpoint: it is not started again.")
            end_after(code)
        if in_a_row == most:
            notice(f"{ending}, and was started again trainer.max_restarts={most} times since its last checkpoint.")
            end_after(code)
        if len(trainer.restarted) == IN_ALL * most:
            times = f"{IN_ALL} times trainer.max_restarts={most}"
            notice(f"{ending}, and was started again {times}. The same command goes on from its last checkpoint.")
            end_after(code)
        in_a_row, last = in_a_row + 1, ending
        pause = min(2 * pause or FIRST_PAUSES.get(code, SHORT_PAUSE), LONGEST_PAUSE)
        notice(f"{ending}. It is started again in {pause:.0f} s: {in_a_row} of trainer.max_restarts={most}.")
        trainer.restarted.append(code)
        began = time.monotonic()
        end_descendants()
        time.sleep(max(0.0, began + pause - time.monotonic()))


def newest_checkpoint(folder: Path) -> tuple[int, int] | None:
    """Returns what changes whenever a checkpoint gets its name; None: there is none."""
    path = folder / "latest_checkpointed_iteration.txt"
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None


def steps_done(folder: Path) -> int:
    """Returns the last step in the record of the run."""
    entries = read_metrics(folder / "metrics.jsonl")
    return entries[-1]["step"] if entries else 0


def in_words_of(code: int) -> str:
    return f"ended with exit code {code}" if code > 0 else f"was ended by {in_words(-code)}"


def start_child() -> tuple[int, int]:
    """Forks; returns 0 in the child, and in this process the child's pid and a pipe. The child writes to it the signals
    that it receives, and BY_ITSELF before Python ends."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    sys.stdout.flush()
    parent, child = os.getpid(), os.fork()
    if child:
        os.close(writer)
        return child, reader
    # `reader` stays open, so that what is written does not fail once the parent has been killed.
    control(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was gone before that
        end_like(-signal.SIGTERM)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    pid = os.getpid()
    atexit.register(lambda: os.getpid() == pid and os.write(writer, bytes([BY_ITSELF])))
    return 0, writer


def watch(child: int, pipe: int) -> tuple[int, bool, bool]:
    """Passes signals on to the child until it has ended. Returns its exit code, negative for a signal; whether anybody
    asked for the end; and whether the cause may pass: nobody asked, and the run says that it may, or Python did not end
    it itself."""
    received: list[int] = []
    answered = [number for number in (*ENDING, SAVING) if signal.getsignal(number) is not signal.SIG_IGN]
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in answered}
    is_asked, by_itself, signals = False, False, b""
    while (code := exit_code_of(child)) is None:
        time.sleep(POLL)
        if received:
            time.sleep(POLL)
        before, signals = signals, read(pipe)
        by_itself |= BY_ITSELF in signals
        while received:
            number = received.pop(0)
            is_asked |= number in ENDING
            if number not in before + signals:  # else it was sent to both, as by a terminal
                os.kill(child, number)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    is_asked |= -code in ENDING
    by_itself |= BY_ITSELF in read(pipe)
    os.close(pipe)
    return code, is_asked, code != 0 and not is_asked and (code == TEMPORARY or not by_itself)


def read(pipe: int) -> bytes:
    with suppress(BlockingIOError):  # nothing is there
        return os.read(pipe, 1 << 16)
    return b""


def exit_code_of(child: int) -> int | None:
    """Returns the exit code of `child` if it has ended; buries the others, orphans of a dead child."""
    code, ended = None, (1, 0)
    with suppress(ChildProcessError):  # there are none
        while ended[0] and code is None:
            ended = os.waitpid(-1, os.WNOHANG)
            code = os.waitstatus_to_exitcode(ended[1]) if ended[0] == child else None
    return code


def end_descendants() -> None:
    """Ends what a dead run has left behind: engines, scorers, its Ray. This process has become their parent."""
    began, waited = time.monotonic(), 0.0
    for pid in descendants(os.getpid()):
        signal_process(pid, signal.SIGTERM)
    while (left := descendants(os.getpid())) and waited < 2 * END_SECONDS:
        for pid in left if waited > END_SECONDS else ():
            signal_process(pid, signal.SIGKILL)
        time.sleep(POLL)
        exit_code_of(-1)
        waited = time.monotonic() - began


def descendants(ancestor: int) -> list[int]:
    """Lists the living processes that descend from `ancestor`; none outside Linux."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(file.parent.name)] = int(parent)
    family, new = set(), {ancestor}
    while new:
        family |= new
        new = {pid for pid, parent in parents.items() if parent in new}
    return sorted(family - {ancestor})


def signal_process(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended
        os.kill(pid, number)


def end_after(code: int) -> NoReturn:
    """Ends what a run has left behind that has ended by `code`, then this process in the same way."""
    if code:
        end_descendants()
    end_like(code)


def end_like(code: int) -> NoReturn:
    """Ends this process with an exit code, or by a signal."""
    if code >= 0:
        raise SystemExit(code)
    sys.stdout.flush()
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    raise SystemExit(1)  # a signal that ends nothing


def control(option: int, value: int) -> None:
    """Calls Linux's prctl; does nothing elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
