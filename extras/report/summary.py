"""Words about a run, from its record alone: what it did, what looks wrong, what it is, where its time went.

"Late in the run" is the mean over the last WINDOW steps that have a metric. summary.yaml has the words.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

import yaml

from configs.checks import plural
from data.types import FAILED_END_REASONS
from extras.report.charts import curve_name
from extras.report.runs import RunRecord

Entries = dict[str, dict[str, Any]]  # what may look wrong, in summary.yaml
Found = Iterator[tuple[str, dict[str, Any]]]  # an entry, and the values of its text
WINDOW = 10  # steps
MOST_BARS = 100  # of steps, by stage
MOST_CURVES = 4  # validations that are told
STAGES = (  # the timers that contain none of the others, in the order in which they run; a trainer's own come after
    *("start", "log", "data", "gen", "reward", "gen_max", "old_log_prob", "ref", "values", "adv", "update_critic"),
    *("update_actor", "update_weights", "metrics", "testing", "update_sampler"),
    "save_checkpoint",
)
AROUND_OTHERS = ("step",)
BESIDE = (
    "data",
    "gen",
    "reward",
    "gen_max",
)  # of a step, in those before it, where the trainer waits for them ("wait")


@dataclass(frozen=True)
class Finding:
    """Says what looks wrong, with its threshold, and the key to set."""

    level: str  # warning | note
    text: str
    remedy: str


@cache
def words() -> dict[str, Any]:
    """Reads summary.yaml, whose entries nobody may change."""
    return yaml.load(Path(__file__).with_name("summary.yaml").read_text(encoding="utf-8"), yaml.CSafeLoader)


def sentences(run: RunRecord) -> list[str]:
    """Says in plain words what was trained by what, from where to where, in how long, on what, and how it ended."""
    return [*about_task(run), *about_progress(run), *about_time(run), *about_machine(run), about_end(run)]


def about_task(run: RunRecord) -> Iterator[str]:
    """Says which model learnt what, by which algorithm."""
    known, goes_on = run.settings, run.state == "running"
    files, rows = names_of(known.get("data.train_files")), known.get("data.train_batch_size")
    if "model.path" in known:
        batch = f", {plural(rows, 'row')} a step" if rows else ""
        yield f"{known['model.path']} {'learns' if goes_on else 'learnt'} the responses of {files}{batch}."
    elif "algorithm.adv_estimator" in known:
        policy = {key.removeprefix("actor_rollout_ref."): value for key, value in known.items()}
        loss, rank, n = (policy.get(key) for key in ("actor.policy_loss.loss_mode", "model.lora_rank", "rollout.n"))
        ways = [known["algorithm.adv_estimator"]]
        ways += [f"policy loss {loss}"] if loss not in (None, "vanilla") else []
        ways += [f"a LoRA adapter of rank {rank}"] if rank else []
        ways += [f"KL loss of weight {policy.get('actor.kl_loss_coef')}"] if policy.get("actor.use_kl_loss") else []
        kind, env = "single steps" if known.get("env.mode") == "step" else "whole episodes", known.get("env.id")
        prompts = f" on the prompts of {files}" if known.get("data.train_files") else ""
        task = f" in {kind} of {env}" if env else prompts
        verb = "is being trained" if goes_on else "was trained"
        batch = f": {plural(rows, 'prompt')} a step, {plural(n, 'sample')} of each" if rows and n else ""
        model = policy.get("model.path") or "A model"
        yield f"{model} {verb} by reinforcement learning ({', '.join(ways)}){task}{batch}."


def about_progress(run: RunRecord) -> Iterator[str]:
    """Says where each validation and the score in training began, and where they are."""
    validations = validations_of(run)
    for name in validations[:MOST_CURVES]:
        (first, before), *_, (last, after) = [*points(run, name)] * 2
        best, at = extreme(run, name)
        then = f", {short(after)} at step {last}" if last != first else ", and was not measured again"
        top = f"; the best was {short(best)} at step {at}" if at not in (first, last) else ""
        yield f"{in_words(name)}: {short(before)} at step {first}{then}{top}."
    if len(validations) > MOST_CURVES:
        yield f"{len(validations) - MOST_CURVES} further validations are among the curves."
    for source, (_, reached), expected in beside_random_players(run):
        yield f"The return on {source} is {short(reached)} in the last validation, a random player's {short(expected)}."
    for title, over, first, last in training_means(run):
        span = f"{over} steps" if over > 1 else "step"
        yield f"{title}: {short(first)} over the first {span}, {short(last)} over the last."


def training_means(run: RunRecord) -> Iterator[tuple[str, int, float, float]]:
    """Yields the score, or the loss, in words, a number of steps, and its means over the first and last so many."""
    for name, title in (("critic/score/mean", "Mean score in training"), ("train/loss", "Loss in training")):
        if over := min(WINDOW, len(points(run, name)) // 2):
            yield title, over, mean(points(run, name)[:over]), mean(points(run, name)[-over:])


def headline(run: RunRecord) -> dict[str, str]:
    """Returns label → text of what one asks first: did it learn, in how many steps, in how long."""
    table = {label: " → ".join(dict.fromkeys(map(short, values))) for label, values in ends_of(run).items()}
    times = [duration(seconds) for _, seconds in points(run, "training/seconds")[-1:]]
    return table | {"Steps": str((run.steps or [0])[-1])} | dict(zip(["Time"], times, strict=False))


def ends_of(run: RunRecord) -> dict[str, tuple[float, float]]:
    """Returns the first and the last value of two validations, and of the score or the loss in training, by label."""
    curves = {in_words(name): points(run, name) for name in validations_of(run)[:2]}
    ends = {title: (curve[0][1], curve[-1][1]) for title, curve in curves.items()}
    return ends | {title: (first, last) for title, _, first, last in training_means(run)}


def group_means(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Returns of each group of several runs its name, and label → mean ± standard deviation of their last values."""
    groups: dict[str, list[dict[str, tuple[float, float]]]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(ends_of(run))
    means = []
    for name, members in groups.items():
        lasts = {label: [ends[label][1] for ends in members if label in ends] for ends in members for label in ends}
        texts = {label: f"{short(fmean(some))} ± {short(pstdev(some))}" for label, some in lasts.items()}
        means += [{"group": name, "headline": texts}] if len(members) > 1 else []
    return means


def about_time(run: RunRecord) -> Iterator[str]:
    """Says how many steps were done, in how long, and of a run that goes on how long the others will take."""
    done, each = (run.steps or [0])[-1], [value for _, value in points(run, "timing_s/step")]
    total = run.start.get("total_steps") or number(run, "trainer.total_training_steps", None)
    spent, left = points(run, "training/seconds"), ""
    elapsed = f", in {duration(spent[-1][1])}" if spent else ""
    pace = f"; a step takes {median(each):.3g} s (median)" if each else ""
    if run.state == "running" and total and len(spent) > 1:
        (first, began), *_, (last, now) = spent  # a run may go on from a step of another's
        left = f"; about {duration((total - done) * (now - began) / (last - first))} are left"
    yield f"{done}{f' of {total}' if total else ''} steps are done{elapsed}{pace}{left}."


def about_machine(run: RunRecord) -> Iterator[str]:
    """Says on which machine it ran."""
    if machine := run.start.get("machine"):
        cores, size, threads = machine.get("cores"), machine.get("memory_gb"), run.start.get("threads")
        parts = [str(machine.get("cpu") or ""), cores and plural(cores, "core"), size and f"{size} GB of memory"]
        parts += [f"{count} × {name}" for name, count in Counter(map(str, machine.get("gpus") or [])).items()]
        parts += [threads and f"{plural(threads, 'thread')} a worker"]
        verb = "runs" if run.state == "running" else "ran"
        about = ", ".join(filter(None, parts))
        yield f"It {verb} on {machine.get('host') or 'a machine'}{about and ': '}{about}."


def about_end(run: RunRecord) -> str:
    """Says how it ended, or that it goes on."""
    end = words()["ends"].get(run.state, words()["ends"]["ended"])
    end = end.format(step=(run.steps or [0])[-1], reason=run.start.get("reason") or "no reason is known")
    starts = len(run.info.get("starts", []))
    return f"{end} It was started {starts} times." if starts > 1 else end


def findings(run: RunRecord, at_end: bool = False) -> list[Finding]:
    """Lists what looks wrong, warnings first; `at_end` only what the run's last lines say: a whole run shows it."""
    known, listed = words()["findings"], []
    looks = (beyond_limits, about_signal, about_entropy, about_rollouts, about_numbers, about_random_players)
    for look in (*(() if at_end else looks), about_actions, about_validations):
        for name, values in look(run, known):
            entry = known[name] | values
            listed.append(Finding(entry["level"], entry["text"].format(**entry), entry["remedy"].format(**entry)))
    return sorted(listed, key=lambda finding: finding.level != "warning")


def beyond_limits(run: RunRecord, known: Entries) -> Found:
    """Finds a bad end, metrics late in the run and stages that are beyond their limits."""
    if run.state in ("failed", "killed"):
        yield "failed", {"value": about_end(run)}
    split = stages(run)
    spent = {name: sum(seconds) for name, seconds in zip(split["names"], split["seconds"], strict=True)}
    for name, entry in known.items():
        value = late(run, entry.get("metric", ""))
        if "stage" in entry:
            value = spent.get(entry["stage"], 0.0) / (sum(spent.values()) or 1.0)
        normal = any((late(run, other) or 0.0) <= limit for other, limit in entry.get("unless", {}).items())
        normal |= any((late(run, other) or 0.0) > limit for other, limit in entry.get("unless_above", {}).items())
        normal |= "near_best" in entry and is_near_best(run, entry["near_best"])
        if value is not None and not normal and (value < 0 if entry.get("lowest") else value > entry["limit"]):
            yield name, {"value": value}


def about_signal(run: RunRecord, known: Entries) -> Found:
    """Finds steps in a row that taught nothing."""
    names = ("score/min", "score/max", "advantages/min", "advantages/max")
    ends = [dict(points(run, f"critic/{name}")) for name in names]
    limit = number(run, "trainer.no_signal_steps", 10) or 0

    def is_silent(step: int) -> bool:
        lowest, highest, *advantages = (values.get(step) for values in ends)
        return lowest == highest or advantages == [0, 0]

    trained = sorted({step for values in ends for step in values})
    longest = max(([*steps] for silent, steps in groupby(trained, is_silent) if silent), key=len, default=[])
    if len(longest) >= limit > 0:
        cause = "The reward is the same for all answers, or too rare to be found: look at samples of these steps."
        texts = [event["text"] for event in run.events if event.get("logger") == "extras.watch.health"]
        cause = next((text.partition("): ")[2] for text in texts if "taught nothing" in text), cause)
        values = {"value": len(longest), "first": longest[0], "last": longest[-1], "cause": cause, "limit": limit}
        yield "no_signal", values


def about_entropy(run: RunRecord, known: Entries) -> Found:
    """Finds a policy that has become certain though its scores are not near their best."""
    curve, entry = points(run, "actor/entropy"), known["entropy"]
    before, after = mean(curve[:WINDOW]), mean(curve[-WINDOW:])
    if len(curve) <= WINDOW or not after < entry["limit"] * before > 0:
        return
    if is_near_best(run, entry["near_best"]):
        return
    score = late(run, "critic/score/mean")
    in_use = number(run, "actor_rollout_ref.actor.entropy_coeff", 0.0) or 0.0
    text = "" if score is None else f" of {short(score)}"
    values = {"first": short(before), "last": short(after), "score": text, "coeff": max(entry["coeff"], 2 * in_use)}
    yield "entropy", values


def is_near_best(run: RunRecord, share: float) -> bool:
    """Says whether the mean score late in the run lacks no more to the best than this share of the range of scores."""
    lows, highs = ([value for _, value in points(run, f"critic/score/{end}")] for end in ("min", "max"))
    score = late(run, "critic/score/mean")
    return bool(lows and highs) and score is not None and max(highs) - score <= share * (max(highs) - min(lows))


def about_rollouts(run: RunRecord, known: Entries) -> Found:
    """Finds an engine that samples from other probabilities than the policy has, and rows that failed."""
    limit = number(run, "trainer.max_rollout_mismatch", 0.05)
    measured = points(run, "rollout_mismatch/abs_log_prob_diff")
    above = [(value, step) for step, value in measured if limit is not None and value > limit]
    if above:
        times, (worst, step) = plural(len(above), "step"), max(above)
        yield "mismatch", {"value": short(worst), "step": step, "times": times, "limit": limit}
    kinds = {reason: mean(points(run, f"end_reason/{reason}")) for reason in FAILED_END_REASONS}
    failed = max(mean(points(run, "response/aborted_ratio")), sum(kinds.values()))
    if failed > known["failed_rows"]["limit"]:
        shares = ", ".join(f"{share:.1%} {reason}" for reason, share in kinds.items() if share)
        yield "failed_rows", {"value": failed, "kinds": f" ({shares})" if shares else ""}


def about_numbers(run: RunRecord, known: Entries) -> Found:
    """Finds updates that were refused, numbers that are none, and a gradient far larger than the others."""
    learnt = {name: curve for name, curve in run.metrics.items() if name.startswith(("actor/", "critic/", "train/"))}
    holes = {name: curve.steps[curve.values.index(None)] for name, curve in learnt.items() if None in curve.values}
    if holes:
        yield "no_numbers", {"first": min(holes.values()), "value": ", ".join(holes)}
    for name in learnt:
        curve = points(run, name)
        norms = [value for _, value in curve]
        steps = [step for step, value in curve if value > 0]
        if name.endswith("/skipped_updates") and steps:
            yield "skipped_updates", {"times": plural(len(steps), "step"), "first": steps[0], "value": name}
        typical = median(norms) if name.endswith("/grad_norm") and len(norms) >= WINDOW else 0.0
        if typical and max(norms) > known["grad_norm"]["limit"] * typical:
            largest, step = short(max(norms)), curve[norms.index(max(norms))][0]
            yield "grad_norm", {"metric": name, "value": largest, "step": step, "typical": short(typical)}


def about_validations(run: RunRecord, known: Entries) -> Found:
    """Finds validations that are worse than they were, or stay where they were while the reward of training rises."""
    scores = [*points(run, "critic/score/min"), *points(run, "critic/score/max")]
    least, best = (pick((value for _, value in scores), default=0.0) for pick in (min, max))
    ends = [(before, after) for title, _, before, after in training_means(run) if "score" in title]
    rises = ends and ends[0][1] - ends[0][0] > known["flat_validation"]["limit"] * (best - least)
    for name in validations_of(run):
        (value, at), (step, last) = extreme(run, name), points(run, name)[-1]
        if abs(value - last) > known["validation"]["limit"] * abs(value):
            saved = run.folder / f"global_step_{at}"
            keep = f"{saved} has its model." if saved.is_dir() else f"There is no checkpoint of step {at} (save_freq)."
            when = {"best": short(value), "at": at, "last": short(last), "step": step}
            yield "validation", {"value": in_words(name), "saved": keep, **when}
        (_, first), entry, times = points(run, name)[0], known["flat_validation"], len(points(run, name))
        is_flat = times >= entry["times"] and value - first <= entry["slack"] * max(best - least, abs(first))
        if rises and is_flat and best - value > entry["limit"] * (best - least):
            details = {"before": short(ends[0][0]), "after": short(ends[0][1]), "first": short(first), "times": times}
            yield "flat_validation", {"value": curve_name(name), "step": step, **details}


def about_actions(run: RunRecord, known: Entries) -> Found:
    """Finds actions that are never played beside one that is played often, while the score is not near its best."""
    entry, in_use = known["unplayed"], number(run, "actor_rollout_ref.actor.entropy_coeff", 0.0) or 0.0
    names = [name for name in run.metrics if name.startswith("action/") and name.endswith("/share")]
    shares = {name.split("/")[1]: late(run, name) for name in names if points(run, name)}
    often = max(shares, key=shares.get, default=None)
    never = [name for name, share in shares.items() if share < entry["never"]]
    if never and shares[often] > entry["limit"] and not is_near_best(run, known["entropy"]["near_best"]):
        values = {"value": ", ".join(never), "often": often, "share": shares[often]}
        yield "unplayed", values | {"coeff": max(known["entropy"]["coeff"], 2 * in_use)}


def about_random_players(run: RunRecord, known: Entries) -> Found:
    """Finds policies that are worse than a random player, from the middle of a run on."""
    total = run.start.get("total_steps") or number(run, "trainer.total_training_steps", None) or (run.steps or [0])[-1]
    for source, (step, reached), expected in beside_random_players(run):
        if reached < expected and 0 < total <= 2 * step:
            yield "random_player", {"value": source, "step": step, "reached": short(reached), "random": short(expected)}


def beside_random_players(run: RunRecord) -> Iterator[tuple[str, tuple[int, float], float]]:
    """Yields sources of validations, the last step and return of the policy there, and a random player's return."""
    for name in run.metrics:
        head, _, measured = name.partition("/random_player/")
        source = head.partition("/")[2]
        of_policy = [points(run, f"val-{section}/{source}/{measured}") for section in ("core", "aux")]
        if measured and points(run, name) and any(of_policy):
            yield source, max(of_policy)[-1], points(run, name)[-1][1]


def facts(run: RunRecord) -> dict[str, str]:
    """Returns label → text: settings that one asks for first, machine, versions, command, commit, times."""
    known, start = run.settings, run.start
    table = {label: next(filter(None, map(known.get, keys)), None) for label, keys in words()["facts"].items()}
    table["Seed"] = known.get("trainer.seed", start.get("seed"))
    table["A step"] = "\n".join(map(str, start.get("batch_arithmetic") or []))
    table["Machine"] = " ".join(about_machine(run)).partition(" on ")[2].removesuffix(".")
    table["Versions"] = ", ".join(f"{name} {version}" for name, version in (start.get("versions") or {}).items())
    table["Commit"] = f"{start.get('commit') or ''}{' and changes' if start.get('dirty') else ''}"
    table["Command"] = " ".join(map(str, start.get("command") or []))
    table |= {label: start.get(label.lower()) for label in ("Started", "Ended", "Reason")}
    return {label: names_of(value) for label, value in table.items() if value not in (None, "", [])}


def stages(run: RunRecord) -> dict[str, list[Any]]:
    """Splits the seconds of every step into stages: {"steps": [..], "names": [..], "seconds": [[..] for each name],
    "width": steps that a bar of the chart is the mean of}.

    A step's seconds are those since the line before it, by `training/seconds`; a step whose line before is torn is left
    out. The last name is "other": no timer ran.
    """
    until = points(run, "training/seconds")
    lines = pairwise([(until[0][0] - 1, 0.0), *until]) if until else ()
    passed = {step: now - was for (last, was), (step, now) in lines if step == last + 1 and now >= was}
    if not passed:
        return {"steps": [], "names": [], "seconds": [], "width": 1}
    timers = [name.partition("/")[2] for name in run.metrics if name.startswith("timing_s/")]
    elsewhere = {*AROUND_OTHERS, *(BESIDE if "wait" in timers else ())}
    names = sorted({*timers} - elsewhere, key=[*STAGES, *timers].index)
    seconds = [seconds_of(run, name, passed) for name in names]
    remainders = [total - sum(parts) for total, *parts in zip(passed.values(), *seconds, strict=True)]
    rounded = [[round(value, 4) for value in values] for values in (*seconds, remainders)]
    width = -(-(max(passed) - min(passed) + 1) // MOST_BARS)
    return {"steps": [*passed], "names": [*names, "other"], "seconds": rounded, "width": width}


def beside(run: RunRecord) -> dict[str, list[Any]]:
    """Splits as `stages` what a step's batch took in the steps before, where generation runs beside training."""
    steps = [step for step, _ in points(run, "timing_s/wait")]
    names = [name for name in BESIDE if steps and f"timing_s/{name}" in run.metrics]
    return stages(run) | {"steps": steps, "names": names, "seconds": [seconds_of(run, name, steps) for name in names]}


def seconds_of(run: RunRecord, stage: str, steps: Iterable[int]) -> list[float]:
    curve = dict(points(run, f"timing_s/{stage}"))
    return [curve.get(step, 0.0) for step in steps]


def number(run: RunRecord, key: str, default: float | None) -> float | None:
    """Returns a setting that is a number or null; `default` for one that is missing, or something else."""
    value = run.settings.get(key, default)
    return value if isinstance(value, int | float | None) else default


def points(run: RunRecord, name: str) -> list[tuple[int, float]]:
    """Returns a metric's steps and values, without those that are no numbers; [] if the run has none."""
    curve = run.metrics.get(name)
    return [] if curve is None else [(step, value) for step, value in zip(*curve, strict=True) if value is not None]


def mean(some: Sequence[tuple[int, float]]) -> float:
    """Returns the mean of a curve's values; of none, 0."""
    return fmean(value for _, value in some) if some else 0.0


def late(run: RunRecord, name: str) -> float | None:
    last = points(run, name)[-WINDOW:]
    return mean(last) if last else None


def extreme(run: RunRecord, name: str) -> tuple[float, int]:
    """Returns the best value of a validation, the lowest of a loss, and the last step that had it."""
    sign = -1 if name.endswith("loss") else 1
    step, value = max(points(run, name), key=lambda point: (sign * point[1], point[0]))
    return value, step


def validations_of(run: RunRecord) -> list[str]:
    """Lists the metrics that say how well a run does in validation."""
    names = (name for name in run.metrics if name == "val/loss" or (name.startswith("val-core/") and "/mean@" in name))
    return [name for name in names if points(run, name)]


def in_words(name: str) -> str:
    """Names a validation at the beginning of a sentence."""
    words = curve_name(name).replace("val/loss", "validation: loss")
    return words[0].upper() + words[1:]


def short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """Says seconds in words: "95 s", "2.5 minutes", "35 minutes", "5.2 hours"."""
    hours = f"{seconds / 60:.{int(seconds < 600)}f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
    return hours if seconds > 120 else f"{seconds:.3g} s"


def names_of(files: Any) -> str:
    """Writes a path, or a list of them, or another value, as text."""
    return ", ".join(map(str, files)) if isinstance(files, list) else str(files)
