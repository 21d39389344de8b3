"""The program of a sandbox's process: it sets fences, which nothing can take down again, and runs the policy's code,
or becomes a user's command, which reaches one server and nothing else.

run.py starts it by its path, as a script of the standard library alone. It tries each fence, and reports the ones that
the system has through the pipe `ready`. The order matters: mounts need rights that are then given up, and the filter of
system calls, set last, would refuse the calls that set the others.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

COMPILE_ERROR = 65  # the exit status if the program does not compile
OPEN = "open"  # the first word of an open sandbox
MOST_FILES, MOST_THREADS, MOST_OPEN = 256, 64, 64
MORE = 16  # times as many threads and open files for a command, which may play many tasks at once
NAMESPACES, CAPABILITIES, LANDLOCK, SECCOMP = "namespaces", "no capabilities", "Landlock", "seccomp"

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 1, 22, 24, 38, 47
CAPABILITY_VERSION, LAST_CAPABILITY, AMBIENT_CLEAR_ALL = 0x20080522, 63, 4
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY, MOUNT_ATTR_NODEV = 442, -100, 0x8000, 1, 4
DEVICES = ("/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")  # to read; and /dev/null, to write to as well

# Landlock: rights of files and folders by the version of the kernel, and what a program may read.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF, VERSION_FLAG, PATH_BENEATH = 444, 445, 446, 1, 1
RIGHTS = (13, 14, 15, 15, 16)  # bits of the versions 1, 2 …
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
SCOPES, SCOPED_FROM = 3, 6  # abstract sockets and signals
READABLE = ("/usr", "/lib", "/lib32", "/lib64", "/nix", "/gnu", "/sys/devices/system/cpu", "/etc/ld.so.cache",
            "/etc/localtime", "/etc/passwd", "/etc/group", "/etc/mime.types", "/proc/cpuinfo", "/proc/meminfo",
            *DEVICES)  # fmt: skip

# The filter of system calls: their numbers for x86_64 and for aarch64, which has fewer.
ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
STARTS = "fork 57 -, vfork 58 -, execve 59 221"
CONNECTS = "bind 49 200, listen 50 201, connect 42 203, accept 43 202, accept4 288 242"
GROUPS = "setsid 112 157, setpgid 109 154, tkill 200 130"
REFUSED = """
execveat 322 281, ptrace 101 117, process_vm_readv 310 270,
process_vm_writev 311 271, kcmp 312 272, unshare 272 97, setns 308 268, mount 165 40, umount2 166 39,
pivot_root 155 41, chroot 161 51, init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104,
kexec_file_load 320 294, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282, keyctl 250 219, add_key 248 217,
request_key 249 218, open_by_handle_at 304 265, quotactl 179 60, syslog 103 116, personality 135 92, modify_ldt 154 -,
fanotify_init 300 262, inotify_init 253 -, inotify_init1 294 26, move_pages 279 239, migrate_pages 256 238,
rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, setuid 105 146, setgid 106 144, setreuid 113 145,
setregid 114 143, setresuid 117 147, setresgid 119 149, setfsuid 122 151, setfsgid 123 152, setgroups 116 159,
sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118, sched_setattr 314 274,
setpriority 141 140, ioprio_set 251 30, memfd_create 319 279, shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190,
semop 65 193, semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189, msgrcv 70 188,
msgctl 71 187, mq_open 240 180, mq_unlink 241 181, io_setup 206 0"""
CHANGES = """
chmod 90 -, fchmod 91 52, fchmodat 268 53, chown 92 -, fchown 93 55, lchown 94 -, fchownat 260 54, utime 132 -,
utimes 235 -, futimesat 261 -, utimensat 280 88, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, removexattr 197 14,
lremovexattr 198 15, fremovexattr 199 16, truncate 76 45"""  # which Landlock does not see
NEW_FROM = 424  # calls from here on have one number everywhere; of these, and of those to come, some are allowed
NEW_ALLOWED = (436, 439, 441, 449, 454, 455, 456, 462)  # close_range, faccessat2, epoll_pwait2, futexes, mseal
CLONE_THREAD, CLONE_NEW, AF_UNIX, AF_INET, SOCK_STREAM, SOCK_TYPE = 1 << 16, 0x7E020000, 1, 2, 1, 0xF
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
SET_OWNERS = (8, 10, 15)  # of fcntl: to whom a descriptor sends signals, and which
TERMINALS = (0x5412, 0x541C, 0x540E, 0x8901, 0x8902)  # of ioctl: keys typed into a terminal, and owners, as above
LOAD, AND, EQUAL, AT_LEAST, RETURN = 0x20, 0x54, 0x15, 0x35, 0x06  # instructions of a filter
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x50000
NOT_PERMITTED, NO_SUCH_CALL = ERROR | 1, ERROR | 38

REFUSED_EVENTS = ("socket.", "subprocess.", "os.fork", "os.exec", "os.spawn", "os.posix_spawn", "os.system", "os.kill",
                  "pty.", "ctypes.")  # fmt: skip
CHANGING_EVENTS = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink",
                   "os.truncate", "os.utime", "shutil.")  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

libc = ctypes.CDLL(None, use_errno=True)
Instruction = tuple[int, int, int, int]


def main() -> None:
    ready, seconds, memory_mb, files_mb, processes, anyway, port = map(int, sys.argv[2:9])
    readable, limits = tuple(filter(None, sys.argv[1].split(os.pathsep))), (seconds, memory_mb << 20, files_mb << 20)
    fences, listener = set_fences(ready, limits, readable, bool(processes), port)
    is_open = not is_closed(fences) or (port > 0 and listener is None)
    if is_open:  # mistakes at least are kept in
        sys.addaudithook(make_hook(os.path.realpath(".")))
    word = ", ".join([OPEN if is_open else "closed", *fences]).encode()
    if listener is None:
        os.write(ready, word)
    else:
        import socket

        socket.send_fds(socket.socket(fileno=os.dup(ready)), [word], [listener.detach()])
    os.close(ready)  # the clock starts
    if is_open and not anyway:
        sys.exit()
    if port:
        folder, *words = sys.argv[9:]
        os.chdir(folder)
        os.execvp(words[0], words)
    sources, *lengths = map(int, sys.argv[9:])
    sys.argv = ["sandbox"]
    run_sources(sources, lengths)


def run_sources(descriptor: int, lengths: list[int]) -> None:
    """Runs programs one after the other as the module __main__; each is read when those before it have ended."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    for length in lengths:
        try:
            code = compile(os.read(descriptor, length).decode("utf-8", "replace"), "<code>", "exec")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            traceback.print_exception(error.with_traceback(None))
            sys.exit(COMPILE_ERROR)
        try:
            exec(code, module.__dict__)
        except Exception as error:  # whatever the policy's program raises is its output
            traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
            sys.exit(1)


