"""Bars of what benchmarks/vs_trl.py found: python -m benchmarks.plot IMAGE JSON [JSON …]"""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.figures import ARMS
from extras.report.charts import write_png

PHASES = ("rollout", "update", "other")
NAMES = {"trl": "TRL", "ours": "here"}


def main() -> None:
    image, *files = map(Path, sys.argv[1:])
    plot(image, [json.loads(file.read_text()) for file in files])


def plot(image: Path, results: list[dict[str, Any]]) -> None:
    """A panel for each result: seconds of a step by phase, and a line at what the arithmetic alone takes."""
    rows = [
        {"panel": panel(of), "arm": NAMES[arm], "phase": phase, "seconds": of["medians"][arm][phase]}
        | {"floor": of["floor_seconds"]["step"], "place": PHASES.index(phase)}
        for of in results
        for arm in ARMS
        for phase in PHASES
    ]
    bars = {
        "x": {"field": "arm", "sort": None, "title": None, "axis": {"labelAngle": 0}},
        "y": {"field": "seconds", "type": "quantitative", "stack": True, "title": "seconds of a step"},
        "color": {"field": "phase", "type": "nominal", "sort": PHASES, "title": None},
        "order": {"field": "place", "type": "quantitative"},
    }
    floor = {"y": {"aggregate": "max", "field": "floor", "type": "quantitative"}}
    dashed = {"strokeDash": {"datum": "floor", "title": None, "scale": {"range": [[5, 4]]}}}
    layers = [{"mark": "bar", "encoding": bars}, {"mark": "rule", "encoding": floor | dashed}]
    spec = {
        "facet": {"column": {"field": "panel", "sort": [panel(of) for of in results], "title": None}},
        "spec": {"width": 200, "height": 220, "layer": layers},
        "resolve": {"scale": {"y": "independent"}},
    }
    write_png(spec, rows, image)


def panel(figures: dict[str, Any]) -> str:
    """The title of a result's panel: model, shape, and how many times as fast."""
    of = figures["arguments"]
    size, shape = of["size"], f"{of['prompts']} × {of['samples']}, {of['prompt_tokens']} + {of['response_tokens']}"
    return f"{size}, {shape}: {figures['ratio_step']:.1f}×"


if __name__ == "__main__":
    main()
