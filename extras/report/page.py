"""Puts runs into one page: data, charts, samples, styles and scripts, which needs nothing beside it and no network."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import vl_convert

from configs.errors import printable
from extras.report.charts import chart_specs
from extras.report.runs import Curve, RunRecord, differences, settings_compared
from extras.report.samples import pack_samples
from extras.report.summary import beside, facts, findings, group_means, headline, sentences, stages

HERE = Path(__file__).parent
LARGEST = 64_000_000  # bytes of a page: samples beyond it are left out
MOST_EVENTS = 2_000  # of a run: the latest
OF_EVENT = ("time", "level", "text")
MOST_POINTS = 1_000  # of a curve: a page of charts takes two seconds then
MOST_VARIED = 8  # settings in the first table of several runs
DIGITS = 6  # of a number of the curves


def build_page(runs: Sequence[RunRecord]) -> str:
    """Returns the HTML of a report."""
    data = page_data(runs)
    return fill_page(data["title"], embed(data))


@cache
def page_parts() -> dict[str, str]:
    """Returns the parts that all pages share: styles, scripts, and the policy that allows only these scripts."""
    library = vl_convert.javascript_bundle().replace("</script", "<\\/script").replace("<!--", "<\\!--")
    script = "".join((HERE / name).read_text(encoding="utf-8") for name in ("charts.js", "samples.js", "page.js"))
    style = (HERE / "page.css").read_text(encoding="utf-8")
    return {"policy": content_policy([library, script]), "style": style, "library": library, "script": script}


def fill_page(title: str, data: str, policy: str = "") -> str:
    """Returns the HTML of a page with this title and these `data` in JSON; `policy` is added to its security policy."""
    common = page_parts()
    parts = {**common, "policy": common["policy"] + policy, "title": html.escape(printable(title)), "data": data}
    template = (HERE / "page.html").read_text(encoding="utf-8")
    # In one pass: what is put in may hold a placeholder's text.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def embed(data: Any) -> str:
    """Writes `data` as JSON of ASCII that closes no script element."""
    return json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def content_policy(scripts: Sequence[str]) -> str:
    """Returns the policy that allows only these scripts; Vega makes functions of text, which needs 'unsafe-eval'."""
    hashes = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    kinds = "style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; script-src {allowed} 'unsafe-eval'; {kinds}; "


def page_data(runs: Sequence[RunRecord], room: int | None = None) -> dict[str, Any]:
    """Returns the page's data, in at most about `room` bytes of JSON: by default what LARGEST leaves for them."""
    room = room or LARGEST - sum(map(len, page_parts().values())) - 10_000
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    data = {
        "title": ", ".join(dict.fromkeys(run.group for run in runs)),
        "metrics": {
            name: [{"run": number} | thin(run.metrics[name]) for number, run in enumerate(runs) if name in run.metrics]
            for name in names
        },
        "charts": chart_specs(names),
        "differences": differences(runs) if len(runs) > 1 else [],
        "varied": settings_compared(runs)[:MOST_VARIED] if len(runs) > 1 else [],
        "means": group_means(runs),
    }
    for run in runs:
        if (apart := -(-len(run.steps) // MOST_POINTS)) > 1:
            run.missing.append(f"Of its {len(run.steps)} steps, one in {apart} is in the curves.")
    data["runs"] = [run_data(run) for run in runs]
    return data | {"samples": pack_samples(runs, room - len(embed(data)))}  # which adds to `missing` of a run


def run_data(run: RunRecord) -> dict[str, Any]:
    """Returns the page's part of one run."""
    return {
        "name": run.name,
        "group": run.group,
        "folder": str(run.folder),
        "state": run.state,
        "headline": headline(run),
        "sentences": sentences(run),
        "findings": [asdict(finding) for finding in findings(run)],
        "facts": facts(run),
        "missing": run.missing,
        "events": [*map(event_data, run.events[-MOST_EVENTS:])],
        "stages": stages(run),
        "beside": beside(run),
        "config": run.config_text,
    }


def event_data(event: dict[str, Any]) -> dict[str, Any]:
    """Returns the page's part of an event: step as a number, or None, and texts."""
    step = event.get("step")
    return {"step": step if isinstance(step, int) else None} | {key: str(event.get(key) or "") for key in OF_EVENT}


def thin(curve: Curve) -> dict[str, list[Any]]:
    """Returns at most MOST_POINTS points of a curve, evenly spaced and with the last; values have DIGITS digits."""
    apart = -(-len(curve.steps) // MOST_POINTS)
    points = slice((len(curve.steps) - 1) % apart, None, apart)
    values = [None if value is None else float(f"{value:.{DIGITS}g}") for value in curve.values[points]]
    return {"steps": curve.steps[points], "values": values}
