"""Says what becomes of a command for verl here: python -m extras.verl SCRIPT.sh [ARGUMENT …] [--run]

Reads a shell script of any version of verl's, a yaml (FILE.yaml) or a command (-- python3 -m verl.trainer.main_ppo …).
Prints for each command of verl's in it what runs as it is, what has another name, what does nothing here, what is
missing, each with the reason, and the command that works here; --run runs it. A script is run to be read, in a sandbox:
it starts nothing, writes nothing and has no network. Ends with 0, or with 2 if something is missing.
"""

from configs.errors import ConfigError, did_you_mean, refusals  # isort: skip
import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from configs import loader
from configs.loader import Arguments
from configs.paths import ROOT
from configs.settings import defaults, known_keys, leaves
from extras.sandbox import child
from extras.sandbox.run import Call, check_fences, fences, run_shell
from extras.verl.keys import VerlKeys, judge
from extras.verl.programs import ENTRIES, MERGER, Entry, check_here, entry_of, name_of, programs_in

SECONDS = 20.0  # for a script
LONGEST = 100_000  # characters of one
LOG_WIDTH, LINE = 160, 115  # characters of a line: in a file or a pipe, of a command
WORKS, RENAMED, NO_EFFECT, MISSING = "works", "renamed", "no effect", "missing"
HEADS = {WORKS: "runs as it is", RENAMED: "has another name", NO_EFFECT: "does nothing here", MISSING: "is missing"}
SAME_TRAINER = r"main_(ppo|dapo|entropy)\w*|\w*async_main"  # as verl.trainer.main_ppo, but for when it does what
NO_SUCH = "there is no such setting."
NOT_HERE = re.compile("there is no such file|no file matches|no file in it|is not installed")
REMEDY = "Arguments and variables are given so: NAME=value python -m extras.verl {} ARGUMENT …"
EARLY = "By itself it"
FLAGS = dict.fromkeys(("--config-path", "--config-dir", "-cp", "-cd"), "--config-path")
FLAGS |= dict.fromkeys(("--config-name", "-cn"), "--config-name")


class Setting(NamedTuple):
    """A setting as the source writes it (`original`), its fate, the reason, and its form `now` (None: left out)."""

    original: str
    fate: str
    reason: str = ""
    now: str | None = None


class Reading(NamedTuple):
    """A command of verl's: its program, its settings, the command for it here, and the notices that this one prints."""

    program: str
    settings: list[Setting]
    command: list[str]
    variables: dict[str, str]
    notices: str = ""


def main(argv: list[str] | None = None) -> int:
    argv, raw = sys.argv[1:] if argv is None else argv, argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m extras.verl", description=__doc__, formatter_class=raw)
    parser.add_argument("source", nargs="?", metavar="SCRIPT.sh|FILE.yaml")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="a script's own, or settings")
    parser.add_argument("--run", action="store_true", help="run what works here")
    end = argv.index("--") if "--" in argv else len(argv)
    options, words = parser.parse_args([word for word in argv[:end] if word != "--run"]), argv[end + 1 :]
    if (options.source is None) == (not words):
        parser.error("name a script or a yaml, or give a command after --")
    console = Console() if Console().is_terminal else Console(width=LOG_WIDTH)
    with refusals():
        readings, notes = readings_of([Call(words, {})]), []
        if options.source is not None:
            readings, notes = read_source(Path(options.source), options.arguments)
        elif not readings:
            raise ValueError(f"{shlex.join(words)}: no command of verl's, such as python3 -m verl.trainer.main_ppo.")
    for number, reading in enumerate(readings, 1):
        show(reading, f"{number} of {len(readings)}: " if len(readings) > 1 else "", console)
    console.print(*map(Text, notes), sep="\n", end="\n" if notes else "")
    if any(setting.fate == MISSING for reading in readings for setting in reading.settings):
        return 2
    is_whole = not any(note.startswith(EARLY) for note in notes)  # or settings may lack what was to come
    return (run(readings) if is_whole else 2) if "--run" in argv[:end] else 0


