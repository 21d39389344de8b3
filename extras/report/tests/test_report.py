"""The report of runs, on the side of Python: what is packed equals the records, and no folder is too broken to open."""

import base64
import json
import os
import re
import shutil
import zlib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from data.files import sole_run
from extras.report.__main__ import main
from extras.report.page import embed, page_data
from extras.report.runs import RunRecord, group_name, read_runs
from extras.report.samples import pack_samples
from tests.fake_runs import change_samples, write_run

NUMBERS = {"advantage": "advantages", "log_prob": "log_probs", "entropy": "entropys", "reward": "rewards"}
ALL = 10**8  # bytes of room: nothing is left out


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "fake")


def records(run):
    return [json.loads(line) for file in read_runs([run])[0].samples for line in file.path.read_text().splitlines()]


def inflate(packed):
    return zlib.decompress(base64.b64decode(packed))


def unpack(packed):
    """Undoes pack_samples, as samples.js does: for each sample its texts, ids, mask, detail, and numbers by name."""
    vocabulary, sizes, samples = json.loads(inflate(packed["vocabulary"])), iter(packed["columns"]["tokens"]), []
    for chunk in packed["chunks"]:
        content, total, at, columns = inflate(chunk["data"]), chunk["tokens"], 0, {}
        numbers = [(number["name"], "<i2" if number["bytes"] == 2 else "<f4") for number in chunk["numbers"]]
        assert numbers == sorted(numbers, key=lambda number: number[1]), "each begins at a multiple of its size"
        layout = [("ids", "<u4"), *numbers, ("mask", "u1")]
        for name, kind in layout:
            columns[name] = np.frombuffer(content, kind, total, at)
            at += columns[name].nbytes
        assert at == len(content)
        start = 0
        for detail in json.loads(inflate(chunk["details"])):
            part = slice(start, start := start + next(sizes))
            sample = {name: values[part] for name, values in columns.items()}
            sample |= {name: sample[name] / 1000 for name, kind in layout if kind == "<i2"}
            texts = [vocabulary["texts"][id] for id in sample["ids"]]
            ids = [vocabulary["ids"][id] for id in sample["ids"]]
            samples.append(sample | {"texts": texts, "ids": ids, "detail": detail})
    return samples


def test_what_is_packed_equals_the_records(run):
    packed, prompts_of = pack_samples(read_runs([run]), ALL), lambda row: "".join(row["prompt_texts"])
    prompts, samples = json.loads(inflate(packed["prompts"])), unpack(packed)
    found = records(run)
    assert len(samples) == len(found) == 96 and packed["left_out"] is None
    for place, (sample, record) in enumerate(zip(samples, found, strict=True)):
        [row] = record["rows"]
        lists = [row[name] for name in ("token_ids", "token_texts", "policy_mask")]
        assert [sample["ids"], sample["texts"], [*sample["mask"]]] == lists
        for name, key in NUMBERS.items():
            np.testing.assert_allclose(sample[name], row[key], atol=1e-3)
        np.testing.assert_allclose(sample["mismatch"], np.subtract(row["old_log_probs"], row["log_probs"]), atol=1e-3)
        assert "kl" not in sample and "value" not in sample  # not computed
        columns = {name: values[place] for name, values in packed["columns"].items()}
        assert columns["score"] == record["score"] and columns["length"] == 30
        assert prompts[columns["prompt"]] == prompts_of(row)
        assert packed["reasons"][columns["reason"]] == record["end_reason"]
        assert sample["detail"]["said"] == {"answer": "21", "explanation": record["explanation"]}
    groups = [(record["uid"], group) for record, group in zip(found, packed["columns"]["group"], strict=True)]
    assert len({uid for uid, _ in groups}) == len({group for _, group in groups}) == len({*groups})


