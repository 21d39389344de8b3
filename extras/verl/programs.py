"""Finds verl's programs among the words of a command, and the commands of ours that do their work."""

import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pkgutil import resolve_name
from typing import Any, NamedTuple

from configs.errors import ConfigError, notice, refusals
from configs.extras import absence, is_here

END_OF_COMMAND = re.compile(r"[|;&]+|\d?>.*")


class Entry(NamedTuple):
    """A command of ours: the programs of verl's that it is for, its words, its yaml, its settings and their check."""

    programs: str
    words: tuple[str, ...]
    config: str
    schema_name: str
    check_name: str

    @property
    def schema(self) -> type:
        check_here(self.words[-1])
        return resolve_name(self.schema_name)

    @property
    def check(self) -> Callable[[Any], None]:
        return resolve_name(self.check_name)


def of_extra(programs: str, module: str, config: str, schema: str, check: str) -> Entry:
    """Describes a command of an extra, whose settings and check are imported when a script asks for it."""
    settings = f"extras.{module.split('.')[0]}.settings"
    return Entry(programs, ("-m", f"extras.{module}"), config, f"{settings}:{schema}", f"{settings}:{check}")


ENTRIES = (
    of_extra(r"(\w+_)?sft_trainer\w*", "sft", "sft", "SFTConfig", "check_sft"),
    of_extra(r"main_gen\w*", "evaluation.main_generation", "generation", "GenerationConfig", "check_generation"),
    of_extra(r"main_eval\w*", "evaluation.main_eval", "evaluation", "EvaluationConfig", "check_evaluation"),
    Entry(r"main_\w+|\w+_main", ("main.py",), "ppo_trainer", "configs.schema:Config", "configs.checks:check_config"),
)
SERVER = of_extra("main_generation_server", "server", "server", "ServerConfig", "check_server")
MERGER = r"(legacy_)?model_merger"
PROGRAM = "|".join([MERGER, *(it.programs for it in ENTRIES)])


def check_here(module: str) -> None:
    """Raises ConfigError if a module of extras is not in this copy."""
    if not is_here(module):
        raise ConfigError(absence(module.split(".")[1]))


def programs_in(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Finds verl's programs among the words of a command, whatever starts them; yields each name and arguments."""
    if program := program_of(words):
        yield program
        return
    for word in words:  # a shell's commands in one word, as for docker, ssh and ray
        if re.search(rf"[./](?:{PROGRAM})\b", word) and " " in word:
            parts = shlex.split(re.sub(r";|(?<!\\)\n", " ; ", word))
            ends = [at for at, part in enumerate(parts) if END_OF_COMMAND.fullmatch(part)]
            commands = (parts[start + 1 : end] for start, end in pairwise([-1, *ends, len(parts)]))
            yield from filter(None, map(program_of, commands))


def program_of(words: list[str]) -> tuple[str, list[str]] | None:
    for index, word in enumerate(words):
        if (word.endswith(".py") or words[index - 1 : index] == ["-m"]) and re.fullmatch(PROGRAM, name_of(word)):
            return word, words[index + 1 :]
    return None


def name_of(program: str) -> str:
    """Returns the last part of verl.trainer.main_ppo, or of recipe/dapo/main_dapo.py."""
    return re.split(r"[./]", program.removesuffix(".py"))[-1]


def entry_of(program: str, arguments: list[str]) -> Entry:
    """Returns the command of ours for a program of verl's: a server if a setting of one is among its arguments."""
    name = name_of(program)
    serves = any(re.match(r"\+*server\.", argument) for argument in arguments)
    return next(it for it in (SERVER, *ENTRIES)[not serves :] if re.fullmatch(it.programs, name))


def run(program: str) -> None:
    """Runs the command of ours for a program of verl's, by the arguments of this process; says so."""
    merges = re.fullmatch(MERGER, name_of(program))
    words = ("-m", "extras.merge") if merges else entry_of(program, sys.argv[1:]).words
    with refusals():
        check_here(words[-1])
    notice(f"python -m {program} is python {' '.join(words)} here.")
    runpy.run_module(words[-1].removesuffix(".py"), run_name="__main__", alter_sys=True)