def read_source(path: Path, arguments: list[str]) -> tuple[list[Reading], list[str]]:
    """Reads a file; returns the commands of verl's in it, and lines about the rest. Raises ValueError without one."""
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file.")
    if path.suffix == ".yaml":
        flags = [f"--config-path={path.parent.resolve()}", f"--config-name={path.stem}"]
        return [read_settings(path.name, entry_of_yaml(path), [*flags, *arguments], {})], []
    if path.suffix in (".yml", ".py", ".json"):
        raise ValueError(f"{path}: shell scripts are read, and yaml files whose name ends in .yaml, as Hydra's do.")
    text = path.read_text(errors="replace").replace("\r\n", "\n")
    if "\0" in text or len(text) > LONGEST:
        raise ValueError(f"{path}: a shell script has at most {LONGEST} characters, all of them text.")
    calls, ending = calls_of(text, path, arguments)
    readings = readings_of(calls)
    if not readings:
        raise ValueError(f"{path} gave no command of verl's: it {ending}. {REMEDY.format(path)}")
    gaps = [f"{EARLY} {ending}."] if ending else []
    if empty := " ".join(it.original for reading in readings for it in reading.settings if it.original.endswith("=")):
        gaps.append(f"Nothing is given to {empty}: is a variable not set?")
    return readings, [*gaps, *[REMEDY.format(path)] * bool(gaps), *notes_on(calls)]


def readings_of(calls: list[Call]) -> list[Reading]:
    """Reads those of the calls that are commands of verl's, each once."""
    readings = [read_program(call, *program) for call in calls for program in programs_in(call.words)]
    return list({shlex.join([reading.program, *reading.command]): reading for reading in readings}.values())


def calls_of(text: str, path: Path, arguments: list[str]) -> tuple[list[Call], str]:
    """Runs a script in the sandbox, among commands that only note how they were called; returns these calls, and how it
    ended if it gave no command of verl's: then it is run once more, and goes on. Raises ValueError without a sandbox.
    """
    if not child.is_closed(fences()):
        raise ValueError(
            f"{path}: {check_fences('open')} Give its command: python -m extras.verl -- python3 -m "
            "verl.trainer.main_ppo key=value …"
        )
    text = re.sub(r"\$\{BASH_SOURCE(\[0\])?(:-[^}]*)?\}|\$BASH_SOURCE\b", "$0", text)
    text = re.sub(r"(?<![\w.-])[\w./~${}-]*/bin/(python[\d.]*|torchrun|ray|uv|accelerate)\b", r"\1", text)
    unheard = re.sub(r"(?<=\s)(?:&|\d)?>>?\s*(?![&(>\s])(?:\"[^\"\n]*\"|[^\s;|&)]+)", ">/dev/null", text)
    for form in (text, unheard):  # a log beside what is only read cannot be written
        calls, status, ending = run_in_sandbox(form, path, arguments)
        if status is None or any(any(programs_in(call.words)) for call in calls):
            return calls, ending if status is None else ""
    calls, _, _ = run_in_sandbox(f"exit() {{ :; }}; set() {{ :; }}; {unheard}", path, arguments)
    return calls, f"{ending}, and was read as if it went on"


def run_in_sandbox(text: str, path: Path, arguments: list[str]) -> tuple[list[Call], int | None, str]:
    """Runs a script in this folder, or in its project's; returns its calls, its status, and how it ended in words."""
    cwd, script = Path.cwd(), path.resolve()
    project = next((folder for folder in script.parents if (folder / ".git").exists()), None)
    start = cwd if project is None or cwd.is_relative_to(project) else project
    name = script.relative_to(start) if script.is_relative_to(start) else script
    readable = (start, project or script.parent)
    calls, done = run_shell(text, [str(name), *arguments], os.environ, start, readable=readable, seconds=SECONDS)
    calls = [call._replace(words=[at_home(word, start, cwd) for word in call.words]) for call in calls]
    last = [line for line in done.errors.splitlines() if line.strip() and not line.startswith("+")][-1:]
    ending = f"ran for {SECONDS:g} seconds" if done.status is None else f"ended with status {done.status}"
    return calls, done.status, ", after: ".join([ending, *map(short, last)])


