"""The sandbox as a tool that the policy calls."""

import asyncio

import pytest

from extras.sandbox.tool import PythonSandbox


def test_the_sandbox_shows_what_a_program_prints_and_how_it_ended():
    tool = PythonSandbox({"seconds": 60, "output_chars": 40})

    def shown(code: str) -> str:
        return asyncio.run(tool.execute("", {"code": code}))[0].text

    assert shown("print(6 * 7)") == "42" and shown("x = 1") == "(no output)"
    assert shown("1/0").endswith("…\nr: division by zero")
    assert shown("print('a' * 99)") == "a" * 20 + "\n…\n" + "a" * 19
    assert shown("import os; os.abort()").startswith("Ended by signal SIG")
    tool.limits["seconds"] = 0.5
    assert shown("while True: pass") == "Ended: it took more than 0.5 seconds."


def test_settings_that_there_are_not_are_refused():
    with pytest.raises(ValueError, match=r"config has the keys \['second'\]; it may have name"):
        PythonSandbox({"second": 3})
