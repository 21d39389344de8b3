"""Turns the steps of both arms of benchmarks/vs_trl.py into ratios, percentages of the floor and a table."""

import random
from statistics import median
from typing import Any

PHASES = ("step", "rollout", "update", "other")
ARMS = ("trl", "ours")


def summary(blocks: list[dict[str, Any]], floor: dict[str, float]) -> dict[str, Any]:
    """Medians of both arms, and what follows from them; a phase without a floor (a replay's rollout) has no ratio."""
    steps = {name: [step for block in blocks if block["arm"] == name for step in block["steps"]] for name in ARMS}
    medians = {name: {key: median(step[key] for step in steps[name]) for key in steps[name][0]} for name in ARMS}
    ratios = {
        f"ratio_{phase}": medians["trl"][phase] / medians["ours"][phase] if phase in floor else None
        for phase in ("step", "update", "rollout")
    }
    intervals = {
        f"{name}_interval": interval(*([step[name.removeprefix("ratio_")] for step in steps[arm]] for arm in ARMS))
        for name, ratio in ratios.items()
        if ratio is not None
    }
    percent = {name: {phase: 100 * seconds / medians[name][phase] for phase, seconds in floor.items()} for name in ARMS}
    return {
        **ratios,
        **intervals,
        "ours_percent_of_floor": percent["ours"]["update"],
        "percent_of_floor": percent,
        "floor_seconds": floor,
        "medians": medians,
    }


def interval(trl: list[float], ours: list[float], draws: int = 2000, seed: int = 0) -> list[float]:
    """95 % of the ratios of medians of steps drawn anew (bootstrap)."""
    rng = random.Random(seed)
    ratios = sorted(median(rng.choices(trl, k=len(trl))) / median(rng.choices(ours, k=len(ours))) for _ in range(draws))
    return [ratios[draws // 40], ratios[-draws // 40]]


def table(figures: dict[str, Any]) -> str:
    """Formats the main figures as a table."""
    medians, percent = figures["medians"], figures["percent_of_floor"]
    lines = [f"{'median of a step':<24}{'TRL':>10}{'ours':>10}{'ratio':>8}{'floor':>10}{'TRL at':>9}{'ours at':>9}"]
    for phase in PHASES:
        row = f"{phase + ', s':<24}{medians['trl'][phase]:>10.3f}{medians['ours'][phase]:>10.3f}"
        if phase in figures["floor_seconds"]:
            row += f"{figures[f'ratio_{phase}']:>8.2f}{figures['floor_seconds'][phase]:>10.3f}"
            row += f"{percent['trl'][phase]:>8.0f}%{percent['ours'][phase]:>8.0f}%"
        lines.append(row)
    for name, key in (
        ("tokens of the rollout", "rollout_tokens"),
        ("tokens of the update", "update_tokens"),
        ("CPU seconds", "cpu_seconds"),
        ("peak memory, GB", "peak_rss_gb"),
    ):
        trl, ours = medians["trl"][key], medians["ours"][key]
        digits = 0 if "tokens" in key else 2
        lines.append(f"{name:<24}{trl:>10.{digits}f}{ours:>10.{digits}f}{f'{trl / ours:.2f}' if ours else '':>8}")
    norms = figures["gradient_norm"]
    lines += [
        f"one update of the recorded batch: cosine of the parameter changes {figures['delta_cosine']:.6f}, of the "
        f"gradients {figures['gradient_cosine']:.6f}; gradient norms {norms['trl']:.6g} and {norms['ours']:.6g}",
        f"machine: {figures['machine']['gflops']:.0f} GFLOP/s in a float32 product (median; "
        f"{min(figures['machine']['gflops_by_turn']):.0f} to {max(figures['machine']['gflops_by_turn']):.0f}), "
        f"{figures['machine']['gb_per_second']:.0f} GB/s in a copy, {figures['machine']['threads']} threads; "
        f"TRL's micro-batch: {figures['trl']['micro_batch']}; load before blocks: "
        f"{min(block['load_before'] for block in figures['blocks']):.1f} to "
        f"{max(block['load_before'] for block in figures['blocks']):.1f}",
    ]
    return "\n".join(lines)