def is_closed(fences: list[str]) -> bool:
    """Returns whether no way out is known: neither to files, nor to other processes, nor to the network."""
    return SECCOMP in fences and (NAMESPACES in fences or LANDLOCK in fences)


def set_fences(
    ready: int, limits: tuple[int, int, int], readable: tuple[str, ...], processes: bool, port: int
) -> tuple[list[str], Any]:
    """Sets all fences that the system has; returns their names, and the socket of `listen` if there is a `port`.
    Arguments are those of `run_python`."""
    if sys.platform != "linux":
        set_limits(*limits)
        return [], None
    die_with_parent()
    with suppress(OSError):
        count_alone()
    fences, listener, ids = [], None, {"uid_map": os.geteuid(), "gid_map": os.getegid()}
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC) == 0:
        with suppress(OSError):
            keep_user(ids)
            make_rest_read_only(os.getcwd(), limits[2] >> 20)
            listener = listen(port) if port else None
            fences.append(NAMESPACES)
        become_first_process(ready)
    connects = listener is not None
    set_limits(*limits, MORE if connects else 1)
    refused = [*calls(REFUSED), *([] if fences else calls(CHANGES)), *([] if processes else calls(STARTS))]
    refused += [] if connects else calls(f"{CONNECTS}, {GROUPS}")
    for name, fence in (
        (CAPABILITIES, drop_capabilities),
        (LANDLOCK, lambda: restrict_files(readable, processes, NAMESPACES in fences)),
        (SECCOMP, lambda: filter_calls(refused, processes, connects)),
    ):
        with suppress(OSError):
            fence()
            fences.append(name)
    return fences, listener


def listen(port: int) -> Any:
    """Opens a port of this namespace's own loopback, whose other end is given to the process that started this one: the
    only network that there is, as a socket stays in the namespace that it was made in."""
    import fcntl  # of commands alone: they take time to import
    import socket

    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    return socket.create_server(("127.0.0.1", port), backlog=1024)


def die_with_parent() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def count_alone() -> None:
    """Makes the limit of processes hold for root, which is exempt: the real user becomes one that nobody has, while the
    effective one still owns root's files."""
    if os.getuid() == 0:
        os.setresuid((1 << 30) + os.getpid(), 0, 0)


