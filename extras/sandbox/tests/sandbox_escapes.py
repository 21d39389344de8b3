"""Programs that try to get out of the sandbox, and honest ones; `run_all` says what becomes of them.

A program that gets out prints ESCAPED, or leaves a file beside `kept`, or a connection. test_sandbox.py asserts
that none does, as root and as another user, where there are namespaces and where there are none.
"""

import ctypes
import json
import os
import platform
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OTHER = 54321  # a user who is nobody
ROOMY = 60.0  # seconds, for programs that end by themselves, on a busy machine
SECRET = b"what the parent keeps to itself"
MODES = {"namespaces, Landlock": (), "Landlock alone": ("unshare",), "namespaces alone": ("landlock",)}
CALLS = {"unshare": {"x86_64": 272, "aarch64": 97}}
CALLS |= {name: dict.fromkeys(CALLS["unshare"], number) for name, number in (("landlock", 444), ("mount_setattr", 442))}

ESCAPES = {
    "remount by ctypes": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.cast(libc.getpid, ctypes.c_void_p).value)()
clear = (ctypes.c_uint64 * 4)(0, 1, 0, 0)
libc.unshare(0x10020000)
libc.syscall(442, -100, b"/", 0x8000, ctypes.byref(clear), 32)
for point in ("/", "/tmp", FOLDER):
    libc.umount2(point.encode(), 2)
    libc.mount(None, point.encode(), None, 0x1020, None)
open(FOLDER + "/remounted", "w")
""",
    "fork_exec": """
import os, subprocess, _posixsubprocess
ends = os.pipe()
touch = [b"/bin/touch", os.fsencode(FOLDER) + b"/forked"]
ways = [
    lambda: _posixsubprocess.fork_exec(touch, (touch[0],), True, (), None, None, -1, -1, -1, -1, -1, -1, *ends,
                                       True, False, 0, None, None, None, -1, None, False),
    lambda: os.posix_spawn(touch[0], touch, {}), lambda: subprocess.run(touch), lambda: os.system("touch " + FOLDER),
    lambda: os.execv(touch[0], touch),
]
for way in ways:
    try: print("ESCAPED" if way() == 0 else "")
    except Exception as error: print(error)
""",
    "ptrace": """
import ctypes
seize, attach = 0x4206, 16
print("ESCAPED" if ctypes.CDLL(None).ptrace(seize, PARENT, 0, 0) == 0 else "")
""",
    "pidfd and signals": """
import ctypes, fcntl, os, signal
libc = ctypes.CDLL(None)
def by_descriptor():
    signal.pidfd_send_signal(os.pidfd_open(PARENT), 0)
def by_owner():
    ends = os.pipe()
    fcntl.fcntl(ends[0], fcntl.F_SETOWN, PARENT)
for way in (by_descriptor, by_owner, lambda: os.kill(PARENT, 0), lambda: os.kill(-1, 0)):
    try: print("ESCAPED", way())
    except OSError as error: print(error)
print("ESCAPED" if libc.syscall(200, PARENT, 0) == 0 else "")
""",
    "process_vm_readv": """
import ctypes
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(9)
ours, theirs = Vector(ctypes.addressof(buffer), 9), Vector(ADDRESS, 9)
done = ctypes.CDLL(None).process_vm_readv(PARENT, ctypes.byref(ours), 1, ctypes.byref(theirs), 1, 0)
print("ESCAPED" if buffer.raw == b"what the " else done)
""",
    "environ and mem of the parent": """
import os
for name in ("environ", "mem", "cwd/outside", "root/etc/shadow", "fd/0"):
    try:
        file = os.open(f"/proc/{PARENT}/{name}", os.O_RDONLY)
        if name == "mem": os.lseek(file, ADDRESS, 0)
        print("ESCAPED", os.read(file, 9))
    except OSError as error: print(error)
""",
    "unix socket": """
import ctypes, socket, array
path = FOLDER + "/listener"
libc = ctypes.CDLL(None)
print("ESCAPED" if libc.socket(1, 1, 0) >= 0 or libc.socket(2, 1, 0) >= 0 or libc.syscall(425, 8, 0) >= 0 else "")
for way in (lambda: socket.socket(socket.AF_UNIX).connect(path),
            lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0].sendto(b"x", path)):
    try: print("ESCAPED", way())
    except OSError as error: print(error)
""",
    "dir_fd": """
import os
try:
    folder = os.open(FOLDER, os.O_RDONLY)
    os.open("by_dir_fd", os.O_CREAT | os.O_WRONLY, dir_fd=folder)
except OSError as error: print(error)
for way in (lambda: os.mkfifo(FOLDER + "/pipe"), lambda: os.link(FOLDER + "/kept", FOLDER + "/link"),
            lambda: os.open(FOLDER + "/kept", os.O_RDONLY | os.O_TRUNC), lambda: os.truncate(FOLDER + "/kept", 0),
            lambda: os.chmod(FOLDER + "/kept", 0), lambda: os.utime(FOLDER + "/kept", (1, 1)),
            lambda: os.setxattr(FOLDER + "/kept", "user.x", b"1")):
    try: print("ESCAPED", way())
    except OSError as error: print(error)
