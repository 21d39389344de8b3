"""The page's scripts as Node runs them, without a browser: the drawings of charts, the markup of chat templates."""

import json
import shutil
import subprocess
from typing import Any

import pytest

from extras.report import page
from extras.report.charts import specs

BROWSER = """
let embedded = null;
const matchMedia = () => ({ matches: false, addEventListener() {} }), document = {};
const vegaEmbed = async (place, spec) => (embedded = spec);
class MutationObserver { observe() {} }
class IntersectionObserver {
  constructor(call) { this.call = call; }
  observe(target) { this.call([{ isIntersecting: true, target }]); }
  unobserve() {}
}
"""


def run(expression: str, *given: Any) -> Any:
    """Returns the value of an expression of charts.js and samples.js, in which `given` is a list."""
    if not (node := shutil.which("node")):
        pytest.skip("needs Node")
    script = "".join((page.HERE / name).read_text() for name in ("charts.js", "samples.js"))
    tail = f"const given = {json.dumps(given)}; console.log(JSON.stringify({expression}))"
    program = BROWSER + script + tail
    ended = subprocess.run([node, "-"], input=program, capture_output=True, text=True, timeout=60)
    assert not ended.stderr
    return json.loads(ended.stdout)


def test_the_points_of_a_chart_are_csv():
    rows = [{"run": 'a "b", c', "series": "kl", "step": 1, "seconds": None, "value": 0.5}]
    assert run("charts.csv(given[0])", {"rows": rows}) == 'run,series,step,seconds,value\n"a ""b"", c","kl",1,,0.5\n'


def test_a_point_is_at_the_time_of_its_step_in_the_record_of_its_run():
    metrics = {
        "training/seconds": [{"run": 1, "steps": [1, 3, 5], "values": [100, 500, 600]}],
        "kl": [{"run": number, "steps": [0, 1, 2, 5, 6], "values": [0.5] * 5} for number in (0, 1)],
    }
    runs = [{"name": name, "group": "g"} for name in "ab"]
    drawing = run("charts.curves(given[0], ['kl'])", {"metrics": metrics, "runs": runs})
    assert [row["seconds"] for row in drawing["rows"]] == [None] * 5 + [None, 100, 300, 600, None]
    assert drawing["unit"] == {"name": "minutes", "seconds": 60}
    draw = "charts.draw({ style: {} }, given[0], given[1])"
    spec = run(f"(charts.turnToTime(true), {draw}, embedded)", specs()["metric"], drawing)
    assert spec["encoding"]["x"]["field"] == "time" and spec["encoding"]["x"]["title"] == "minutes of training"


@pytest.mark.parametrize(
    "prompt",
    [
        "<|system|>Play.<|end|><|user|>SFF\nFHG<|end|><|assistant|>",
        "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nSFF\nFHG<|im_end|>\n<|im_start|>assistant\n",
        "<|start_header_id|>system<|end_header_id|>\n\nPlay.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "SFF\nFHG<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ],
    ids=["tiny", "ChatML", "Llama 3"],
)
def test_a_prompt_is_shown_by_roles_and_its_first_line_is_not_shifted(prompt):
    parts = run("chat.split(given[0])", prompt)
    texts = [part.get("text") or part["chip"] for part in parts]
    assert texts == ["system", "Play.", "user", "SFF\nFHG", "assistant"]
    assert "".join(part.get("text") or part["raw"] for part in parts) == prompt  # of which nothing is lost


def test_what_is_no_markup_stays_text():
    for text in ("1+2=", "if a<b and b>c: x<|y", "a | b", "<think>so</think>"):
        assert run("chat.split(given[0])", text) == [{"text": text}]
    special = run("given.map(chat.isSpecial)", "<|im_end|>", "</s>", "a", "<|end|>a", "<think>")
    assert special == [True, True, False, False, False]
