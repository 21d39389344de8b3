"""Programs that a policy wrote run, and do nothing else: each ends in its time and changes no file."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from extras.sandbox import child
from extras.sandbox import run as sandbox
from extras.sandbox.child import ARCHITECTURES
from extras.sandbox.run import Finished, run_python
from extras.sandbox.tests.sandbox_escapes import ESCAPES, HONEST, MODES, OTHER, READS, ROOMY, run_all
from tests.runs import ROOT

NO = "not permitted|is not allowed"  # by the kernel, or where it has no fence by the hook


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
        ("import subprocess; subprocess.run(['ls'])", NO, 1),
        ("import socket; socket.socket()", NO, 1),
        ("import __main__; __main__.libc.syscall(57)", "AttributeError", 1),
        ("open('/tmp/elsewhere', 'w')", r"Permission denied|Read-only|is not allowed", 1),
        ("open('a', 'w').write('b'); print(open('a').read())", "b\n", 0),
        ("open('a', 'w').write('b' * 10**7)", "File too large", 1),
        ("print('a' * 10**8)", "File too large", 1),
        ("import os; os.kill(os.getpid() + 1, 0)", NO, 1),
        ("import os; print([key for key in os.environ if 'PATH' not in key])", r"\['HOME', 'TMPDIR', 'LANG', 'OMP_", 0),
    ],
)
def test_what_a_program_does(code: str, words: str, status: int):
    done = run_python(code, "one\ntwo\n", seconds=ROOMY)
    assert re.search(words, done.output + done.errors) and done.status == status
    assert len(done.output) <= 1 << 20


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
    with pytest.raises(ProcessLookupError):
        while time.monotonic() < deadline:  # the kernel takes a moment
            killpg(groups[0], 0)
            time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() not in ARCHITECTURES, reason="fences of Linux")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("user", [None, OTHER] if os.getuid() == 0 else [None])
def test_no_program_gets_out_and_honest_ones_run(user: int | None, mode: str):
    found = run_all(user, mode)
    if not child.is_closed(found["fences"].split(", ")):
        pytest.skip(f"this system has no more than {found['fences']}")
    assert ("namespaces" in found["fences"], "Landlock" in found["fences"]) == ("amespaces" in mode, "Landlock" in mode)
    held = [name for name in ESCAPES if mode != "namespaces alone" or name not in READS]
    assert {name: found[name] for name in held if not found[name].startswith("held")} == {}
    assert {name: found[name] for name in HONEST} == dict.fromkeys(HONEST, "ok")


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="root alone can become another")
@pytest.mark.parametrize("below", [".", "checkout"])
def test_the_checkout_may_lie_where_other_users_cannot_read(below: str, tmp_path: Path):
    (root := tmp_path / below).mkdir(exist_ok=True)
    tmp_path.chmod(0o700)
    for name in ("configs", "extras"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    found = run_all(OTHER, "namespaces, Landlock", root)
    assert {name: found[name] for name in HONEST} == dict.fromkeys(HONEST, "ok")


OPEN = """
import json, sys
from extras.sandbox.tests.sandbox_escapes import CALLS, refuse_calls
from extras.sandbox.run import run_python

refuse_calls([CALLS[name][sys.argv[1]] for name in ("landlock", sys.argv[3])])
done = [run_python(program, seconds=seconds, anyway=True) for program, seconds in json.loads(sys.argv[2])]
print(json.dumps([vars(each) for each in done]))
try:
    run_python("open('ran', 'w'); print('it ran')", seconds=60)
except ValueError as error:
    print(error, file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() not in ARCHITECTURES, reason="fences of Linux")
@pytest.mark.parametrize("lacks", ["unshare", "mount_setattr"])
def test_a_system_without_fences_leaves_the_limits_and_a_hook_and_is_not_taken_for_closed(lacks: str, tmp_path: Path):
    """No namespaces at all, or an old kernel's, in which files stay as they are."""
    programs = [
        (f"open({str(tmp_path / 'new')!r}, 'w')", ROOMY),
        ("open('a', 'w').write('b'); print(open('a').read())", ROOMY),
        ("open('a', 'w').write('b' * 10**7)", ROOMY),
        ("import socket; socket.socket()", ROOMY),
        ("x = 'a' * (4 << 30)", ROOMY),
        ("while True: pass", 0.2),
        (HONEST["asyncio"], ROOMY),
    ]
    command = [sys.executable, "-c", OPEN, platform.machine(), json.dumps(programs), lacks]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert "the sandbox is open" in done.stderr and "The program was not run" in done.stderr
    assert "it ran" not in done.stdout
    results = [Finished(**result) for result in json.loads(done.stdout)]
    outside, inside, large, socket, memory, endless, honest = results
    assert not child.is_closed(outside.fences) and "namespaces" not in outside.fences
    assert "open is not allowed" in outside.errors and not list(tmp_path.iterdir())
    assert inside.output == "b\n" and "File too large" in large.errors
    assert socket.status == 1 and "MemoryError" in memory.errors
    assert endless.status is None and honest.output == "42\n"


@pytest.mark.parametrize(
    ("fences", "suffice_for"),
    [
        (("Landlock", "seccomp"), ("open", "closed", "required")),
        (("namespaces", "seccomp"), ("open", "closed")),  # in which a program can read what this user can
        (("namespaces", "no capabilities", "Landlock"), ("open",)),
        (("no capabilities", "seccomp"), ("open",)),  # a kernel without mount_setattr and Landlock
    ],
)
def test_fences_are_said_and_too_few_refused(fences, suffice_for, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "fences", lambda: fences)
    for value in ("open", "closed", "required"):
        if value in suffice_for:
            said = sandbox.check_fences(value)
            assert ", ".join(fences) in said and ("is open" in said) is (len(suffice_for) == 1)
        else:
            with pytest.raises(ValueError, match=rf"reward.sandbox={value}: .*Linux 5.13.*reward.sandbox=open says"):
                sandbox.check_fences(value)


def test_computing_is_counted_apart_from_the_clock():
    assert run_python("while True: pass", seconds=ROOMY, cpu_seconds=0.5).status is None
    assert run_python("import time; time.sleep(0.5)", seconds=ROOMY, cpu_seconds=0.2).status == 0


def test_later_programs_run_in_the_module_of_the_first_if_that_ends_well():
    done = run_python("x = 6", then=("x *= 7", "print(x)"), seconds=ROOMY)
    assert (done.status, done.output) == (0, "42\n")
    for code in ("import os; os._exit(0)", "raise SystemExit"):
        assert run_python(code, then=("print(1)",), seconds=ROOMY).output == ""


def test_a_folder_goes_however_deep_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with sandbox.own_folder() as folder:
        kept = os.open(".", os.O_RDONLY)
        try:
            os.chdir(folder)
            for _ in range(1500):
                os.mkdir("a")
                os.chdir("a")
        finally:
            os.fchdir(kept)
            os.close(kept)
    assert not [*tmp_path.iterdir()]


def test_a_sandbox_that_does_not_start_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (broken := tmp_path / "child.py").write_text("raise SystemExit('no memory')")
    monkeypatch.setattr(child, "__file__", str(broken))
    with pytest.raises(RuntimeError, match="the sandbox did not start, status 1: no memory"):
        run_python("print(42)")
