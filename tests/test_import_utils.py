"""Users' files and modules: every way to name one, executed once, with errors that lead to the mistake."""

import importlib
import os
import pickle
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from configs.import_utils import Neighbours, bind, forget_changed_files, load_extern_object, load_module, load_subclass
from configs.paths import ROOT

REWARD = """
import math

CALLS = []

class Judge:
    def __init__(self, strictness):
        self.strictness = strictness

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)

_private = 1
"""


@pytest.fixture
def reward_file(tmp_path):
    return written(tmp_path, my_reward=REWARD) / "my_reward.py"


def written(folder: Path, **files: str) -> Path:
    """Returns the folder, in which each of `files` is NAME.py."""
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A user's package on PYTHONPATH: user_pkg.rewards."""
    monkeypatch.syspath_prepend(tmp_path)
    yield written(tmp_path / "user_pkg", __init__="", rewards=REWARD)
    for name in [name for name in sys.modules if name.split(".")[0] == "user_pkg"]:
        del sys.modules[name]


def test_a_file_is_found_absolute_relative_and_as_a_url_and_executed_once(reward_file, monkeypatch):
    load_module(str(reward_file)).CALLS.append("kept")
    monkeypatch.chdir(reward_file.parent)
    for path in (str(reward_file), "my_reward.py", "./my_reward.py", f"file://{reward_file}"):
        assert load_extern_object(path, "compute_score")("any", "42", "42") == 1.0
        assert load_module(path).CALLS == ["kept"]


@pytest.mark.parametrize("is_importable", [False, True])
def test_a_file_that_threads_load_at_once_is_executed_once_and_seen_whole(tmp_path, monkeypatch, is_importable):
    if is_importable:
        monkeypatch.syspath_prepend(tmp_path)
    name = f"slow_{is_importable}"
    written(tmp_path, **{name: "import time\nSTARTS = []\nSTARTS.append(1)\ntime.sleep(0.3)\ndef late(): ..."})
    start = Barrier(8)

    def load(_):
        start.wait()
        return load_extern_object(str(tmp_path / f"{name}.py"), "late")

    with ThreadPoolExecutor(8) as pool:
        [loaded] = set(pool.map(load, range(8)))
    assert sys.modules[loaded.__module__].STARTS == [1]


@pytest.mark.parametrize("path", ["user_pkg.rewards", "pkg://user_pkg.rewards", "pkg://user_pkg/rewards"])
def test_a_module_is_found_by_its_dotted_name(package, path):
    assert load_extern_object(path, "compute_score")("any", "42", "41") == 0.0


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path):
    folders = [written(tmp_path / name, reward=f"FOLDER = {name!r}") for name in ("a", "b")]
    assert [load_module(str(folder / "reward.py")).FOLDER for folder in folders] == ["a", "b"]


def test_a_file_on_the_import_path_is_the_module_that_import_gives(package):
    by_path = load_extern_object(str(package / "rewards.py"), "Judge")
    assert by_path is importlib.import_module("user_pkg.rewards").Judge


