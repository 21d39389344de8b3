"""Programs that a policy wrote run, and do nothing else: each ends in its time and changes no file."""

import os
import tempfile
import time
from pathlib import Path

import pytest

from training import sandbox, sandbox_child
from training.sandbox import run_python

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
        ("x = (", "SyntaxError", sandbox_child.COMPILE_ERROR),
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


def test_without_namespaces_the_limits_and_the_hook_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    child = tmp_path / "child.py"
    source = Path(sandbox_child.__file__).read_text()
    assert "if unshare():" in source
    child.write_text(source.replace("if unshare():", "if False:"))
    monkeypatch.setattr(sandbox_child, "__file__", str(child))
    assert "open is not allowed" in run_python("open('/tmp/elsewhere', 'w')", seconds=ROOMY).errors
    assert run_python("open('a', 'w').write('b'); print(open('a').read())", seconds=ROOMY).output == "b\n"
    assert run_python("while True: pass", seconds=0.2).status is None
