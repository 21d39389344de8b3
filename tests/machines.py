"""Makes two "machines" of this one, joined by a cable that may be slow, lossy or pulled. Needs Linux and root.

A machine has network, processes, host name, /dev/shm, Ray's folder and home of its own; disk and cores are shared. The
cable is a tun device in each, between which a process carries the packets: kernels of containers often lack netem.
"""

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]
ADDRESSES = "10.77.0.1", "10.77.0.2"
APART = "--net", "--mount", "--uts", "--ipc"
NAMESPACES = "unshare", *APART, "--pid", "--fork", "--mount-proc"
MACHINE = """
set -e; hostname $0; ip link set lo up; mkdir -p /tmp/ray $HOME
for folder in /dev/shm /tmp/ray; do mount -t tmpfs none $folder; done
mount --bind $1 /etc/hosts
echo is up; read until_closed
"""
LAUNCH = "bash", "examples/launch/ray.sh"
OWN = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0"}
TUNSETIFF, TUN_WITHOUT_HEADER = 0x400454CA, 0x1001
PULLING = """
from pathlib import Path
from time import sleep

from data.files import read_metrics
from workers.ray_group import RayWorkerGroup

asked, cable, record = map(Path, {paths})

def submit(group, role, method, shares, before=RayWorkerGroup.submit):
    pending = before(group, role, method, shares)
    if f"{{role}}.{{method}}" == "{verb}" and asked.exists() and len(read_metrics(record)) >= {steps}:
        sleep(0.02)  # until it has begun
        cable.write_text("0 1")
        asked.unlink()
    return pending

RayWorkerGroup.submit = submit
"""


def refusal() -> str:
    """Says why there can be no two machines here; "": there can."""
    command = *NAMESPACES, "sh", "-c", "mount -t tmpfs none /mnt && test -c /dev/net/tun && ip link && nsenter -V"
    done = subprocess.run(["sh", "-c", '"$@"', "sh", *command], capture_output=True, text=True)
    return f"two machines need root, namespaces, tun and iproute2: {done.stderr}" if done.returncode else ""


class Machines:
    """Has node1 and node2 while the context is open; all that runs on them ends with it. Homes, and what commands say,
    are in `folder`; `variables` are for every command's environment."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder, self.cable, self.asked = folder, folder / "cable", folder / "pull"
        self.variables, self.pids, self.ends = OWN | variables, [], ExitStack()

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        names = [f"{address} node{number}" for number, address in enumerate(ADDRESSES, start=1)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        self.lay()
        with self.ends as failed:
            for number in (1, 2):
                command = [*NAMESPACES, "bash", "-c", MACHINE, f"node{number}", str(self.folder / "hosts")]
                self.pids.append(self._begin(command, env=self.environment(number)))
            self._begin([sys.executable, __file__, str(self.cable), *map(str, self.pids)])
            self.ends = failed.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.close()

    def _begin(self, command: list[str], **given: Any) -> int:
        """Starts what ends with its stdin, so with this process too, and waits until it is up."""
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **given)
        self.ends.callback(process.wait, 60)
        self.ends.callback(process.stdin.close)
        assert process.stdout.readline() == "is up\n", command
        return process.pid

    def lay(self, delay: float = 0.0, loss: float = 0.0) -> None:
        """Lays another cable: seconds each way, and the share of packets that it loses."""
        self.cable.write_text(f"{delay} {loss}")

    def pull_in(self, verb: str, run: Path, steps: int) -> str:
        """Returns the setting by which a run pulls the cable in a `verb` of its workers, once `steps` are done."""
        file, paths = self.folder / "pulling.py", (self.asked, self.cable, run / "metrics.jsonl")
        file.write_text(PULLING.format(verb=verb, steps=steps, paths=[*map(str, paths)]))
        self.asked.touch()
        return f"actor_rollout_ref.model.external_lib={file}"

    def environment(self, number: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**kept, **self.variables, "HOME": str(self.folder / f"node{number}")}

    def start(self, number: int, *words: str | Path) -> "Command":
        """Starts a command on a machine."""
        pid, output = self.pids[number - 1], self.folder / f"said{len(list(self.folder.glob('said*')))}"
        places = f"--target={pid}", *APART, f"--pid=/proc/{pid}/ns/pid_for_children", f"--wd={ROOT}"
        return Command(["nsenter", *places, *map(str, words)], self.environment(number), output)

    def make_cluster(self) -> None:
        """Starts Ray on both, as docs/cluster.md says, the token copied."""
        self.start(1, *LAUNCH, "head").succeed()
        first, second = (self.folder / f"node{number}/.ray/auth_token" for number in (1, 2))
        second.parent.mkdir()
        second.write_bytes(first.read_bytes())
        self.join()

    def join(self) -> None:
        """Has the second machine join, once its Ray of before, if that was given up, has heard so and ended."""
        if self.start(2, "timeout", "60", "sh", "-c", "while pgrep -x raylet; do sleep 1; done").wait() == 0:
            self.start(2, *LAUNCH, "join", ADDRESSES[0]).succeed()


class Command:
    """A command on a machine: what it has `said`, and its end."""

    def __init__(self, command: list[str], environment: dict[str, str], output: Path) -> None:
        self.output = output
        with output.open("w") as file:
            self.process = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def said(self) -> str:
        return self.output.read_text()

    def until(self, condition: Any, most: float = 300) -> float:
        """Waits for a condition; returns for how many seconds. Raises AssertionError if the command ends before."""
        began = time.monotonic()
        while not condition():
            assert self.process.poll() is None and time.monotonic() < began + most, self.said()
            time.sleep(0.01)
        return time.monotonic() - began

    def wait(self, seconds: float = 300) -> int:
        return self.process.wait(seconds)

    def succeed(self) -> None:
        assert self.wait() == 0, self.said()


def plug(pid: int, address: str) -> int:
    """Gives the machine of process `pid` a network device; returns the file where its packets are read and written."""
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    made = fcntl.ioctl(end, TUNSETIFF, struct.pack("16sH22x", b"", TUN_WITHOUT_HEADER))
    name = made[:16].rstrip(b"\0").decode()
    subprocess.run(["ip", "link", "set", name, "netns", str(pid)], check=True)
    for words in (f"address add {address}/24 dev {name}", f"link set {name} up txqueuelen 10000"):
        subprocess.run(["nsenter", f"--target={pid}", "--net", "ip", *words.split()], check=True)
    return end


def carry(cable: Path, *pids: int) -> None:
    """Carries packets between two machines, by the delay and loss in the file `cable`, until stdin is closed."""
    ends = [plug(*end) for end in zip(pids, ADDRESSES, strict=True)]
    other, under_way, draws = dict(zip(ends, reversed(ends), strict=True)), deque(), Random(0)
    print("is up", flush=True)
    while True:
        with suppress(ValueError):  # it is being written
            delay, loss = map(float, cable.read_text().split())
        pause = under_way[0][0] - time.monotonic() if under_way else 0.1
        ready, _, _ = select.select([sys.stdin, *ends], [], [], min(max(pause, 0.0), 0.1))
        if sys.stdin in ready:
            return
        for end in ready:
            with suppress(BlockingIOError):  # all is read
                for _ in range(256):
                    packet = os.read(end, 1 << 16)
                    if draws.random() >= loss:
                        under_way.append((time.monotonic() + delay, other[end], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            with suppress(OSError):  # the other's queue is full
                os.write(end, packet)


if __name__ == "__main__":
    carry(Path(sys.argv[1]), *map(int, sys.argv[2:]))
