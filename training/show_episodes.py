"""Rollouts in the terminal: `python -m training.show_episodes outputs/rollouts/12.jsonl --row 3`.

Of an episode, each turn: dim what the policy was shown, bold what it said (which is what is trained), and what that
earned. Answers to plain prompts are shown as at validation.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from configs.errors import refusals
from training.episode_files import Record, read_records
from training.reports import fields_table, print_boxes, short_number, without_middle

BRIEF_TURNS = 8  # longer episodes lose their middle where they are shown briefly
IN_TURNS = ("step", "input", "output", "turns", "rows", "raw_prompt", "__num_turns__")


def print_records(title: str, records: Sequence[Record], brief: bool) -> None:
    """Prints each rollout in a box: `title`, which says what they are ("validation at step 3"), and what it holds.

    If `brief`, long episodes and long texts lose their middle.
    """
    print_boxes(title, [episode_view(one, brief) if "turns" in one else fields_table(one) for one in records])


def episode_view(record: Record, brief: bool) -> Group:
    """The turns of an episode, and below them what else is known of it."""
    turns = Table.grid(padding=(0, 2))
    turns.add_column(style="cyan", no_wrap=True)
    turns.add_column(overflow="fold")
    turns.add_column(style="green", no_wrap=True)
    for number, turn in shortened(record["turns"], BRIEF_TURNS if brief else None):
        if turn is None:
            turns.add_row("…", Text(f"{number} more turns", style="dim"), "")
        else:
            turns.add_row(str(number), turn_view(turn, brief), short_number(turn["reward"]) if turn["reward"] else "")
    about = {name: value for name, value in record.items() if name not in IN_TURNS and not says_nothing(value)}
    about = {"return" if name == "score" else name: value for name, value in about.items()}
    return Group(turns, Text(), fields_table(about))


def says_nothing(value: Any) -> bool:
    """Whether it is None, or a list or dictionary without entries."""
    return value is None or (isinstance(value, list | dict) and not value)


def turn_view(turn: Record, brief: bool) -> Group:
    """Dim what the policy was shown, bold what it said; an answer that cannot be seen is quoted."""
    answer = turn["response"]
    styled = [(turn["prompt"], "dim"), (answer if answer.strip() else repr(answer) * bool(answer), "bold")]
    texts = [(without_middle(text) if brief else text, style) for text, style in styled if text.strip()]
    return Group(*(Text.from_ansi(text, style=style) for text, style in texts))


def shortened(turns: Sequence[Record], most: int | None) -> list[tuple[int, Record | None]]:
    """(number, turn) of the first and the last, `most` in all; between them (how many were left out, None)."""
    numbered, left_out = [*enumerate(turns)], 0 if most is None else len(turns) - most
    if left_out <= 0:
        return numbered
    half = most // 2
    return [*numbered[:half], (left_out, None), *numbered[half + left_out :]]


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
    print_records(arguments.file.name, shown, brief=False)


if __name__ == "__main__":
    main()