def at_home(word: str, project: Path, cwd: Path) -> str:
    """Spells out a path of another project than this one, if the file is there: a command is run from here."""
    key, equals, value = word.partition("=")
    is_there = "/" in value and "\n" not in value and len(value) < 1000 and (project / value).exists()
    return f"{key}={project / value}" if equals and is_there and project != cwd else word


def read_program(call: Call, program: str, arguments: list[str]) -> Reading:
    if re.fullmatch(MERGER, name_of(program)):
        return read_merger(program, arguments, call.variables)
    entry = entry_of(program, arguments)
    if entry.config == "sft":  # torchrun says how many workers there are
        arguments = [*arguments, *workers_of(call.words, arguments)]
    reading = read_settings(program, entry, arguments, call.variables)
    has_own = entry is ENTRIES[-1] and not re.fullmatch(SAME_TRAINER, name_of(program))
    notice = f"notice: {program} is not read itself: its settings are taken as those of main_ppo.\n" * has_own
    return reading._replace(notices=notice + reading.notices)


def workers_of(words: list[str], arguments: list[str]) -> Iterator[str]:
    """Yields the settings for torchrun's --nproc_per_node and --nnodes."""
    launcher = " ".join(words).replace("-", "_")
    for flag, key in (("nproc_per_node", "trainer.n_gpus_per_node"), ("nnodes", "trainer.nnodes")):
        number = re.search(rf"__{flag}[ =](\d+)", launcher)
        if number and not any(argument.lstrip("+").startswith(f"{key}=") for argument in arguments):
            yield f"{key}={number[1]}"


def read_merger(program: str, arguments: list[str], variables: dict[str, str]) -> Reading:
    check_here("extras.merge")
    settings, command = [], ["-m", "extras.merge", "merge"]
    flags = dict(re.findall(r"--([\w-]+)[= ]?((?:(?!--)\S)*)", " ".join(arguments)))
    for flag, value in flags.items():
        text = f"--{flag} {value}".strip()
        if flag == "backend" and value != "fsdp":
            settings.append(Setting(text, MISSING, "Megatron's checkpoints are not read"))
        elif flag in ("backend", "local_dir", "target_dir", "hf_upload_path", "private"):
            settings.append(Setting(text, WORKS))
            command += [f"--{flag}", *[value] * bool(value)]
        else:
            settings.append(Setting(text, NO_EFFECT, "a checkpoint says what it holds"))
    return Reading(program, settings, command, variables)


def entry_of_yaml(path: Path) -> Entry:
    """Returns the entry that a yaml is for, by its name or else by its sections."""
    sections = set(re.findall(r"^(\w+):", path.read_text(errors="replace"), re.MULTILINE))
    ours = bool(sections & {"actor_rollout_ref", "algorithm", "defaults"})
    named = zip(ENTRIES, ("optim", "rollout", None), strict=False)
    return next((it for it, key in named if it.config in path.stem or (key in sections and not ours)), ENTRIES[-1])


def read_settings(program: str, entry: Entry, arguments: list[str], variables: dict[str, str]) -> Reading:
    """Judges all settings of a command, by the tables of the loader, and composes those that work."""
    flags, overrides, settings = part_arguments(arguments)
    folder = loader.yaml_folder(entry.schema)
    with redirect_stderr(StringIO()):
        parsed = loader.parse_arguments(flags, entry.config, None, folder)
    if flags and parsed.config_dir == folder:
        settings.append(Setting(" ".join(flags), NO_EFFECT, "it is a yaml of verl's, whose settings are defaults here"))
        flags = []
    try:
        in_yaml = list(leaves(loader.read_yaml(parsed, {}))) if flags else []
    except ConfigError as error:
        settings.append(Setting(" ".join(flags), MISSING, f"{error} A script in a checkout (.git) is read there."))
        flags, in_yaml, parsed = [], [], loader.parse_arguments([], entry.config, None, folder)
    settings += [judge_setting(f"{key}={it}", key, it, entry.schema)._replace(now=None) for key, it in in_yaml]
    for text in filter(str.strip, overrides):
        settings += read_override(text, parsed.config_dir, entry.schema)
    settings, notices = compose(settings, parsed, entry)
    remaining = [it.now for it in settings if it.now and (it.fate != MISSING or it.now[0] == "~")]
    return Reading(program, settings, [*entry.words, *flags, *remaining], variables, notices)