""",
    "sqlite outside": """
import sqlite3
sqlite3.connect(FOLDER + "/outside.db").execute("create table t (x)")
""",
    "fork bomb": """
import os, threading, time, _thread
made = 0
for _ in range(200):
    try:
        if os.fork() == 0: time.sleep(1000)
        made += 1
    except OSError: pass
threading.stack_size(1 << 15)
threads = 0
try:
    while threads < 20000:
        _thread.start_new_thread(time.sleep, (1000,))
        threads += 1
except RuntimeError as error: print(error)
print(made, threads)
print("ESCAPED" if made or threads >= 20000 else "", flush=True)
os._exit(0)
""",
    "memory bomb": """
import mmap, os, resource
kept, most = [], 0
def take():
    kept.append(bytearray(1 << 24))
def share():
    kept.append(mmap.mmap(-1, 1 << 24)); kept[-1].write(bytes(1 << 24))
def descriptor():
    kept.append(os.memfd_create("x")); os.ftruncate(kept[-1], 1 << 30)
def shared_memory():
    import _posixshmem
    kept.append(_posixshmem.shm_open("/of_the_sandbox", os.O_CREAT | os.O_RDWR))
try: resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
except (OSError, ValueError): pass
for way in (descriptor, shared_memory, share, take):
    try:
        for _ in range(100): way()
        print("ESCAPED by", way.__name__)
    except (OSError, MemoryError) as error: print(type(error).__name__)
""",
    "output flood": """
import os
try:
    while True: os.write(1, b"x" * (1 << 20))
except OSError as error: pass
try: open("more", "w").write("x" * (1 << 22)); print("ESCAPED")
except OSError: pass
""",
    "out of its time": """
import ctypes, os, resource
libc = ctypes.CDLL(None)
print("ESCAPED" if libc.setsid() > 0 or libc.prctl(1, 0) == 0 or libc.setpgid(0, 0) == 0 else "")
for which in (resource.RLIMIT_CPU, resource.RLIMIT_NPROC):
    try: resource.setrlimit(which, (-1, -1)); print("ESCAPED")
    except (OSError, ValueError) as error: print(error)
try: resource.prlimit(PARENT, resource.RLIMIT_CORE, (0, 0)); print("ESCAPED")
except OSError as error: print(error)
""",
    "back to root": """
import ctypes, os
libc = ctypes.CDLL(None)
for way in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.chroot("/"), lambda: os.setgroups([0])):
    try: print("ESCAPED", way())
    except OSError as error: print(error)
""",
    "disks and terminals": """
import os
for folder, _, names in os.walk("/dev"):
    for name in set(names) - {"null", "zero", "full", "random", "urandom"}:
        if os.path.islink(folder + "/" + name): continue  # such as /dev/stdout
        try: print("ESCAPED", os.open(folder + "/" + name, os.O_WRONLY | os.O_NONBLOCK), folder, name)
        except OSError as error: pass
""",
    "many files": """
import os
written = 0
try:
    for number in range(40):
        with open(f"file_{number}", "wb") as file: file.write(bytes(1 << 19))
        written += 1 << 19
except OSError as error: print(error)
print("ESCAPED" if written > 1 << 20 else "", written)
""",
    "many folders": """
import os
made = 0
try:
    for made in range(2000): os.mkdir(f"folder_{made}")
except OSError as error: print(error)
print("ESCAPED" if made > 300 else "", made)
""",
    "links in and out": """
import os
for way in (lambda: os.link(FOLDER + "/kept", "kept"), lambda: os.rename(FOLDER + "/kept", "kept"),
            lambda: os.link("/proc/self/fd/1", FOLDER + "/output", follow_symlinks=True),
            lambda: (open("own", "w").close(), os.rename("own", FOLDER + "/own"))):
    try: print("ESCAPED", way())
    except OSError as error: print(error)
""",
    "what it was given made longer": """
import os
for number in range(64):
    for way in (lambda: os.ftruncate(number, 1 << 30), lambda: os.posix_fallocate(number, 0, 1 << 30),
                lambda: os.pwrite(number, b"x", 1 << 30)):
        try: print("ESCAPED", number, way())
        except OSError as error: pass
""",
    "calls of later kernels": """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
for number in (424, 425, 428, 429, 430, 432, 434, 435, 438, 440, 442, 443, 444, 447, 450, 459, 463, 467):
    if libc.syscall(number, 0, 0, 0, 0, 0, 0) >= 0 or ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        print("ESCAPED", number, ctypes.get_errno())
""",
    "files of the user": """
for name in (FOLDER + "/kept", "/etc/shadow"):
    try: print("ESCAPED", open(name).read())
    except OSError as error: print(error)
