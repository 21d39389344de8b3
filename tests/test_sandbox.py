"""Programs that a policy wrote run, and do nothing else: each ends in its time and changes no file."""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.runs import ROOT
from training import sandbox
from training.sandbox import Finished, child, run_python

ROOMY = 60.0  # seconds, for programs that end by themselves, on a busy machine
# A fork that no hook sees, in bits; then the first process ends and leaves it.
LEAVES_A_CHILD = """
import os
try:
    os.setsid()
except OSError:
    pass
import _posixsubprocess
ends = os.pipe()
try:
    _posixsubprocess.fork_exec(
        [b"/bin/sleep", b"SECONDS"], (b"/bin/sleep",), True, (), None, None, -1, -1, -1, -1, -1, -1, *ends, True, False,
        0, None, None, None, -1, None, False)
except Exception as error:
    print(type(error).__name__)
"""


def can_unshare() -> bool:
    return "1" in run_python("import os; print(os.getpid())", seconds=ROOMY).output.split()


@pytest.mark.parametrize(
    ("code", "words", "status"),
    [
        ("print(6 * 7)", "42\n", 0),
        ("print(input() + input())", "onetwo\n", 0),
        ("1/0", "ZeroDivisionError", 1),
        ("x = (", "SyntaxError", child.COMPILE_ERROR),
        ("raise SystemExit(3)", "", 3),
        ("import os; os._exit(7)", "", 7),
        ("x = 'a' * (4 << 30)", "MemoryError", 1),
        ("import os; os.system('ls')", "os.system is not allowed", 1),
        ("import os; os.fork()", "os.fork is not allowed", 1),
        ("import socket; socket.socket()", "is not allowed", 1),
        ("import ctypes; ctypes.CDLL(None).fork()", "is not allowed", 1),
        ("import __main__; __main__.libc.syscall(57)", "AttributeError", 1),
        ("open('/tmp/elsewhere', 'w')", "open is not allowed", 1),
        ("open('a', 'w').write('b'); print(open('a').read())", "b\n", 0),
        ("open('a', 'w').write('b' * 10**7)", "File too large", 1),
        ("print('a' * 10**8)", "File too large", 1),
        ("import os; os.kill(1, 9)", "os.kill is not allowed", 1),
        ("import os; print([key for key in os.environ if 'PATH' not in key])", "['HOME', 'LANG', 'OMP_", 0),
    ],
)
def test_what_a_program_does(code: str, words: str, status: int):
    done = run_python(code, "one\ntwo\n", seconds=ROOMY)
    assert words in done.output + done.errors and done.status == status
    assert len(done.output) <= 1 << 20
    assert done.is_no_program is (code == "x = (")


HOSTILE = {
    "endless loop": "while True: pass",
    "swallowed exceptions": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "sleep in C": "import time; time.sleep(1000)",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except BaseException: pass",
    "threads": "import threading, time\nthreading.Thread(target=lambda: time.sleep(1000)).start()",
    "allocations": "kept = []\nwhile True:\n    try: kept.append(bytearray(1 << 24))\n    except MemoryError: pass",
    "output": "while True:\n    try: print('x' * 10**6)\n    except OSError: pass",
    "catastrophic regex": "import re; re.match('(a+)+$', 'a' * 64 + 'b')",
    "signals ignored": "import signal, time\nfor one in range(1, 32):\n    try: signal.signal(one, signal.SIG_IGN)\n"
    "    except OSError: pass\ntime.sleep(1000)",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_program_that_does_not_end_is_ended_and_leaves_nothing(name: str, monkeypatch: pytest.MonkeyPatch):
    groups: list[int] = []
    killpg = os.killpg
    monkeypatch.setattr(sandbox.os, "killpg", lambda group, signal: (groups.append(group), killpg(group, signal)))
    done = run_python(HOSTILE[name], seconds=0.4)
    assert done.status is None
    deadline = time.monotonic() + ROOMY
    while group_exists(groups[0]):  # the kernel takes a moment
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.01)


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_no_file_outside_its_folder_changes(tmp_path: Path):
    """By all the ways in, each tried; the folder itself goes."""
    target = tmp_path / "kept"
    target.write_text("as it was")
    before = set(os.listdir(tempfile.gettempdir()))
    code = f"""
import os, shutil
from pathlib import Path
kept, folder = {str(target)!r}, {str(tmp_path)!r}
ways = [
    lambda: open(kept, "w"), lambda: open(kept, "a").write("x"), lambda: os.remove(kept), lambda: os.rename(kept, "a"),
    lambda: shutil.rmtree(folder), lambda: os.chmod(kept, 0), lambda: os.mkdir(folder + "/new"),
    lambda: Path.home().joinpath("mine").write_text("x"), lambda: Path("~/other").expanduser().write_text("x"),
    lambda: os.symlink(kept, "link") or open("link", "w"), lambda: open("inside", "w").write("x"),
]
for way in ways:
    try: way()
    except OSError: pass
print(len(os.listdir(".")))
"""
    done = run_python(code, seconds=ROOMY)
    assert done.status == 0 and int(done.output) >= 1
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("kept", "as it was")]
    new = set(os.listdir(tempfile.gettempdir())) - before
    assert not {name for name in new if name.startswith("sandbox-")}