def test_a_file_named_like_a_known_module_does_not_give_that_module(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("MINE = True")
    monkeypatch.syspath_prepend(tmp_path)
    assert load_module(str(tmp_path / "random.py")).MINE
    assert "MINE" not in vars(importlib.import_module("random"))


def test_objects_of_a_loaded_class_pickle(reward_file, package):
    for path in (reward_file, package / "rewards.py"):
        judge = load_extern_object(str(path), "Judge")(strictness=3)
        assert pickle.loads(pickle.dumps(judge)).strictness == 3


def test_a_loaded_file_imports_its_neighbours_now_and_later_and_sys_path_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    late = "def late():\n    import neighbour_later\n    return neighbour_later.MINE\n"
    written(tmp_path, mine=f"import neighbour_now, random\n\n{late}")
    written(tmp_path, **dict.fromkeys(("neighbour_now", "neighbour_later", "random"), "MINE = 7"))
    (tmp_path / "only_a_folder").mkdir()
    path = list(sys.path)
    module = load_module(str(tmp_path / "mine.py"))
    assert module.neighbour_now.MINE == module.late() == 7 and not hasattr(module.random, "MINE")
    assert sys.path == path and importlib.util.find_spec("only_a_folder") is None


def test_neighbours_are_found_where_import_finds_the_file_too_and_are_no_part_of_this_repository(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(Neighbours, "folders", [])  # a test before may have loaded files of a copy of this repository
    monkeypatch.syspath_prepend(tmp_path)
    written(tmp_path / "judges", scale="MINE = 7", mine="from scale import MINE")
    module = load_module(str(tmp_path / "judges/mine.py"))
    assert module.__name__ == "judges.mine" and module.MINE == 7
    load_module(str(ROOT / "custom/env_dataset.py"))
    assert importlib.util.find_spec("gym") is None


def test_a_module_of_the_working_directory_is_found_wherever_main_is(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_new_game.py").write_text("MINE = 7")
    assert load_module("my_new_game").MINE == 7


def test_a_missing_file_names_the_path_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"rewards/mine.py: there is no file {tmp_path}/rewards/mine.py"):
        load_module("rewards/mine.py")
    with pytest.raises(FileNotFoundError, match=r"^data.custom_cls.path=mine.py: there is no file"):
        load_subclass("mine.py", "Mine", object, "data.custom_cls.name")


def test_a_missing_module_says_that_it_is_neither_file_nor_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=f"no_such_pkg.rewards: neither a file in {tmp_path} nor a module"):
        load_module("no_such_pkg.rewards")


@pytest.mark.parametrize(
    ("source", "line", "kind"),
    [
        ("import math\n\nx = 1 / 0\n", 3, "ZeroDivisionError"),
        ("import no_such_library\n", 1, "ModuleNotFoundError"),
        ("x = 1\ndef broken(:\n", 2, "SyntaxError"),
    ],
)
def test_a_failing_file_shows_the_users_line_and_is_tried_again(tmp_path, source, line, kind):
    file = tmp_path / "failing.py"
    file.write_text(source)
    with pytest.raises(RuntimeError, match=f"Error loading module from {file}: {kind}") as caught:
        load_module(str(file))
    assert f'File "{file}", line {line}' in "".join(traceback.format_exception(caught.value.__cause__))
    file.write_text("repaired = 'now it is longer than before'\n" + "#" * 100)
    assert load_module(str(file)).repaired


def test_an_import_that_fails_inside_a_module_is_not_taken_for_a_missing_module(package):
    (package / "rewards.py").write_text("import no_such_library")
    with pytest.raises(RuntimeError, match=r"Error loading module from user_pkg.rewards: .*no_such_library"):
        load_module("user_pkg.rewards")


def test_a_missing_object_lists_the_public_ones(reward_file):
    with pytest.raises(AttributeError, match=r"has no 'compute_scores'; it has CALLS, Judge, compute_score\."):
        load_extern_object(str(reward_file), "compute_scores")


@pytest.mark.parametrize("name", [None, ""])
def test_a_path_without_a_name_is_refused(reward_file, name):
    with pytest.raises(ValueError, match="without the name of the object"):
        load_extern_object(str(reward_file), name)


def test_a_script_that_shares_a_folders_name_is_not_executed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    written(tmp_path, same_name="raise SystemExit('executed')")
    folder = written(tmp_path / "same_name", reward="value = 3")
    assert load_extern_object(str(folder / "reward.py"), "value") == 3


def test_a_function_is_given_what_it_names_and_in_any_case_what_is_set():
    offered = {"a": 1, "b": 2, "c": 3}
    assert bind(lambda b, size: (b, size), offered, {"size": 9})() == (2, 9)
    assert bind(lambda **kwargs: kwargs, offered, {"a": 9})() == {"a": 9, "b": 2, "c": 3}
    assert bind(lambda rows, mode, c: (rows, mode, c), offered, positional={"prompts": [7], "b": 0})() == ([7], 0, 3)


def test_what_a_function_lacks_or_does_not_accept_is_said_with_the_key_and_what_is_offered():
    def mine(rows, secret):
        pass

    given = {"positional": {"prompts": []}}
    with pytest.raises(ValueError, match=r"data\.key: .*mine\(rows, secret\) cannot be called: .*'secret'.* a, b"):
        bind(mine, {"a": 1, "b": 2}, key="data.key", **given)
    with pytest.raises(ValueError, match=r"unexpected keyword argument 'wight'.*my_kwargs=\{'wight': 1\}"):
        bind(mine, {"secret": 1}, {"wight": 1}, **given, settings="my_kwargs")


def test_a_file_that_would_get_another_files_neighbour_or_a_module_of_ours_is_refused_with_both_paths(tmp_path):
    written(tmp_path / "one", mine="import helpers_of_one_name", ours="from data.tables import read")
    written(
        tmp_path / "two", mine="from beside_two import late", beside_two="def late():\n    import helpers_of_one_name"
    )
    for folder in ("one", "two"):
        written(tmp_path / folder, helpers_of_one_name=f"NAME = {folder!r}")
    written(tmp_path / "one/data", __init__="")
    assert load_module(str(tmp_path / "one/mine.py")).helpers_of_one_name.NAME == "one"
    paths = "two/beside_two.py imports helpers_of_one_name, which is .*one/helpers_of_one_name.py here, not .*two/"
    with pytest.raises(ValueError, match=paths):
        load_module(str(tmp_path / "two/mine.py"))
    paths = f"imports data, which is {ROOT}/data.* here, not .*one/data/__init__.py: rename"
    with pytest.raises(ValueError, match=paths):
        load_module(str(tmp_path / "one/ours.py"))


def test_files_that_change_between_two_runs_of_a_process_are_executed_anew_with_those_beside_them(tmp_path):
    written(tmp_path, scale_of_two_runs="SCALE = 1", mine="from scale_of_two_runs import SCALE")
    forget_changed_files()
    first = load_module(str(tmp_path / "mine.py"))
    forget_changed_files()
    assert load_module(str(tmp_path / "mine.py")) is first
    (tmp_path / "scale_of_two_runs.py").write_text("SCALE = 20")
    later = time.time() + 1
    os.utime(tmp_path / "scale_of_two_runs.py", (later, later))
    forget_changed_files()
    assert load_module(str(tmp_path / "mine.py")).SCALE == 20