def keep_user(ids: dict[str, int]) -> None:
    """Keeps this process's user and group in its new namespace; raises OSError if the system does not allow it."""
    with open("/proc/self/setgroups", "w") as file:
        file.write("deny")
    for name, number in ids.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(f"{number} {number} 1")


def make_rest_read_only(folder: str, size_mb: int) -> None:
    """Makes everything read-only but `folder`, which becomes an empty folder in memory; raises OSError if it cannot."""
    options = f"size={size_mb}m,nr_inodes={MOST_FILES},mode=700".encode()
    check_returned(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
    devices = [device.encode() for device in (*DEVICES, os.devnull) if os.path.exists(device)]
    for device in devices:
        check_returned(libc.mount(device, device, None, MS_BIND, None))
    set_attributes(b"/", MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV, 0)  # a device can be written to in a read-only folder
    for device in devices:
        set_attributes(device, 0, MOUNT_ATTR_NODEV)
    check_returned(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", MS_NOSUID | MS_NODEV, options))
    os.chdir(folder)


def set_attributes(path: bytes, added: int, removed: int) -> None:
    attributes = (ctypes.c_uint64 * 4)(added, removed, 0, 0)  # and no propagation, no user namespace
    size = ctypes.sizeof(attributes)
    check_returned(libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, AT_RECURSIVE, ctypes.byref(attributes), size))


def check_returned(returned: int) -> int:
    if returned < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return returned


def become_first_process(ready: int) -> None:
    """Continues as the first process of the new namespace; when it ends, the kernel kills all others in it."""
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


def set_limits(seconds: int, memory: int, size: int, more: int = 1) -> None:
    """Limits CPU seconds, bytes of memory and bytes of a file or the output, for good; threads and open files to `more`
    times those of a small program."""
    for kind, most in (
        (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, more * MOST_OPEN),
        (resource.RLIMIT_NPROC, most_processes(more * MOST_THREADS)),
    ):  # fmt: skip
        allowed = resource.getrlimit(kind)[1]  # whoever started this may be limited already
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(kind, (most, most))


def most_processes(count: int) -> int:
    """Returns how many threads this user may have: `count`, and those that run, as the kernel counts them all."""
    if os.getuid() != os.geteuid():  # `count_alone`
        return count
    with suppress(OSError), open("/proc/loadavg") as file:
        return int(file.read().split()[3].split("/")[1]) + count
    return 0


def drop_capabilities() -> None:
    """Gives up all rights beyond the user's own, for good; raises OSError if it cannot."""
    for capability in range(LAST_CAPABILITY + 1):  # those of today's kernels, and of later ones
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.prctl(PR_CAP_AMBIENT, AMBIENT_CLEAR_ALL, 0, 0, 0)
    check_returned(libc.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)))
    check_returned(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def restrict_files(more: tuple[str, ...], processes: bool, in_memory: bool) -> None:
    """Allows writing to this folder only, if it is `in_memory` or for a shell: on a disk nobody would count the files.
    Python, its packages, the system's libraries and `more` can be read. Raises OSError without Landlock."""
    version = check_returned(libc.syscall(CREATE_RULESET, None, 0, VERSION_FLAG))
    every = (1 << RIGHTS[min(version, len(RIGHTS)) - 1]) - 1
    scopes = SCOPES if version >= SCOPED_FROM else 0
    rules = check_returned(libc.syscall(CREATE_RULESET, struct.pack("QQQ", every, 0, scopes), 24, 0))
    readable = (*READABLE, sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), *more)
    allowed = dict.fromkeys(readable, READ_FILE | READ_DIR | (EXECUTE if processes else 0))
    folder_rights = every if in_memory or processes else READ_FILE | READ_DIR
    for path, rights in (allowed | {os.devnull: READ_FILE | WRITE_FILE, ".": folder_rights}).items():
        with suppress(FileNotFoundError, PermissionError):
            folder = os.open(path, os.O_PATH)
            rights = rights if os.path.isdir(path) else rights & ~READ_DIR
            check_returned(libc.syscall(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", rights, folder), 0))
            os.close(folder)
    check_returned(libc.syscall(RESTRICT_SELF, rules, 0))
    os.close(rules)


def calls(table: str) -> list[int]:
    """Returns the numbers of the calls in a table, on this machine; none on one of another kind."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        return []
    numbers = [entry.split()[1:][ARCHITECTURES[machine][1]] for entry in table.split(",")]
    return [int(number) for number in numbers if number != "-"]


def filter_calls(refused: list[int], processes: bool, connects: bool) -> None:
    """Makes the kernel refuse the calls that lead out of the sandbox, to this process and all that it starts; raises
    OSError if it cannot."""
    if os.uname().machine not in ARCHITECTURES or sys.maxsize < 1 << 32:
        raise OSError("no table of its calls")
    rules = make_filter(refused, processes, connects)
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(buffer))
    check_returned(libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0))


def make_filter(refused: list[int], processes: bool, connects: bool) -> list[Instruction]:
    """Returns a program of the kernel's filter. It allows some calls by an argument: threads, but no processes or only
    those in the same namespaces; signals to this process only; pairs of connected sockets. A command that `connects`
    has a network and processes of its own, and may use them freely."""
    numbers = dict(zip(
        ("clone", "socket", "kill", "tgkill", "prlimit64", "socketpair", "fcntl", "ioctl", "prctl", "openat", "open"),
        calls("_ 56 220, _ 41 198, _ 62 129, _ 234 131, _ 302 261, _ 53 199, _ 72 25, _ 16 29, _ 157 167, _ 257 56, "
              "_ 2 -"),
        strict=False,
    ))  # fmt: skip
    pid, truncates = os.getpid(), os.O_TRUNC | os.O_ACCMODE  # not even what is opened to be read
    rest = [(RETURN, 0, 0, ALLOW)]
    refuse = [(RETURN, 0, 0, NOT_PERMITTED)]
    bodies = {
        "clone": argument_is(0, *((CLONE_NEW, [0]) if processes else (CLONE_THREAD, [CLONE_THREAD])), rest) + refuse,
        "socket": (argument_is(0, ~0, [AF_INET], rest) if connects else []) + refuse,
        "kill": rest if connects else argument_is(0, ~0, [pid], rest) + refuse,
        "tgkill": rest if connects else argument_is(0, ~0, [pid], rest) + refuse,
        "prlimit64": argument_is(0, ~0, [0, pid], rest) + refuse,
        "socketpair": argument_is(0, ~0, [AF_UNIX], argument_is(1, SOCK_TYPE, [SOCK_STREAM], rest)) + refuse,
        "fcntl": argument_is(1, ~0, SET_OWNERS, refuse) + rest,
        "ioctl": argument_is(1, ~0, TERMINALS, refuse) + rest,
        "prctl": argument_is(0, ~0, [PR_SET_PDEATHSIG], refuse) + rest,
        "openat": argument_is(2, truncates, [os.O_TRUNC], refuse) + rest,
        "open": argument_is(1, truncates, [os.O_TRUNC], refuse) + rest,
    }
    architecture = ARCHITECTURES[os.uname().machine][0]
    rules = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for name, number in numbers.items():
        rules += [(EQUAL, 0, len(bodies[name]), number), *bodies[name]]
    for number in refused:
        rules += [(EQUAL, 0, 1, number), *refuse]
    for number in NEW_ALLOWED:
        rules += [(EQUAL, 0, 1, number), *rest]
    return [*rules, (AT_LEAST, 0, 1, NEW_FROM), (RETURN, 0, 0, NO_SUCH_CALL), *rest]


def argument_is(index: int, mask: int, values: Any, then: list[Instruction]) -> list[Instruction]:
    """Returns instructions that run `then` if the argument at `index`, masked, is one of `values`."""
    jumps = [(EQUAL, len(values) - number, 0, value) for number, value in enumerate(values)]
    load = [(LOAD, 0, 0, 16 + 8 * index), (AND, 0, 0, mask & 0xFFFFFFFF)]
    return [*load, *jumps, (0x05, 0, 0, len(then)), *then]


def make_hook(folder: str) -> Callable[[str, tuple], None]:
    """Returns a hook, which stays for good, that refuses processes, sockets, and changes of files outside `folder`."""

    def refuse(event: str, arguments: tuple) -> None:
        refused = event.startswith(REFUSED_EVENTS) and not (event == "socket.__new__" and arguments[1] == AF_UNIX)
        if event.startswith(CHANGING_EVENTS) or (event == "open" and arguments[2] & WRITING):
            named = arguments[:1] if event == "open" else arguments[:2]
            paths = [os.path.realpath(path) for path in named if isinstance(path, str | bytes | os.PathLike)]
            outside = [path for path in map(os.fsdecode, paths) if os.path.commonpath((folder, path)) != folder]
            refused = any(path != os.devnull for path in outside)
        if refused:
            raise PermissionError(f"{event} is not allowed in the sandbox")

    return refuse


if __name__ == "__main__":
    main()