def test_numbers_that_two_bytes_cannot_hold_and_those_that_are_none_are_kept(tmp_path):
    def change(record):
        row = record["rows"][0]
        row["values"] = [123.4567, None, -40_000_000.0, *[0.0] * 27]
        row["ref_log_prob"] = [log_prob - 0.25 for log_prob in row["old_log_probs"]]
        row["advantages"] = [9.0] * 3 + [1.0] * 27
        row |= {"policy_mask": [0] * 3 + [1] * 27, "loss_mask": [0] * 5 + [1] * 25}
        record["score"], row["rewards"] = 2.3e-10, [*[0.0] * 29, 2.3e-10]  # below a thousandth, and not 0

    change_samples(run := write_run(tmp_path / "run", steps=1, samples=24), change)
    packed = pack_samples(read_runs([run]), ALL)
    sample, columns = unpack(packed)[0], packed["columns"]
    assert (columns["advantage"][0], columns["length"][0], columns["tokens"][0]) == (1.0, 27, 30)  # of the policy alone
    np.testing.assert_allclose(sample["value"][[0, 2]], [123.4567, -40_000_000.0], rtol=1e-6)
    np.testing.assert_allclose([columns["score"][0], sample["reward"][-1]], [2.3e-10] * 2, rtol=1e-6)
    np.testing.assert_allclose(sample["kl"], 0.25, atol=1e-3)
    assert np.isnan(sample["value"][1]) and [*sample["mask"]] == [0] * 3 + [2] * 2 + [1] * 25


@pytest.mark.parametrize("share", [0.4, 0.7])
def test_whole_groups_are_left_out_evenly_where_there_is_no_room(run, share):
    everything = pack_samples(read_runs([run]), ALL)
    packed = pack_samples(read_runs([run]), int(len(json.dumps(everything)) * share))
    assert len(json.dumps(packed)) <= len(json.dumps(everything)) * share
    kept = [record["uid"] for record in records(run)]
    left = 12 - len({*packed["columns"]["group"]})
    assert packed["left_out"].startswith(f"{left} of 12 groups ({8 * left} samples)") and 0 < left < 12
    assert all(packed["columns"]["group"].count(group) == 8 for group in packed["columns"]["group"]), kept
    steps = [chunk["step"] for chunk in packed["chunks"] if chunk["kind"] == "train"]
    assert min(steps) <= 6 < max(steps)


@pytest.mark.parametrize("room", [-5_000, 0, 300])
def test_samples_for_which_curves_leave_no_room_are_missing(run, room):
    [record] = read_runs([run])
    assert pack_samples([record], room) is None
    assert record.missing == ["Its samples are left out: beside the curves there is no room for them."]


def put(before, after):
    return lambda text: text.replace(before, after, 1)


