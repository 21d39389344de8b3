"""Programs by test cases on a sandbox-fusion server, over HTTP."""

import asyncio
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from configs.errors import ConfigError
from extras.rules.prime_code import (
    TestCases,
    calling,
    first_block,
    parse_test_cases,
    python_block,
    without_secret,
)

FIRST = 10  # cases that count with `continuous`
SERVER_ERROR, RUN_ERROR, TOO_SLOW, NO_PROGRAM = -1, -2, -3, -4
TRY_SECONDS = 10  # of the program that is run at the start
REFUSED_PROGRAM = (400, 413, 422)  # statuses that are about the request, and not about the server
GATEWAY_TIMEOUT, RETRIES = 504, 2
SLACK_SECONDS = 10  # of a request beyond the time of compiling and running
AT_ONCE = 16  # requests of one program


def compute_score(
    url: str,
    semaphore: AbstractContextManager | None,
    memory_limit_mb: int | None,
    completion: str,
    test_cases: str | dict[str, Any],
    *,
    continuous: bool = False,
    timeout: int = 10,
) -> tuple[float, list[dict[str, Any]]]:
    """Returns the share of the test cases that the program in `completion` passes, and the result of each.

    The program is the last python block, else the first block; without one, or without test cases, the score is 0.0.
    `semaphore` limits the requests under way, of `timeout` seconds for compiling and for running; `continuous` runs and
    counts the first ten cases alone.

    Raises:
        ServerError, RequestRefused: a case has no answer, so that nothing is known of the program.
    """
    block = python_block(completion)
    code = first_block(completion) if block is None else block
    try:
        cases = parse_test_cases(test_cases)
        program = calling(code or "", cases.function, always_json=False) if cases.function else code
    except ValueError as error:
        return 0.0, [{"error": f"{error}"}]
    if code is None:
        return 0.0, [{"error": "the response has no fenced block of code"}]
    places = range(len(cases.inputs))[: FIRST if continuous else None]
    if not places:
        return 0.0, [{"error": "there are no test cases"}]
    server = Server(url, semaphore or nullcontext(), memory_limit_mb or 1024, timeout)
    with ThreadPoolExecutor(min(len(places), AT_ONCE)) as pool:
        results = list(pool.map(lambda place: server.run_case(program, cases, place), places))
    mark_no_program(results)
    return sum(result["result"] is True for result in results) / len(results), results


def try_server(url: str) -> None:
    """Runs a program on the server at `url`.

    Raises:
        ConfigError: it does not; names key and remedy.
    """
    try:
        said = Server(url, nullcontext(), 128, TRY_SECONDS).post("print(6 * 7)", "")
    except (OSError, ValueError) as error:
        said, problem = {}, f"{error}"
    else:
        problem = f"it answers {said!r:.300} to a program that prints 42."
    if read_result(said, "42") is not True:
        raise ConfigError(
            f"reward.sandbox_fusion.url={url} runs no programs: {problem} Start the server, write the url with its "
            "/run_code, or leave it null: then programs run in the sandbox of this machine."
        )


def mark_no_program(results: list[dict[str, Any]]) -> None:
    """Marks the cases after one for which the program does not compile: it is no program for them either."""
    broken = False
    for result in results:
        broken = broken or result["result"] == NO_PROGRAM
        if broken:
            result["result"] = NO_PROGRAM


class Server:
    """The requests for one program."""

    def __init__(self, url: str, semaphore: AbstractContextManager, memory_limit_mb: int, timeout: int) -> None:
        self.url, self.semaphore, self.memory_limit_mb, self.timeout = url, semaphore, memory_limit_mb, timeout
        self.broken = threading.Event()  # the server says that the program does not compile

    def run_case(self, program: str, cases: TestCases, place: int) -> dict[str, Any]:
        """{case, result: True, False, -1 (the server), -2 (an error), -3 (too slow) or -4 (no program), said}."""
        if self.broken.is_set():
            return {"case": place, "result": NO_PROGRAM, "said": None}
        secret = secrets.token_hex(16)
        checks = cases.checks_of(place, secret)
        try:
            with self.semaphore:
                said = self.post("\n\n".join((program, *checks)), cases.stdin_of(place))
        except ValueError as error:  # RequestRefused
            if error.status not in REFUSED_PROGRAM:
                raise
            return {"case": place, "result": SERVER_ERROR, "said": f"{error}"}
        result = read_result(said, cases.outputs[place], secret if checks else None)
        if result == NO_PROGRAM:
            self.broken.set()
        return {"case": place, "result": result, "said": said}

    def post(self, code: str, stdin: str) -> dict[str, Any]:
        """Returns the server's answer. A gateway that gave up (504) is asked again, twice.

        Raises:
            ServerError: it cannot be reached, or the gateway gives up each time.
            RequestRefused: it answers with another error, or not in JSON.
        """
        from data.http import ask_once  # and with it aiohttp, which no other rule needs

        body = {
            **{"compile_timeout": self.timeout, "run_timeout": self.timeout, "code": code, "stdin": stdin},
            **{"memory_limit_MB": self.memory_limit_mb, "language": "python", "files": {}, "fetch_files": []},
        }
        timeout = 2 * self.timeout + SLACK_SECONDS
        asked = ask_once("POST", self.url, body, timeout=timeout, retries=RETRIES, may_pass=GATEWAY_TIMEOUT.__eq__)
        return asyncio.run(asked)


def read_result(said: dict[str, Any], expected: str | None, secret: str | None = None) -> bool | int:
    """Reads one case's result off the server's answer; with a `secret`, it has to come after all that is asserted."""
    compiled, ran = said.get("compile_result") or {}, said.get("run_result") or {}
    match said.get("status"):
        case "Success" if ran.get("status") == "Finished":
            output = ran.get("stdout") or ""
            output = output if secret is None else without_secret(output, secret)
            return output is not None and (expected is None or output.rstrip("\n") == str(expected).rstrip("\n"))
        case "Failed" if compiled.get("status") in ("Error", "TimeLimitExceeded") or compiled.get("return_code"):
            return NO_PROGRAM
        case "Failed" if ran.get("status") == "TimeLimitExceeded":
            return TOO_SLOW
        case "Failed" if ran.get("status") == "Error" or ran.get("return_code"):
            return RUN_ERROR
    return SERVER_ERROR