def test_namespaces_hold_what_no_hook_sees(tmp_path: Path):
    """A file named beside a folder's descriptor; a process that a private module starts."""
    if not can_unshare():
        pytest.skip("this system lets users make no namespaces")
    code = f"import os; os.open('new', os.O_CREAT | os.O_WRONLY, dir_fd=os.open({str(tmp_path)!r}, os.O_RDONLY))"
    assert (
        "Read-only file system" in run_python(f"import os; os.mkfifo({str(tmp_path / 'new')!r})", seconds=ROOMY).errors
    )
    assert run_python(code, seconds=ROOMY).status == 1 and not list(tmp_path.iterdir())
    seconds = "986532"
    run_python(LEAVES_A_CHILD.replace("SECONDS", seconds), seconds=ROOMY)
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if seconds.encode() in command]


# Has the kernel refuse a call of the system, to this process and all it starts, for good; then runs programs.
WITHOUT = """
import ctypes, json, struct, sys
from training.sandbox import run_python

rules = [(0x20, 0, 0, 0), (0x15, 0, 1, int(sys.argv[1])), (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
libc = ctypes.CDLL(None)
no_new_privileges, set_filter = 38, 22
filtered = libc.prctl(no_new_privileges, 1, 0, 0, 0) == 0 and libc.prctl(
    set_filter, 2, ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
) == 0
results = [vars(run_python(program, seconds=seconds)) for program, seconds in json.loads(sys.argv[2])]
print(json.dumps({"filtered": filtered, "results": results}))
"""
CALLS = {"x86_64": {"unshare": 272, "mount": 165}, "aarch64": {"unshare": 97, "mount": 40}}


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() not in CALLS, reason="other calls of the system")
@pytest.mark.parametrize(("call", "alone"), [("unshare", False), ("mount", True)])
def test_what_the_system_does_not_allow_leaves_the_limits_and_the_hook(call: str, alone: bool, tmp_path: Path):
    """No namespaces at all, as in many containers; or namespaces in which nothing is mounted, as on some desktops."""
    alone = alone and can_unshare()
    programs = [
        ("import os; print(os.getpid() == 1)", ROOMY),
        (f"open({str(tmp_path / 'new')!r}, 'w')", ROOMY),
        ("open('a', 'w').write('b'); print(open('a').read())", ROOMY),
        ("open('a', 'w').write('b' * 10**7)", ROOMY),
        ("import socket; socket.socket()", ROOMY),
        ("x = 'a' * (4 << 30)", ROOMY),
        ("while True: pass", 0.2),
        (f"import os; os.mkfifo({str(tmp_path / 'pipe')!r})", ROOMY),
    ]
    number = str(CALLS[platform.machine()][call])
    before = set(os.listdir(tempfile.gettempdir()))
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, number, json.dumps(programs)], capture_output=True, text=True, cwd=ROOT
    )
    found = json.loads(done.stdout)
    assert found["filtered"], "the kernel takes no filter of calls"
    first, outside, inside, large, socket, memory, endless, _ = (Finished(**result) for result in found["results"])
    assert first.output == f"{alone}\n"
    assert "open is not allowed" in outside.errors
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"], "no hook sees it, and nothing is read-only"
    assert inside.output == "b\n" and "File too large" in large.errors
    assert "socket.__new__ is not allowed" in socket.errors and "MemoryError" in memory.errors
    assert endless.status is None
    new = set(os.listdir(tempfile.gettempdir())) - before
    assert not {name for name in new if name.startswith("sandbox-")}
