"""Rollouts in the terminal: `python -m extras.report.show_episodes outputs/rollouts/12.jsonl --row 3`.

Of an episode, each turn: dim what the policy was shown, bold what it said (which is what is trained), and what that
earned. Answers to plain prompts are shown as at validation.
"""

import argparse
from pathlib import Path

from configs.errors import refusals
from extras.report.transcripts import print_records, read_records


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


if __name__ == "__main__":
    main()