SAMPLES = "samples/train/2.jsonl"
BROKEN = {  # a file, what becomes of its text (None: it is not there; mkdir: it is a folder), and what is said of it
    "a torn line of metrics": ("metrics.jsonl", lambda text: text[:-20], "1 of 13 lines cannot be read"),
    "a step that is none": ("metrics.jsonl", put('"step": 3', '"step": "3"'), "1 of 13 lines cannot be read"),
    "NaN": ("metrics.jsonl", put('"timing_s/gen": 1.5', '"timing_s/gen": NaN'), "curves): timing_s/gen."),
    "a text": ("metrics.jsonl", put('"timing_s/gen": 1.5', '"timing_s/gen": "1.5"'), "curves): timing_s/gen."),
    "no metrics": ("metrics.jsonl", None, "There are no metrics yet"),
    "no validation": ("metrics.jsonl", lambda text: text.replace("val-core", "other"), "There was no validation"),
    "no run.json": ("run.json", None, "There is no run.json"),
    "a torn run.json": ("run.json", lambda text: text[:40], "run.json is broken"),
    "a run that never started": ("run.json", lambda _: '{"starts": []}', "run.json is broken"),
    "no config": ("config.yaml", None, "There is no config.yaml"),
    "a torn config": ("config.yaml", lambda _: "a: [", "config.yaml is broken"),
    "a config that is a folder": ("config.yaml", Path.mkdir, "config.yaml cannot be read (Is a directory)"),
    "a torn notice": ("events.jsonl", lambda text: text[:9], "1 of 1 lines cannot be read"),
    "a torn sample": (SAMPLES, lambda text: text[:-9], "2.jsonl: 1 samples cannot be read"),
    "a number that JSON has not": (SAMPLES, put('"score":', '"beyond": 1e999, "score":'), "2.jsonl: 1 samples cannot"),
    "a number that no token has": (SAMPLES, put('"rewards": [0.0', '"rewards": [1e308'), "2.jsonl: 1 samples cannot"),
    "a score that is a text": (SAMPLES, put('"score": ', '"score": "1", "s": '), "2.jsonl: 1 samples cannot"),
    "texts that are none": (SAMPLES, put('"token_texts": ["', '"token_texts": [3, "'), "2.jsonl: 1 samples cannot"),
    "samples that are a folder": (SAMPLES, Path.mkdir, "train/2.jsonl cannot be read (Is a directory)"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_run_is_shown_and_says_what_is_missing(tmp_path, case):
    file, change, said = BROKEN[case]
    path = write_run(tmp_path / "run") / file
    text = path.read_text()
    path.unlink()
    if change is Path.mkdir:
        path.mkdir()
    elif change:
        path.write_text(change(text))
        assert path.read_text() != text
    data = page_data(read_runs([tmp_path / "run"]), ALL)
    [sentence] = data["runs"][0]["missing"]
    assert said in sentence
    embed(data)


@pytest.mark.parametrize(
    ("names", "group"),
    [
        ("p2 seed=0 lr=0.001, p2 seed=1 lr=0.001", "p2 lr=0.001"),
        ("lr=0.001 seed=9, lr=0.001 seed=10", "lr=0.001"),
        ("seed0_a, seed1_a", "a"),
        ("a_seed_0, a_seed_1", "a"),
        ("p data.seed=0 trainer.seed=1, p data.seed=1 trainer.seed=1", "p trainer.seed=1"),
        ("seed_0, seed_1", "seed"),
        ("run.0, run.1", "run"),
        ("tiny_train.jsonl_0c44, tiny_train.jsonl_a1b2", "tiny_train.jsonl"),
        ("one, two", "one"),
        ("7, 8", "7"),
    ],
)
def test_a_group_is_named_by_the_words_that_its_runs_share(names, group):
    runs = [
        RunRecord(name, Path(name), config={"trainer": {"seed": seed}}) for seed, name in enumerate(names.split(", "))
    ]
    assert group_name(runs) == f"{group} (2 seeds)"
    assert group_name(runs[:1]) == runs[0].name


def test_runs_that_differ_in_the_seed_alone_are_one_group_whatever_their_names_are(tmp_path):
    """Two seeds of two settings, one seed of a third, and a run of which no config is left."""
    asked = [("x0y", 0, 1), ("other", 1, 1), ("p2 seed=0 epochs=2", 0, 2), ("p2 seed=1 epochs=2", 1, 2), ("b", 0, 3)]
    folders = [write_run(tmp_path / name, 30, 0, seed=seed, total_epochs=epochs) for name, seed, epochs in asked]
    folders.append(write_run(tmp_path / "c", 30, 0))
    (folders[-1] / "config.yaml").unlink()
    info = json.loads((folders[0] / "run.json").read_text())
    info["starts"][-1]["versions"]["torch"] = "2.14.0"
    (folders[0] / "run.json").write_text(json.dumps(info))
    data = page_data(runs := read_runs(folders), ALL)
    groups = ["x0y (2 seeds)", "p2 epochs=2 (2 seeds)", "b", "c"]
    assert [run["group"] for run in data["runs"]] == [groups[0]] * 2 + [groups[1]] * 2 + groups[2:]
    assert data["title"] == ", ".join(groups) and [mean["group"] for mean in data["means"]] == groups[:2]
    assert {row["key"]: row["values"] for row in data["varied"]} == {
        "trainer.seed": ["0", "1", "0", "1", "0", None],
        "trainer.total_epochs": ["1", "1", "2", "2", "3", None],
    }
    changed = {row["key"]: row["values"] for row in data["differences"]}
    assert changed["version of torch"] == ["2.14.0"] + ["2.13.0"] * 5 and "version of python" not in changed
    lasts = [sum(run.metrics["critic/score/mean"].values[-10:]) / 10 for run in runs[:2]]
    shown = data["means"][0]["headline"]["Mean score in training"]
    assert shown == f"{np.mean(lasts):.3g} ± {np.std(lasts):.3g}"
    again = write_run(tmp_path / "again", 2, 0, seed=1, total_epochs=1)
    same_seed = read_runs([folders[1], tmp_path / "b/../other", again])  # one of them by two names
    assert [run.group for run in same_seed] == ["other (2 runs)"] * 2


def test_a_long_run_keeps_every_so_many_points_and_the_last(tmp_path):
    run = write_run(tmp_path / "run", steps=2_100, samples=0)
    (run / "events.jsonl").write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(2_005)))
    data = page_data(read_runs([run]), ALL)
    [curve] = data["metrics"]["actor/entropy"]
    assert len(curve["steps"]) == len(curve["values"]) == 700 and curve["steps"][-2:] == [2097, 2100]
    assert "Of its 2101 steps, one in 3 is in the curves." in data["runs"][0]["missing"]
    assert [event["text"] for event in data["runs"][0]["events"]] == [*map(str, range(5, 2_005))]


