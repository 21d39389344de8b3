"""Programs by test cases on a sandbox-fusion server, over HTTP."""

import asyncio
import secrets
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from configs.errors import ConfigError
from extras.rules.prime_code import TestCases, first_block, parse_test_cases, program_of, python_block, without_secret

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
    `continuous` runs and counts the first ten cases alone.

    Raises:
        ServerError, RequestRefused: a case has no answer, so that nothing is known of the program.
    """
    block = python_block(completion)
    code = first_block(completion) if block is None else block
    try:
        cases = parse_test_cases(test_cases)
        program = program_of(code or "", cases.function, always_json=False)
    except ValueError as error:
        return 0.0, [{"error": f"{error}"}]
    if code is None:
        return 0.0, [{"error": "the response has no fenced block of code"}]
    places = range(len(cases.inputs))[: FIRST if continuous else None]
    if not places:
        return 0.0, [{"error": "there are no test cases"}]
    server = Server(url, semaphore or nullcontext(), memory_limit_mb or 1024, timeout)
    with ThreadPoolExecutor(min(len(places), AT_ONCE)) as pool:
        results = list(pool.map(lambda index: server.run_case(program, cases, index), places))
    return sum(result["result"] is True for result in results) / len(results), results


def try_server(url: str) -> None:
    """Runs a program on the server at `url`; raises ConfigError if it does not."""
    try:
        answer = Server(url, nullcontext(), 128, TRY_SECONDS).post("print(6 * 7)", "")
        problem = f"it answers {answer!r:.300} to a program that prints 42."
    except (OSError, ValueError) as error:
        answer, problem = {}, f"{error}"
    if read_result(answer, "42") is not True:
        raise ConfigError(
            f"reward.sandbox_fusion.url={url} runs no programs: {problem} Start the server, write the url with "
            "/run_code, or leave it null for the sandbox of this machine."
        )


@dataclass(frozen=True)
class Server:
    """A server that runs programs; `semaphore` limits the requests, of `timeout` seconds to compile and to run."""

    url: str
    semaphore: AbstractContextManager
    memory_limit_mb: int
    timeout: int

    def run_case(self, program: str, cases: TestCases, index: int) -> dict[str, Any]:
        """Returns {case, answer, result: True, False, -1 (server), -2 (an error), -3 (too slow), -4 (no program)}."""
        secret = secrets.token_hex(16)
        checks = cases.checks_of(index, secret)
        apart = f"exec(compile({program!r}, '<code>', 'exec'))"  # its lines keep their numbers, and __future__ is first
        try:
            with self.semaphore:
                answer = self.post("\n\n".join((cases.prelude, apart, *checks)), cases.stdin_of(index))
        except ValueError as error:  # RequestRefused
            if error.status not in REFUSED_PROGRAM:
                raise
            return {"case": index, "result": SERVER_ERROR, "answer": f"{error}"}
        result = read_result(answer, cases.outputs[index], secret if checks else None)
        return {"case": index, "result": result, "answer": answer}

    def post(self, code: str, stdin: str) -> dict[str, Any]:
        """Returns the server's answer. A gateway that gave up (504) is asked again, twice.

        Raises:
            ServerError: it cannot be reached, or the gateway gives up each time.
            RequestRefused: it answers with another error, or not in JSON.
        """
        from extras.http.http import ask_once  # and with it aiohttp, which no other rule needs

        body = {
            **{"compile_timeout": self.timeout, "run_timeout": self.timeout, "code": code, "stdin": stdin},
            **{"memory_limit_MB": self.memory_limit_mb, "language": "python", "files": {}, "fetch_files": []},
        }
        timeout = 2 * self.timeout + SLACK_SECONDS
        request = ask_once("POST", self.url, body, timeout=timeout, retries=RETRIES, may_pass=GATEWAY_TIMEOUT.__eq__)
        return asyncio.run(request)


def read_result(answer: dict[str, Any], expected: str | None, secret: str | None = None) -> bool | int:
    """Reads one case's result off the server's answer; with a `secret`, it has to come after all that is asserted."""
    compiled, ran = answer.get("compile_result") or {}, answer.get("run_result") or {}
    match answer.get("status"):
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
