"""A sandbox for Python that a policy writes: a process of its own, with limits, without a network.

It is a fence against mistakes and greed, not against an attacker: the code runs as this user and reads what this user
can read. It cannot start processes, nor change files outside its folder, which goes with it. It has no network: where
the system allows it (unprivileged user namespaces), by a namespace without one, and in any case by a hook that refuses
sockets.
"""

import asyncio
import os
import signal
import sys
import tempfile
from contextlib import suppress
from typing import Any

from data.tools import BaseTool, ToolResponse, ToolSchema

# Runs in the child, before the policy's code: limits that it cannot raise again, then a hook that it cannot remove.
PRELUDE = """
import ctypes, os, resource, sys, traceback
seconds, memory, size = map(int, sys.argv[1:4])
for kind, limit in (
    (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, memory), (resource.RLIMIT_FSIZE, size),
    (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 64), (resource.RLIMIT_NPROC, 0),
):
    resource.setrlimit(kind, (limit, limit))
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)
source = sys.stdin.buffer.read().decode("utf-8", "replace")
sys.argv = ["sandbox"]
REFUSED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.spawn", "os.posix_spawn", "os.system", "os.kill",
           "pty.", "ctypes.")
CHANGES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.link", "os.symlink",
           "os.truncate", "os.utime", "shutil.")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
HERE = os.path.realpath(".")
def refuse(event, arguments):
    refused = event.startswith(REFUSED)
    if event.startswith(CHANGES) or (event == "open" and arguments[2] & WRITING):
        named = arguments[:1] if event == "open" else arguments[:2]
        paths = [os.path.realpath(path) for path in named if isinstance(path, (str, bytes, os.PathLike))]
        refused = any(os.path.commonpath((HERE, os.fsdecode(path))) != HERE for path in paths)
    if refused:
        raise PermissionError(f"{event} is not allowed in the sandbox")
try:
    code = compile(source, "<code>", "exec")
    sys.addaudithook(refuse)
    exec(code, {"__name__": "__main__"})
except Exception as error:
    traceback.print_exception(error.with_traceback(error.__traceback__.tb_next))
    sys.exit(1)
"""
OUTPUT_SLACK = 4  # times what is shown: so much is read before a process that writes on and on is ended


async def run_python(
    code: str, seconds: float = 5.0, memory_mb: int = 512, output_chars: int = 4000
) -> tuple[str, int | None]:
    """Runs `code` in a process of its own: (what it wrote, its exit status).

    The status is None if it was ended for taking more than `seconds`, or for writing more than is read. Standard output
    and errors come as one text, with the end of a traceback. When this returns, the process and all it started is gone.
    """
    with tempfile.TemporaryDirectory(prefix="sandbox-") as folder:
        limits = [str(int(seconds) + 1), str(memory_mb << 20), str(1 << 20)]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-B", "-c", PRELUDE, *limits),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=folder,
            env={"PATH": os.defpath, "HOME": folder, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a group of its own, to be killed as one
        )
        output = bytearray()
        try:
            async with asyncio.timeout(seconds):
                ended = await communicate(process, code, output, output_chars * OUTPUT_SLACK)
        except TimeoutError:
            ended = False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = await process.wait()
        return output.decode("utf-8", "replace"), status if ended else None


async def communicate(process: asyncio.subprocess.Process, code: str, output: bytearray, most: int) -> bool:
    """Hands the code over and reads into `output`; False: it wrote more than `most` bytes."""
    with suppress(BrokenPipeError, ConnectionResetError):  # it ended before it had read everything
        process.stdin.write(code.encode("utf-8", "replace"))
        await process.stdin.drain()
        process.stdin.close()
    while piece := await process.stdout.read(1 << 16):
        output += piece
        if len(output) > most:
            return False
    await process.wait()
    return True


class PythonSandbox(BaseTool):
    """Runs `code`, and shows what it prints.

    `config`: `seconds` (5) of a call, on the clock, `memory_mb` (512), `output_chars` (4000) that are shown at most,
    `name` (python).
    """

    def __init__(self, config: dict[str, Any], tool_schema: dict[str, Any] | None = None) -> None:
        super().__init__(config, tool_schema)
        self.limits = self.settings(name="python", seconds=5.0, memory_mb=512, output_chars=4000)

    def get_openai_tool_schema(self) -> ToolSchema:
        code = {"type": "string", "description": "a Python program; print what you want to see"}
        return ToolSchema(
            type="function",
            function={
                "name": self.config.get("name", "python"),
                "description": "Runs a Python program and shows what it prints.",
                "parameters": {"type": "object", "properties": {"code": code}, "required": ["code"]},
            },
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        seconds, most = self.limits["seconds"], self.limits["output_chars"]
        text, status = await run_python(parameters["code"], seconds, self.limits["memory_mb"], most)
        shown = text if len(text) <= most else text[: most // 2] + "\n…\n" + text[-most // 2 :]
        if status is None:
            shown += f"\nEnded: it took more than {seconds:g} seconds, or wrote too much."
        elif status < 0:
            shown += f"\nEnded by signal {signal.Signals(-status).name}."
        return ToolResponse(text=shown.strip() or "(no output)"), 0.0, {"status": status}