def part_arguments(arguments: list[str]) -> tuple[list[str], list[str], list[Setting]]:
    """Parts arguments into the flags that name a yaml, settings, and flags that have no place here."""
    flags, overrides, rest, words = [], [], [], iter(arguments)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in FLAGS:
            flags.append(f"{FLAGS[flag]}={value if equals else next(words, '')}")
        elif word.startswith("-"):
            rest.append(Setting(word, MISSING, "settings are key=value"))
        else:
            overrides.append(word)
    return flags, overrides, rest


def read_override(text: str, folder: Path, schema: type) -> list[Setting]:
    """Judges one override, or the choice of a group's file; of an override of a section, each setting in it."""
    try:
        override = loader.parse_override(text)
    except ConfigError as error:
        return [Setting(text, MISSING, str(error))]
    group = override.key_or_group
    value = None if override.is_delete() else override.value()
    if override.is_delete() or loader.options(group, folder):
        return [Setting(text, WORKS, now=text)]
    if why := VerlKeys.idle_choice(group, override.package, value):
        return [Setting(text, NO_EFFECT, why)]
    if isinstance(value, dict) and judge(group, value, schema).kind == "unknown":
        keys = [(f"{group}.{key}", it) for key, it in leaves(OmegaConf.create(value))]
        return [judge_setting(f"{key}={simple(it) or it}", key, it, schema) for key, it in keys]
    return [judge_setting(text, group, value, schema)]


def judge_setting(text: str, key: str, value: Any, schema: type) -> Setting:
    """Gives a setting the verdict of the loader's tables."""
    verdict = judge(key, value, schema)
    if verdict.kind in ("no effect", "refused"):
        return Setting(text, NO_EFFECT if verdict.kind == "no effect" else MISSING, verdict.why)
    if verdict.kind == "unknown" and value != "???":
        nearest = did_you_mean(key, list(known_keys(defaults(schema))))
        return Setting(text, MISSING, f"{NO_SUCH}{nearest}", now=text)  # unless the whole has a place for it
    if verdict.kind == "renamed" and value is None:
        return Setting(text, NO_EFFECT, "null leaves the default")
    if verdict.kind == "renamed":
        same = str(verdict.value) == str(value)
        written = text.partition("=")[2] if same else simple(verdict.value)
        now = text if written is None else f"{verdict.key}={written}"
        return Setting(text, RENAMED, verdict.why if now == text else now, now)
    return Setting(text, WORKS, now=text)


def simple(value: Any) -> str | None:
    """Writes a value for a command line, if it is a word or a number; else None."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) if re.fullmatch(r"[\w.+-]+", str(value)) else None


def compose(settings: list[Setting], arguments: Arguments, entry: Entry) -> tuple[list[Setting], str]:
    """Composes and checks what works; what is refused becomes missing, until the rest is accepted. For files and
    engines that are not on this machine others stand in. Also returns the checks' notices."""
    stand_ins: dict[str, str] = {}
    notices = StringIO()
    while error := refusal(arguments, entry, [*(it.now for it in settings if it.now), *stand_ins.values()], notices):
        reason, key = str(error), error.key
        at = next((at for at in reversed(range(len(settings))) if key in keys_of(settings[at])), None)
        if NOT_HERE.search(reason):  # a matter of this machine
            if at is None or key in stand_ins:
                break
            stand_ins[key] = f"{key}={'hf' if 'installed' in reason else 'datasets:ones_that_are_not_looked_up'}"
            settings[at] = settings[at]._replace(reason=f"{settings[at].reason} {reason}".strip())
            continue
        if at is None:
            settings = [*settings, Setting("the settings together", MISSING, reason)]
            break
        refused, taken_back = settings[at], f"~{key}"  # from a yaml
        settings[at] = Setting(refused.original, MISSING, reason, None if refused.now else taken_back)
        if refused.now == taken_back:  # too late: it is refused before
            return settings, ""
    settings = [it._replace(fate=WORKS, reason="") if it.reason.startswith(NO_SUCH) else it for it in settings]
    return settings, "" if any(it.endswith("=hf") for it in stand_ins.values()) else notices.getvalue()


