"""Paths lead to shipped defaults from every working directory, to users' own from theirs, to scripts as files."""

import csv
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.import_utils import load_module
from configs.paths import ROOT, check_model_path, expand_home, find_path, row_bound, source_files
from data.rows import read_rows

# Runs each file as `python FILE --help` from elsewhere would, in one process: only its own folder is on the path.
AS_FILES = """
import contextlib, runpy, sys
from pathlib import Path
plain = [entry for entry in sys.path if entry and Path(entry).resolve() != Path(sys.argv[1])]
for file in sys.argv[2:]:
    sys.path[:] = [str(Path(file).parent), *plain]
    sys.argv[1:] = ["--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_path(file, run_name="__main__")
    for name in [name for name in sys.modules if name == "configs" or name.startswith("configs.")]:
        del sys.modules[name]
"""


def test_what_is_shipped_is_found_from_elsewhere_and_the_users_own_goes_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = ROOT / "custom" / "env_wrapper.py"
    assert find_path("custom/env_wrapper.py") == find_path(shipped) == shipped
    assert find_path("no/such.py") == Path("no/such.py")
    (tmp_path / "custom").mkdir()
    (tmp_path / "custom" / "env_wrapper.py").write_text("MINE = True\n")
    assert find_path("custom/env_wrapper.py") == Path("custom/env_wrapper.py")
    assert load_module("custom/env_wrapper.py").MINE


def test_a_shipped_model_is_found_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "repository" / "outputs" / "quickstart" / "warm_start"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    monkeypatch.setattr("configs.paths.ROOT", tmp_path / "repository")
    key = "actor_rollout_ref.model.path"
    assert check_model_path("outputs/quickstart/warm_start", key) == str(model)
    with pytest.raises(ValueError, match="there is no such folder"):
        check_model_path("outputs/quickstart/cold_start", key)
    model.rename(model.with_name("huggingface"))
    with pytest.raises(ValueError, match=r"no config.json, so it is .*It holds one: .*quickstart/huggingface$"):
        check_model_path("outputs/quickstart", key)


def test_home_is_spelt_out_at_the_start_of_a_path_alone():
    home = str(Path.home())
    assert expand_home("~/a") == f"{home}/a" and expand_home(["~/a", "b~/c"]) == [f"{home}/a", "b~/c"]
    assert expand_home("a~b") == "a~b" and expand_home(None) is None and expand_home("~a") == "~a"


def test_scripts_run_as_files_from_anywhere_as_they_do_as_modules(tmp_path):
    scripts = [f"scripts/{name}.py" for name in ("quickstart", "smollm2", "algorithms")]
    files = [str(ROOT / name) for name in scripts]
    command = [sys.executable, "-c", AS_FILES, str(ROOT), *files]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(scripts)


@pytest.mark.parametrize(
    ("files", "glob_of_one"),
    [
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], "**/*train*"),
        (["sums_train.csv", "sums_dev.csv"], "**/*train*"),
        (["validation/0.parquet", "eval/0.parquet"], "**/validation/**/*"),
    ],
)
def test_a_folder_of_several_splits_is_refused_with_the_glob_of_one(tmp_path, files, glob_of_one):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    with pytest.raises(ValueError, match=re.escape(f"name the files of one, as '{tmp_path}/{glob_of_one}'")):
        source_files(tmp_path)
    assert source_files(tmp_path / glob_of_one) == [tmp_path / files[0]]


def test_files_whose_names_only_contain_a_splits_name_are_one_set(tmp_path):
    for file in ("contest.jsonl", "trainer.jsonl", "train/a.jsonl"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert len(source_files(tmp_path)) == 3


@pytest.mark.parametrize("kind", ["jsonl", "spaced.jsonl", "json", "pretty.json", "csv", "parquet"])
@given(texts=st.lists(st.text("a{\n\r\u2028,", min_size=1), min_size=1, max_size=6), enough=st.integers(1, 8))
def test_a_file_has_no_more_rows_than_are_counted_without_parsing_it(tmp_path_factory, kind, texts, enough):
    file, rows = tmp_path_factory.mktemp("rows") / f"rows.{kind}", [{"prompt": text} for text in texts]
    match kind:
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        case "csv":
            with file.open("w", newline="") as opened:
                csv.writer(opened).writerows([["prompt"], *([text] for text in texts)])
        case "json" | "pretty.json":
            file.write_text(
                "\ufeff\n" * (kind == "json") + json.dumps(rows, indent=1 if kind == "pretty.json" else None)
            )
        case _:
            file.write_text(("\n \n" * kind.startswith("s") or "\n").join(map(json.dumps, rows)))
    counted = row_bound(file, enough)
    assert counted >= min(len(read_rows(file)), enough)
    if not any(set("{\n\r") & set(text) for text in texts):
        assert counted == len(rows) or counted >= enough


def test_rows_of_files_that_others_read_are_not_counted(tmp_path):
    for name in ("rows.jsonl.gz", "state.json", "rows.tsv", "broken.parquet"):
        (tmp_path / name).write_text("{}")
        assert row_bound(tmp_path / name, 9) == math.inf
