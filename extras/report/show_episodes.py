"""Rollouts in the terminal: `python -m extras.report.show_episodes outputs/rollouts/12.jsonl --row 3`.

Of an episode, each turn: dim what the policy was shown, bold what it said (which is what is trained), and what that
earned. Answers to plain prompts are shown as at validation.
"""

from configs.errors import refusals  # isort: skip

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from extras.report.transcripts import Record, read_records, without_middle
from training.tracking import short_number

FOR_PROGRAMS = ("rows", "reward_extra_keys", "response", "__messages__")  # shown nowhere
IN_TURNS = (*FOR_PROGRAMS, "step", "input", "output", "turns", "raw_prompt", "extra_info", "__num_turns__")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="N.jsonl of trainer.rollout_data_dir or trainer.validation_data_dir")
    parser.add_argument("--row", type=int, help="one line of it, counted from 0; without it, all")
    arguments = parser.parse_args(argv)
    if not arguments.file.is_file():
        parser.error(f"there is no file {arguments.file}")
    with refusals():
        records = read_records(arguments.file)
    if arguments.row is not None and not 0 <= arguments.row < len(records):
        parser.error(f"--row {arguments.row}: {arguments.file} has {len(records)} lines, counted from 0")
    shown = records if arguments.row is None else [records[arguments.row]]
    print_records(arguments.file.name, shown)


def print_records(title: str, records: Sequence[Record]) -> None:
    """Prints each rollout in a box under `title`, and its number: of an episode turn by turn, and its other fields."""
    for number, record in enumerate(records, start=1):
        hidden = IN_TURNS if "turns" in record else FOR_PROGRAMS
        fields = {name: value for name, value in record.items() if name not in hidden and says_something(value)}
        content = Group(*map(turn_view, record.get("turns", ())), fields_table(fields))
        heading = Text(f"{title} · {number} of {len(records)}")
        Console().print(Panel(content, title=heading, title_align="left"))


def says_something(value: Any) -> bool:
    return bool(value) or not isinstance(value, list | dict | None)


def turn_view(turn: Record) -> Group:
    """Styles a turn: the prompt dim, the answer bold, and below it what it earned; a blank answer is quoted."""
    answer = turn["response"]
    texts = [(turn["prompt"], "dim"), (answer if answer.strip() else repr(answer) * bool(answer), "bold")]
    texts += [(f"reward {short_number(turn['reward'])}", "green")] if turn["reward"] else []
    return Group(*(Text.from_ansi(text, style=style) for text, style in texts if text.strip()))


def fields_table(fields: Mapping[str, Any]) -> Table:
    """Lays names and values out as two columns; colours in texts are shown."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        text = short_number(value) if isinstance(value, float | np.floating) else without_middle(str(value))
        # Not a plain string: [INST] in a text is no markup, and an escape sequence must not reach the terminal.
        table.add_row(name, Text.from_ansi(text))
    return table


if __name__ == "__main__":
    main()
