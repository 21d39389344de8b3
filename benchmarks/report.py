"""Measures the report of runs in Debian's chromium: python -m benchmarks.report [--samples N] [--tokens N]

Writes a run with N samples (10,000) of N tokens (200) and its page, and says how large that is and how long it takes to
build, to open, to show the first sample and to search all texts. Each time is the median of three.

`--screenshots RUN RUN SAMPLE` instead takes the pictures of docs/report.md: summary and curves of one run, and of
another a sample, by its link: outputs/quickstart outputs/calculator_tool 0.train.8.0.
"""

import argparse
import io
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from extras.report.__main__ import write_report
from tests.browser import Browser, chromium
from tests.fake_runs import write_run

ROOT = Path(__file__).resolve().parents[1]
REPEATS = 3
UNTIL = """
const [act, there, done] = arguments, began = performance.now();
(0, eval)(act);
const look = () => (eval(there) ? done((performance.now() - began) / 1000) : setTimeout(look, 5));
look();
"""
FIRST_SAMPLE = ("location.hash = 'samples'", "document.querySelector('.view .token')")
SEARCH = (
    "found = document.querySelector('.samples input[type=search]'); found.value = 'no such text'; "
    "found.dispatchEvent(new Event('input'))",
    "/^0 of [0-9,]+ samples$/.test(document.querySelector('.samples .bar > [role=status]').textContent)",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--screenshots", nargs=3, metavar=("RUN", "RUN", "SAMPLE"))
    arguments = parser.parse_args()
    with chromium() as driver, TemporaryDirectory() as folder:
        if arguments.screenshots:
            take_pictures(Browser(driver), *arguments.screenshots, Path(folder))
        else:
            for name, figure in measure(Browser(driver), arguments.samples, arguments.tokens, Path(folder)).items():
                print(f"{name:32} {figure:12,.2f}")


def measure(browser: Browser, samples: int, tokens: int, folder: Path) -> dict[str, float]:
    run = write_run(folder / "run", steps=50, samples=samples, tokens=tokens)
    began = time.perf_counter()
    page = write_report([run])
    built = time.perf_counter() - began
    times = [open_and_search(browser, page) for _ in range(REPEATS)]
    return {
        "MB": page.stat().st_size / 1e6,
        "bytes a token": page.stat().st_size / (samples * tokens),
        "s to build": built,
        **{name: median(one[name] for one in times) for name in times[0]},
    }


def open_and_search(browser: Browser, page: Path) -> dict[str, float]:
    began = time.perf_counter()
    browser.open(page)
    browser.drawn()
    opened = time.perf_counter() - began
    until: Callable[..., Any] = browser.driver.execute_async_script
    first, searched = until(UNTIL, *FIRST_SAMPLE), until(UNTIL, *SEARCH)
    heap = browser.run("return performance.memory.usedJSHeapSize / 1e6")
    return {"s to open, charts drawn": opened, "s to the first sample": first, "s to search": searched, "MB heap": heap}


def take_pictures(browser: Browser, run: str, other: str, sample: str, folder: Path) -> None:
    one, two = (write_report([Path(path)], folder / f"{place}.html") for place, path in enumerate((run, other)))
    pictures = {
        "report": (one, "summary"),
        "report_curves": (one, "curves"),
        "report_samples": (two, f"sample={sample}"),
    }
    for name, (page, place) in pictures.items():
        browser.open(f"{page.as_uri()}#{place}", width=1200)
        browser.drawn()
        if "sample" in place:
            browser.click("#colour option", "log-prob")
        browser.run("scrollTo(0, 0)")
        picture = Image.open(io.BytesIO(browser.driver.get_screenshot_as_png())).convert("RGB")
        bottom = browser.run("return document.querySelector('main').getBoundingClientRect().bottom")
        path = ROOT / "docs" / f"{name}.png"
        picture = picture.crop((0, 0, picture.width, min(picture.height, round(bottom))))
        picture.quantize(112, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
        print(f"{path} {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