""",
}
READS = ("files of the user",)  # what Landlock alone holds
HONEST = {
    "asyncio": """
import asyncio
async def one():
    await asyncio.sleep(0.001)
    return 21
async def main():
    return sum(await asyncio.gather(one(), one()))
print(asyncio.run(main()))
""",
    "devices": "import os\nopen(os.devnull, 'w').write('x')\nprint(42, open('/dev/urandom', 'rb').read(1))",
    "numpy": "import numpy as np\nprint(int(np.linalg.inv(np.eye(42)).trace().round()), np.random.rand() < 1)",
    "pickle of a class": """
import pickle
class Number:
    def __init__(self, value): self.value = value
print(pickle.loads(pickle.dumps(Number(42))).value)
""",
    "a deep recursion in a thread": """
import sys, threading
def down(depth): return 42 if depth == 0 else down(depth - 1)
sys.setrecursionlimit(20000)
threading.stack_size(1 << 26)
thread = threading.Thread(target=lambda: print(down(15000)))
thread.start()
thread.join()
""",
}


def refuse_calls(numbers: Iterable[int]) -> None:
    """Has the kernel refuse calls of the system, to this process and all it starts, for good."""
    rules = [(0x20, 0, 0, 0)]
    for number in numbers:
        rules += [(0x15, 0, 1, number), (0x06, 0, 0, 0x50001)]
    rules += [(0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    libc, no_new_privileges, set_filter = ctypes.CDLL(None), 38, 22
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
    assert libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0
    assert libc.prctl(set_filter, 2, program) == 0, "the kernel takes no filter of calls"


def become(user: int) -> None:
    """Makes this process another user's, who can read its Python and this checkout even where they lie in a folder
    that is root's own: what they hold is mounted anew, in a namespace of this process."""
    inside = [path for folder in (sys.base_prefix, sys.prefix, ROOT) for path in Path(folder).iterdir()]
    ways = {path: [*path.parents] for path in inside if path.is_dir() and not path.is_symlink()}
    closed = {path: [above for above in way if not above.stat().st_mode & 1] for path, way in ways.items()}
    if tops := {way[-1] for way in closed.values() if way}:
        libc, private, bind = ctypes.CDLL(None, use_errno=True), 0x44000, 0x1000
        assert libc.unshare(1 << 17) == 0 and libc.mount(None, b"/", None, private, None) == 0
        kept = {path: os.open(path, os.O_PATH) for path, way in closed.items() if way}
        venv = {path: path.read_bytes() for path in inside if path.name == "pyvenv.cfg"}
        for top in tops:
            assert libc.mount(b"none", os.fsencode(top), b"tmpfs", 0, b"mode=755") == 0
        for path, descriptor in kept.items():
            path.mkdir(parents=True, exist_ok=True)
            assert libc.mount(f"/proc/self/fd/{descriptor}".encode(), os.fsencode(path), None, bind, None) == 0
            os.close(descriptor)
        for path, content in venv.items():
            if not path.exists():
                path.write_bytes(content)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.environ["HOME"] = "/"


def try_all(folder: Path) -> dict[str, str]:
    """Runs all programs; returns what became of each, in a word, and beside it what it printed."""
    from extras.sandbox.run import fences, run_python

    secret = ctypes.create_string_buffer(SECRET)
    given = f"FOLDER, PARENT, ADDRESS = {str(folder)!r}, {os.getpid()}, {ctypes.addressof(secret)}\n"
    (folder / "kept").write_text("as it was")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "listener"))
    listener.listen()
    found = {"fences": ", ".join(fences())}
    for name, code in ESCAPES.items():
        before = state(folder)
        done = run_python(given + code, seconds=ROOMY, cpu_seconds=10)
        out = "ESCAPED" in done.output or state(folder) != before or len(done.output) > 1 << 20
        found[name] = f"{'OUT' if out else 'held'}: {(done.output + done.errors)[:3000]}"
    for name, code in HONEST.items():
        done = run_python(code, seconds=ROOMY)
        found[name] = "ok" if done.output.startswith("42") else f"FAILED: {done.errors}"
    return found


def state(folder: Path) -> list[tuple]:
    """Returns all that a program could change in a folder."""
    looks = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    return [(name, look.st_mode, look.st_size, look.st_mtime) for name, look in looks]


def run_all(user: int | None, mode: str, root: Path = ROOT) -> dict[str, str]:
    """Returns `try_all` of a process of its own: of that user (None: this one), without what `mode` takes away, by the
    checkout at `root`."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o777)
        command = [sys.executable, "-m", "extras.sandbox.tests.sandbox_escapes", str(user or ""), mode, folder]
        done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=os.environ | {"KEY": "secret"})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


if __name__ == "__main__":
    user, mode, folder = sys.argv[1:]
    if user:
        become(int(user))
    refuse_calls([CALLS[name][platform.machine()] for name in MODES[mode]])
    print(json.dumps(try_all(Path(folder))))
