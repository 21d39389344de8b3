"""Writes a table of rows batch by batch, so that a killed process goes on where it was."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from configs.errors import ConfigError
from data.files import append, json_line, lock, replacing


class UnfinishedTable:
    """The rows so far of a .jsonl or .parquet file, which does not exist yet; made by `unfinished_table`.

    Values are what JSON can hold: others become their `str`, NaN and infinities null.
    """

    def __init__(self, path: Path, partial: Path, rows: int) -> None:
        self.path, self.partial, self.rows = path, partial, rows

    def __len__(self) -> int:
        return self.rows

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds `rows`; they are on disk when this returns."""
        append(self.partial, b"".join(map(json_line, rows)))
        self.rows += len(rows)

    def finish(self) -> None:
        """Puts the table into its place, whole."""
        lines = self.partial.read_bytes().split(b"\n")[1:-1]
        with replacing(self.path) as file:
            if self.path.suffix == ".parquet":
                import pyarrow.parquet

                rows = [json.loads(line) for line in lines]
                columns = dict.fromkeys(name for row in rows for name in row)
                table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
                pyarrow.parquet.write_table(table, file)
            else:
                file.writelines(line + b"\n" for line in lines)
        self.partial.unlink()


@contextmanager
def unfinished_table(path: str | Path, identity: Mapping[str, Any]) -> Iterator[UnfinishedTable]:
    """Opens the table that is to be at `path`, with the rows that an earlier process of the same `identity` wrote.

    They lie in PATH.partial: the identity in its first line, then a row a line. A line that a kill tore is cut off.

    Raises:
        ConfigError: they are of another identity, whose differences it names, or another process is writing.
    """
    path = Path(path)
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("a+b") as file:
        if not lock(file):
            raise ConfigError(f"{partial} belongs to another process, which goes on: wait, or stop it.")
        file.seek(0)
        content = file.read()
        whole, first = content[: content.rfind(b"\n") + 1], json_line(identity)
        file.truncate(len(whole))
        if not whole:
            append(partial, first)
        elif not whole.startswith(first):
            changes = differences(json.loads(whole.partition(b"\n")[0]), json.loads(first))
            raise ConfigError(
                f"{partial} was begun with other settings ({'; '.join(changes)}): run it with those, or remove the "
                "file to start afresh."
            )
        yield UnfinishedTable(path, partial, max(0, whole.count(b"\n") - 1))


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns `name: old → new` for every entry that differs."""
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return [f"{name}: {json.dumps(before.get(name))} → {json.dumps(now.get(name))}" for name in names]
