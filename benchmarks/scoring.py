"""Measures what scoring in processes costs, and what it saves: python -m benchmarks.scoring [--rows N] [--seconds S]

Two functions, each in this process and in processes (extras/scorers): one that is done at once, whose difference
is the cost of a row, and one that waits S seconds (0.05), as a judge behind a network does. Times are of calls alone,
once the processes run; the slow one's of the serial time beside.
"""

import argparse
import tempfile
import time
from pathlib import Path

from configs.schema import RewardFunctionConfig, ScoringConfig
from extras.scorers.pool import Scorers

FUNCTIONS = """
import time
def compute_score(solution_str, ground_truth):
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
def waits(solution_str, seconds):
    time.sleep(seconds)
    return 1.0
"""
TEXT = "so it is 4. " * 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1000, help="responses (1000)")
    parser.add_argument("--seconds", type=float, default=0.05, help="that the slow function waits (0.05)")
    arguments = parser.parse_args()
    for name, figure in measure(arguments.rows, arguments.seconds).items():
        print(f"{name:45} {figure:10.3f}")


def measure(rows: int, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "functions.py"
        file.write_text(FUNCTIONS)
        here: dict = {}
        exec(compile(FUNCTIONS, str(file), "exec"), here)
        quick = {"solution_str": TEXT, "ground_truth": "4"}
        in_process = timed(lambda: [here["compute_score"](**quick) for _ in range(rows)])
        pool = Scorers(here["compute_score"], RewardFunctionConfig(str(file)), ScoringConfig())
        pool.submit(quick).result()
        in_processes = timed(lambda: [one.result() for one in [pool.submit(quick) for _ in range(rows)]])
        pool.close()
        slow = Scorers(here["waits"], RewardFunctionConfig(str(file), "waits", {"seconds": seconds}), ScoringConfig())
        waited = timed(lambda: [one.result() for one in [slow.submit({"solution_str": TEXT}) for _ in range(rows)]])
        slow.close()
    return {
        "ms a row, in this process": 1e3 * in_process / rows,
        "ms a row, in processes": 1e3 * in_processes / rows,
        f"s for {rows} rows of {seconds:g} s, start included": waited,
        "of the serial time": waited / (rows * seconds),
    }


def timed(work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