@pytest.mark.parametrize("state", ["done", "failed", "killed", "running", "ended"])
def test_the_state_says_how_a_run_ended(tmp_path, state):
    path = write_run(tmp_path / "run", samples=0) / "run.json"
    info = json.loads(path.read_text())
    info["starts"][-1]["ending"] = state if state in ("done", "failed") else None
    path.write_text(json.dumps(info))
    if state == "ended":  # whether it goes on is not known
        (path.parent / "run.lock").mkdir()
    with sole_run(path.parent) if state == "running" else nullcontext():
        assert read_runs([path.parent])[0].state == state
    path.unlink()
    assert state != "ended" or read_runs([path.parent])[0].state == state


def test_a_dump_of_all_rollouts_goes_before_the_samples_but_not_that_of_an_earlier_run(tmp_path):
    run, dumps = write_run(tmp_path / "run", steps=2, rollout_data_dir=str(tmp_path / "dumps")), tmp_path / "dumps"
    dumps.mkdir()
    for step in (1, 2, 3):
        shutil.copy(run / "samples/train/1.jsonl", dumps / f"{step}.jsonl")
    for step in (2, 3):
        os.utime(dumps / f"{step}.jsonl", (0, 0))
    found = {file.step: file.path.parent.name for file in read_runs([run])[0].samples if file.kind == "train"}
    assert found == {1: "dumps", 2: "train"}


def test_a_folder_of_runs_is_all_of_them_and_one_without_a_run_is_left_out(tmp_path, capsys):
    for name in ("b", "a"):
        write_run(tmp_path / name, steps=1, samples=0)
    (tmp_path / "a_model").mkdir()
    main([str(tmp_path)])
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'report.html'}\n" and said.err == ""
    data = re.search(r'id="data">(.*?)</script>', (tmp_path / "report.html").read_text())[1]
    assert [run["name"] for run in json.loads(data)["runs"]] == ["a", "b"]
    main([str(tmp_path / "a_model"), str(tmp_path / "b")])
    said = capsys.readouterr()
    assert said.out == f"{tmp_path / 'b/report.html'}\n"
    assert said.err == f"notice: {tmp_path / 'a_model'} is left out: there is no run in it.\n"


REFUSED = {
    "no run": (["{}/run", "{}/none"], "{}/none is no folder of a run: it is not there"),
    "a file of a run": (["{}/run/metrics.jsonl"], "{}/run/metrics.jsonl is no folder of a run: it is a file"),
    "an empty folder": (["{}/run/samples"], "{}/run/samples is no folder of a run: it has neither metrics.jsonl nor"),
    "a page that is a folder": (["{}/run", "--out", "{}"], "{} cannot be written (Is a directory): name another"),
    "a page in a file": (["{}/run", "--out", "{}/run/run.json/a"], "{}/run/run.json/a cannot be written ("),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shown_is_refused_in_a_sentence(tmp_path, capsys, case):
    write_run(tmp_path / "run", steps=1, samples=0)
    command, said = REFUSED[case]
    with pytest.raises(SystemExit) as ended:
        main([word.format(tmp_path) for word in command])
    assert ended.value.code == 2 and f"error: {said.format(tmp_path)}" in capsys.readouterr().err
