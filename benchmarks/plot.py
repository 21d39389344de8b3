"""Bars of what benchmarks/vs_trl.py found: python -m benchmarks.plot IMAGE JSON [JSON …]"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.figures import ARMS

COLOURS = {"rollout": "tab:blue", "update": "tab:orange", "other": "tab:grey"}
NAMES = {"trl": "TRL", "ours": "here"}


def main() -> None:
    image, *files = map(Path, sys.argv[1:])
    plot(image, [json.loads(file.read_text()) for file in files])


def plot(image: Path, results: list[dict[str, Any]]) -> None:
    """A panel for each result: seconds of a step by phase, and a line at what the arithmetic alone takes."""
    figure, panels = plt.subplots(1, len(results), figsize=(3.2 * len(results), 3.2), squeeze=False)
    for panel, figures in zip(panels[0], results, strict=True):
        base = dict.fromkeys(ARMS, 0.0)
        for phase, colour in COLOURS.items():
            heights = [figures["medians"][arm][phase] for arm in ARMS]
            panel.bar([NAMES[arm] for arm in ARMS], heights, bottom=list(base.values()), color=colour, label=phase)
            base = {arm: base[arm] + height for arm, height in zip(ARMS, heights, strict=True)}
        panel.axhline(figures["floor_seconds"]["step"], color="black", linestyle="--", label="floor")
        of = figures["arguments"]
        size, shape = of["size"], f"{of['prompts']} × {of['samples']}, {of['prompt_tokens']} + {of['response_tokens']}"
        panel.set_title(f"{size}, {shape}: {figures['ratio_step']:.1f}×", fontsize=9)
        panel.set_ylim(bottom=0)
    panels[0][0].set_ylabel("seconds of a step")
    panels[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(image, dpi=130)


if __name__ == "__main__":
    main()
