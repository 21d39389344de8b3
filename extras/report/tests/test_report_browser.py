"""The report as its reader sees it, in a real browser; and its server."""

import json
import shutil
import threading
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import pytest
import yaml
from selenium.webdriver import Chrome

from extras.report import page
from extras.report.__main__ import main, write_report
from extras.report.server import ReportServer
from tests.browser import Browser, chromium
from tests.fake_runs import change_samples, write_run


@pytest.fixture(scope="module")
def driver() -> Iterator[Chrome]:
    try:
        with chromium() as driver:
            yield driver
    except FileNotFoundError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def browser(driver: Chrome) -> Iterator[Browser]:
    """A browser that, at the end, has said nothing and asked for nothing."""
    browser = Browser(driver)
    yield browser
    assert browser.complaints() == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs that differ in their seeds, and a third with a long name."""
    folder = tmp_path_factory.mktemp("runs")
    more = [{"seed": 0}, {"seed": 1}, {"seed": 0, "total_epochs": 2}]
    names = "a1", "a2", "b" + "_long" * 20
    return [write_run(folder / name, 30, 256, 20, **one) for name, one in zip(names, more, strict=True)]


@pytest.fixture(scope="module")
def report(runs: list[Path]) -> Path:
    return write_report(runs)


@pytest.mark.parametrize(("width", "dark"), [(400, True), (1600, False)])
def test_each_tab_fits_its_window_and_each_chart_is_drawn(browser, report, width, dark):
    browser.open(report, width, dark)
    browser.see("nav a")  # on a busy machine a page is there before its script has run
    drawn = []
    for tab in browser.texts("nav a"):
        browser.turn_to(tab)
        drawn += browser.drawn()
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), tab
        assert not browser.run("return [...document.querySelectorAll('button')].some((one) => one.scrollHeight > 30)")
    assert len(drawn) == 9
    [shade] = browser.run("return [getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)]")
    assert (sum(shade) < 3 * 128) == dark


NAMES = {"advantage": "advantages", "log-prob": "log_probs", "entropy": "entropys", "reward": "rewards"}


def test_samples_are_sorted_and_found_and_tokens_tell_the_numbers_of_the_batch(browser, report, runs):
    browser.open(report)
    browser.turn_to("Samples")
    browser.see(".bar", "768 samples")
    for score in "10":
        browser.click(".heads button", "score")
        assert [row.text.split("\n")[1] for row in browser.all(".sample")[:5]] == [score] * 5
    for choice in ("a2", "train"):
        browser.click("option", choice)
    browser.click("input[type=search]")
    browser.press("EXPECTED 21, found 3")
    every = [json.loads(line) for path in (runs[1] / "samples/train").iterdir() for line in path.open()]
    wanted = [record for record in every if "expected 21, found 3" in record["explanation"]]
    browser.see(".bar", f"{len(wanted)} of 768 samples")
    browser.open(f"{report.as_uri()}#sample=1.train.20.2")
    browser.see(".view h2", "Step 20, train")
    [row] = json.loads((runs[1] / "samples/train/20.jsonl").read_text().splitlines()[2])["rows"]
    assert "".join(browser.texts(".view .token")) == "".join(row["token_texts"])
    browser.point(browser.all(".view .token")[7])
    told = dict(zip(browser.texts("#tip dt"), browser.texts("#tip dd"), strict=True))
    assert json.loads(told["token"]) == row["token_texts"][7] and told["id"] == str(row["token_ids"][7])
    numbers = {name: row[column][7] for name, column in NAMES.items()}
    numbers["mismatch"] = row["old_log_probs"][7] - row["log_probs"][7]
    assert {name: float(told[name]) for name in numbers} == pytest.approx(numbers, abs=1e-3)


def test_a_run_of_which_metrics_alone_are_left_opens(browser, tmp_path):
    run = write_run(tmp_path / "run \udcff", 3, 40, 5)  # a name that is no UTF-8
    for path in run.iterdir():
        if path.name != "metrics.jsonl":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "data": {"mine": NaN}}\n{"step": 5, "da')
    browser.open(write_report([run]))
    assert "Not a number" in browser.see("main").text and "torn" in browser.see("main").text
    for tab in browser.texts("nav a"):
        browser.turn_to(tab)
        browser.drawn()
        assert browser.see("main > :not([hidden])")


MARKUP = "</script></title><script>ran=1</script><img src=x onerror=ran=2><!--<script>${ran=3}{{data}}"
PLANTED = f"{MARKUP}\u2028\x00\x1b[31m\ud800\U0001f642\u202elive"
SEEN = f"{MARKUP}⟨U+2028⟩␀␛[31m⟨U+D800⟩\U0001f642⟨U+202E⟩live"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose every text is hostile."""
    run = write_run(tmp_path_factory.mktemp("runs") / "hostile", 2, 64, 5)
    config = {"trainer": {"experiment_name": PLANTED.replace("\ud800", "")}}  # half a character is no yaml
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    for name, line in {
        "metrics.jsonl": {"step": 2, "data": {f"mine/{PLANTED}": 1.0}},
        "events.jsonl": {"time": PLANTED, "step": 1, "level": PLANTED, "logger": PLANTED, "text": PLANTED},
    }.items():
        with (run / name).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def plant(record: dict) -> None:
        record |= dict.fromkeys(("input", "output", "gts", "end_reason", "data_source", "explanation", "uid"), PLANTED)
        record["extra_info"], record["rows"][0]["prompt_texts"] = {PLANTED: PLANTED}, [PLANTED]
        record["rows"][0]["token_texts"][1] = PLANTED

    change_samples(run, plant)
    return run