def keys_of(setting: Setting) -> set[str]:
    return {text.lstrip("+~").partition("=")[0] for text in (setting.original, setting.now or setting.original)}


def refusal(arguments: Arguments, entry: Entry, overrides: list[str], notices: StringIO) -> ConfigError | None:
    arguments = replace(arguments, overrides=overrides)
    notices.truncate(notices.seek(0))
    try:
        with redirect_stderr(StringIO()):
            config = loader.load_config(arguments, entry.schema)
            loader.check_is_whole(arguments, config)
        with redirect_stderr(notices):
            entry.check(config)
    except ConfigError as error:
        return error
    return None


def notes_on(calls: Iterable[Call]) -> Iterator[str]:
    """Yields lines on what a script does beside its commands of verl's."""
    rest = [call.words for call in calls if not any(programs_in(call.words))]
    for name, text in (
        ("no-folder", "It goes to folders that are not here"),
        ("no-file", "It reads files that are not here, or may not be read"),
        ("no-command", "It calls commands that are not here"),
    ):
        if names := dict.fromkeys(shlex.join(words[1:]) for words in rest if words[0] == name):
            yield f"{text}: {'; '.join(names)}."
    if commands := dict.fromkeys(short(shlex.join(it)) for it in rest if not re.fullmatch("no-.*|curl", it[0])):
        yield f"It also calls, for you to do by hand if need be: {'; '.join(commands)}."


def short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LINE else f"{text[: LINE - 1]}…"


def show(reading: Reading, number: str, console: Console) -> None:
    """Prints the table of a command, and the command for it here."""
    heads = "", *(Column(name, overflow="fold") for name in ("setting", "here"))  # names are longer than their column
    table = Table(*heads, title=f"{number}{reading.program}", title_justify="left", pad_edge=False)
    for fate, head in HEADS.items():
        settings = [setting for setting in reading.settings if setting.fate == fate]
        lines = by_reason(settings)
        if fate == WORKS and settings:
            keys = ", ".join(setting.original.partition("=")[0] for setting in settings)
            lines = [(keys, "\n".join(setting.reason for setting in settings if setting.reason))]
        for at, line in enumerate(lines):
            first = "" if at else f"{head} ({len(settings)})"
            table.add_row(*map(Text, (first, *line)), end_section=line == lines[-1])
    console.print(table)
    console.print(Text(reading.notices), end="")
    if reading.variables:
        names = ", ".join(f"{name}={short(value)}" for name, value in reading.variables.items())
        console.print(Text(f"The script exports, and --run sets: {names}"))
    if any(setting.fate == MISSING for setting in reading.settings):
        console.print(Text("Without what is missing:"))
    console.print(in_lines(["python", *reading.command]), soft_wrap=True, markup=False, highlight=False)


def by_reason(settings: list[Setting]) -> list[tuple[str, str]]:
    by_why: dict[str, dict[str, None]] = {}
    for setting in settings:
        by_why.setdefault(setting.reason, {})[short(setting.original)] = None
    return [(", ".join(texts), why) for why, texts in by_why.items()]


def quote(word: str) -> str:
    """Quotes a word for a shell, in double quotes where it holds single ones."""
    return f'"{word}"' if "'" in word and not re.search(r'["$`\\\\!]', word) else shlex.quote(word)


def in_lines(words: list[str]) -> str:
    """Writes a command for a shell, in lines of at most LINE characters where its words allow."""
    lines = [""]
    for word in map(quote, words):
        if lines[-1] and len(lines[-1]) + len(word) > LINE:
            lines.append("")
        lines[-1] += f"{' ' if lines[-1] else ''}{word}"
    return " \\\n  ".join(lines)


def run(readings: list[Reading]) -> int:
    """Runs the commands one after the other, until one fails; returns its status."""
    for reading in readings:
        environment, (first, *rest) = os.environ | reading.variables, reading.command
        command = [sys.executable, str(ROOT / first) if first == "main.py" else first, *rest]
        if status := subprocess.run(command, env=environment, check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
