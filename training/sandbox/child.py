"""The program of a sandbox's process: it sets fences, which nothing can take down again, and runs the policy's code.

training/sandbox/__init__.py starts it by its path, as a script of the standard library alone.
"""

import ctypes
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any

COMPILE_ERROR = 65  # the exit status of a program that is none
PR_SET_PDEATHSIG = 1
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1
MOST_FILES = 256
REFUSED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.spawn", "os.posix_spawn", "os.system", "os.kill",
           "pty.", "ctypes.")  # fmt: skip
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink",
           "os.truncate", "os.utime", "shutil.")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    code_descriptor, ready, seconds, memory_mb, files_mb = map(int, sys.argv[1:])
    with open(code_descriptor, "rb") as file:
        source = file.read().decode("utf-8", "replace")
    die_with_parent()
    ids = {"uid_map": os.getuid(), "gid_map": os.getgid()}
    if unshare():
        with suppress(OSError):
            keep_user(ids)
            make_rest_read_only(os.getcwd(), files_mb)
        become_first_process(ready)
    set_limits(seconds, memory_mb << 20, files_mb << 20)
    os.close(ready)  # the clock starts
    sys.argv = ["sandbox"]
    try:
        code = compile(source, "<code>", "exec")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        traceback.print_exception(error.with_traceback(None))
        sys.exit(COMPILE_ERROR)
    del globals()["libc"]  # it can do what the hook refuses
    sys.addaudithook(make_hook(os.path.realpath(".")))
    try:
        exec(code, {"__name__": "__main__"})
    except Exception as error:
        traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
        sys.exit(1)


def die_with_parent() -> None:
    if sys.platform == "linux":
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def unshare() -> bool:
    """Leaves network, processes and mounts of everybody else; False: the system does not let users do so."""
    if sys.platform != "linux":
        return False
    return libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC) == 0


def keep_user(ids: dict[str, int]) -> None:
    """Makes this process the user and the group that it was.

    Raises:
        OSError: the system does not let users do so.
    """
    with open("/proc/self/setgroups", "w") as file:
        file.write("deny")
    for name, number in ids.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(f"{number} {number} 1")


def make_rest_read_only(folder: str, size_mb: int) -> None:
    """Leaves nothing to write to but `folder`, which becomes an empty one in memory.

    Raises:
        OSError: the system does not let users do so.
    """
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)  # set, clear, propagation, user namespace
    size = ctypes.sizeof(attributes)
    options = f"size={size_mb}m,nr_inodes={MOST_FILES},mode=700".encode()
    check_returned(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    check_returned(libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, ctypes.byref(attributes), size))
    check_returned(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", MS_NOSUID | MS_NODEV, options))
    os.chdir(folder)


def check_returned(returned: int) -> None:
    if returned != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def become_first_process(ready: int) -> None:
    """Goes on as the first process of the new namespace, at whose end the kernel kills all others in it; the one that
    was there before ends as that one does."""
    child = os.fork()
    if child == 0:
        die_with_parent()
        return
    os.close(ready)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -status)
    os._exit(status)


def set_limits(seconds: int, memory: int, size: int) -> None:
    """Limits computing, bytes of memory and bytes of a file, its output too, for good."""
    for kind, most in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, 0),
    ):  # fmt: skip
        allowed = resource.getrlimit(kind)[1]  # whoever started this may be limited already
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (most, most))


def make_hook(here: str) -> Any:
    """Returns a hook, which stays for good, that refuses processes, sockets, and changes of files outside `here`."""

    def refuse(event: str, arguments: tuple) -> None:
        refused = event.startswith(REFUSED)
        if event.startswith(CHANGES) or (event == "open" and arguments[2] & WRITING):
            named = arguments[:1] if event == "open" else arguments[:2]
            paths = [os.path.realpath(path) for path in named if isinstance(path, str | bytes | os.PathLike)]
            outside = [path for path in map(os.fsdecode, paths) if os.path.commonpath((here, path)) != here]
            refused = any(path != os.devnull for path in outside)
        if refused:
            raise PermissionError(f"{event} is not allowed in the sandbox")

    return refuse


if __name__ == "__main__":
    main()
