"""The script of FrozenLake by pixels, at toy size; at full size it is `make pixels`."""

import json
from pathlib import Path

from extras.images.env_dataset import COLOURS, lake_picture
from tests.forked import python
from tests.runs import short_run

TOY = "import scripts.pixels as pixels; pixels.STATES = 128; pixels.main()"


def test_a_map_is_drawn_with_a_colour_a_cell():
    class State:
        text = "PF\nHG"

    pixels = lake_picture(None, State())
    assert pixels.shape == (8, 8, 3)
    assert [tuple(pixels[y, x]) for y, x in ((0, 0), (3, 4), (4, 3), (7, 7))] == [COLOURS[cell] for cell in "PFHG"]


def test_the_script_trains_from_random_weights_and_measures(tmp_path: Path):
    settings = short_run(tmp_path / "warm_start", tmp_path / "run", "trainer.total_training_steps=2")
    done = python("-c", TOY, *settings)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert {"before", "after", "seed"} <= summary.keys() and "success on 200 held-out maps" in done.stdout
    assert len((tmp_path / "run/demonstrations_1.jsonl").read_text().splitlines()) == 128