def test_hostile_text_is_shown_and_runs_nothing(browser, hostile):
    browser.open(write_report([hostile]))
    assert browser.run("return document.scripts.length + document.images.length") == 3
    assert browser.see("h1").text == SEEN.replace("⟨U+D800⟩", "")
    browser.turn_to("Curves")
    browser.click("input[type=search]")
    browser.press("mine")
    browser.click("button", f"mine/{SEEN}")
    browser.drawn()
    browser.turn_to("Samples")
    browser.see(".view .token", SEEN)
    for shown in (".snippet", ".view .prompt", ".view dd", ".view .scored b", ".view pre, .view dl", ".sample span"):
        assert any(SEEN in text for text in browser.texts(shown)), shown
    browser.point(browser.all(".view .token")[1])
    assert "onerror" in browser.see("#tip").text
    browser.turn_to("Details")
    assert SEEN in browser.see("table").text
    assert browser.run("return window.ran ?? null") is None
    assert browser.run("return document.scripts.length + document.images.length") == 3


def test_without_escapes_the_policy_of_hashes_lets_nothing_run(browser, hostile, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "embed", lambda data: json.dumps(data))
    browser.open(write_report([hostile], tmp_path / "raw.html"))
    assert "connect-src" not in (tmp_path / "raw.html").read_text()  # which a served page may do
    browser.wait(lambda: browser.run("return document.readyState") == "complete")
    assert browser.run("return document.images.length") and browser.run("return window.ran ?? null") is None
    said = browser.complaints()
    assert any("inline script" in line for line in said) and any("inline event handler" in line for line in said), said


@pytest.fixture
def live(tmp_path: Path) -> Iterator[ReportServer]:
    """A server of the report of a run in `tmp_path`/live."""
    write_run(tmp_path / "live", steps=3, samples=80, tokens=5)
    with ReportServer([tmp_path / "live"]) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: ReportServer, path: str, host: str | None = None, method: str = "GET") -> HTTPResponse:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers={"Host": host} if host else {})
    return connection.getresponse()


def steps_of(data: dict) -> list[int]:
    return data["metrics"]["actor/entropy"][0]["steps"]


def test_the_server_answers_this_machine_with_the_page_and_its_data_alone(live):
    assert live.server_address[0] == "127.0.0.1"
    for path, host, status in (
        ("/", None, 200), ("/", "localhost:1", 200),  # as where a port is handed on by ssh
        ("/", "attacker.example:80", 403), ("/data", "attacker.example", 403),
        ("/data", "127.0.0.1.attacker.example", 403), ("/run.json", None, 404), ("/../config.yaml", None, 404),
    ):  # fmt: skip
        answer = ask(live, path, host)
        text = answer.read().decode()
        assert answer.status == status and answer.headers["Cache-Control"] == "no-store", (path, host)
        assert ("critic/score/mean" in text) == ("connect-src 'self'" in text) == (status == 200), (path, host)


def test_a_served_page_takes_new_steps_in_and_keeps_ones_place(browser, live, tmp_path):
    browser.open(f"{live.address}#samples")
    browser.see("[role=status]", "live")
    browser.see(".bar", "80 samples")
    browser.click("option", "train")
    browser.click(".heads button", "score")
    browser.all(".sample")[2].click()
    before = [browser.driver.current_url, browser.see(".view").text]
    with live.report.lock:  # a run writes its samples first, and each file whole
        write_run(tmp_path / "live", steps=4, samples=96, tokens=5)
    browser.see(".bar", "64 of 112 samples")
    assert browser.texts("[aria-sort=descending]") == ["score"]
    assert [browser.driver.current_url, browser.see(".view").text] == before
    live.shutdown()
    live.server_close()
    browser.see("[role=status]", "the server has ended")
    browser.open("about:blank")


def test_the_server_has_new_steps_and_says_when_there_are_none(live):
    data = json.loads(ask(live, "/data").read())
    assert steps_of(data) == [1, 2, 3]
    assert ask(live, f"/data?have={data['version']}").status == 204
    with (live.report.folders[0] / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "data": {"actor/entropy": 1.0}}) + "\n")
    live.report.rests_until = float("inf")
    assert ask(live, f"/data?have={data['version']}").status == 204, "the cores are the run's"
    live.report.rests_until = 0.0
    newer = json.loads(ask(live, f"/data?have={data['version']}").read())
    assert steps_of(newer) == [1, 2, 3, 4] and newer["version"] != data["version"]
    (live.report.folders[0] / "metrics.jsonl").unlink()
    (live.report.folders[0] / "run.json").unlink()
    live.report.rests_until = 0.0
    gone = ask(live, "/data")
    assert gone.status == 503 and "is no folder of a run" in gone.read().decode()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--serve", "--out", "a.html"], "leave one of them out"),
        (["--port", "80"], "--port is of --serve"),
        (["--serve"], "is not there"),
        (["--serve", "--port", "{taken}"], "name another"),
    ],
)
def test_what_cannot_be_served_is_refused(live, tmp_path, capsys, words, said):
    folder = tmp_path / ("live" if "{taken}" in words[-1] else "none")
    with pytest.raises(SystemExit) as ended:
        main([str(folder), *(word.format(taken=live.server_port) for word in words)])
    assert ended.value.code == 2 and said in capsys.readouterr().err
