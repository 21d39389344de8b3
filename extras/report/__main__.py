"""Writes the report of runs: one page with their curves, samples, times, settings and what looks wrong.

It opens in a browser, needs no network, and may be moved or sent: `python -m extras.report outputs/quickstart`.
"""

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from configs.errors import notice, printable, refusals


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m extras.report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, or of runs")
    parser.add_argument(
        "--out", type=Path, help="the page; report.html in the folder that is given, or of the first run of several"
    )
    parser.add_argument("--serve", action="store_true", help="write no page; show it here, with new steps as they come")
    parser.add_argument("--port", type=int, help="of --serve; any that is free, if not given")
    arguments = parser.parse_args(argv)
    if arguments.out and arguments.serve:
        parser.error("--out writes a page, and --serve writes none: leave one of them out")
    if arguments.port is not None and not arguments.serve:
        parser.error("--port is of --serve, which is not there: add it")
    with refusals():
        runs = runs_among(arguments.runs)
        if arguments.serve:
            serve(runs, arguments.port or 0)
        else:
            first = arguments.runs[0] if len(arguments.runs) == 1 else runs[0]
            print(printable(str(write_report(runs, arguments.out or first / "report.html"))))


def runs_among(folders: Sequence[Path]) -> Sequence[Path]:
    """Replaces a folder of runs by its runs, and leaves out folders without a run, with a notice for each.

    All stay if none has a run.
    """
    from extras.report.runs import holds_run

    runs: list[Path] = []
    empty = []
    for folder in folders:
        is_one = holds_run(folder) or not folder.is_dir()
        chosen = [folder] if is_one else sorted(filter(holds_run, folder.glob("*")))  # which passes over closed folders
        runs += chosen
        empty += [] if chosen else [folder]
    for folder in empty if runs else ():
        notice(f"{folder} is left out: there is no run in it.")
    return runs or folders


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Writes the report of runs, and returns its path. Raises ValueError if one is none, or if it cannot be written."""
    from data.files import replacing
    from extras.report.page import build_page
    from extras.report.runs import read_runs

    runs = read_runs(folders)
    out = out or folders[0] / "report.html"
    page = build_page(runs).encode()
    try:
        with replacing(out) as file:
            file.write(page)
    except OSError as error:
        raise ValueError(f"{out} cannot be written ({error.strerror}): name another file with --out.") from error
    return out


def serve(folders: Sequence[Path], port: int) -> None:
    """Serves the report until Ctrl-C. Raises ValueError for a folder that is no run, and for a port that is taken."""
    from extras.report.server import ReportServer

    with ReportServer(folders, port) as server, suppress(KeyboardInterrupt):
        print(f"{server.address} shows the report, on this machine alone; Ctrl-C ends it", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
