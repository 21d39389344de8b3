"""The page's scripts as Node runs them, without a browser: the drawings of charts."""

import json
import shutil
import subprocess
from typing import Any

import pytest

from extras.report import page

BROWSER = """
const matchMedia = () => ({ matches: false, addEventListener() {} }), document = {};
class IntersectionObserver {} class MutationObserver { observe() {} }
"""


def run(expression: str, *given: Any) -> Any:
    """Returns the value of an expression of charts.js, in which `given` is a list."""
    if not (node := shutil.which("node")):
        pytest.skip("needs Node")
    script = (page.HERE / "charts.js").read_text()
    tail = f"const given = {json.dumps(given)}; console.log(JSON.stringify({expression}))"
    ended = subprocess.run([node, "-"], input=BROWSER + script + tail, capture_output=True, text=True, timeout=60)
    assert not ended.stderr
    return json.loads(ended.stdout)


def drawing_of(names: list[str], width: int = 1) -> dict[str, Any]:
    return run("charts.stages(given[0])", {"names": names, "steps": [1], "seconds": [[1]] * len(names), "width": width})


def test_a_stage_has_one_colour_in_all_reports_whatever_else_a_run_does():
    def colours(*names: str) -> dict[str, str]:
        return {one["name"]: one["colour"] for one in drawing_of([*names])["series"]}

    few, many = colours("reward", "mine", "other"), colours("gen", "mine", "reward", "update_actor", "testing", "other")
    assert few.items() <= many.items()
    assert len({*many.values()} | {*colours("ref", "values", "old_log_prob", "update_critic").values()}) >= 9


def test_bars_that_are_means_are_called_so():
    assert drawing_of(["gen"])["title"] == "Seconds of each step"
    assert drawing_of(["gen"], 3)["title"] == "Mean seconds of a step: a bar is the mean of 3 steps"
    assert drawing_of(["gen"], 3)["rows"][0]["width"] == 3
