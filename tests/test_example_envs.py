"""The examples of examples/, each with the real package, where it is installed (requirements-envs.txt)."""

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from custom.env_wrapper import make_env
from custom.gym.world import split_id
from examples.careful_lake import CarefulWalk
from tests.forked import python

MINIGRID = "examples/minigrid_env.py:"
CONNECT_FOUR = "examples/pettingzoo_env.py:ConnectFour-v0"
TICTACTOE = "examples/textarena_env.py:TicTacToe-v0"


IDS = {"minigrid": f"{MINIGRID}MiniGrid-Empty-5x5-v0", "textarena": TICTACTOE, "pettingzoo": CONNECT_FOUR}
IDS["openenv"] = "openenv:http://x"


@pytest.mark.parametrize("package", IDS)
def test_without_its_package_an_example_says_what_to_install(package):
    made = f"from custom.env_wrapper import make_env\nmake_env({IDS[package]!r})"
    ran = python("-c", f"import sys; sys.modules[{package!r}] = None\n{made}")
    assert f"needs the package {package}: pip install -c constraints.txt -r requirements-envs.txt" in ran.stderr


def test_a_careful_walk_marks_right_moves_that_pass_by_a_hole():
    """Right and down are both optimal, and only right leads beside the hole."""
    lake = {"desc": ("SFFF", "FFFH", "FFFF", "FFFG"), "is_slippery": False, "instruction": ""}
    walk = CarefulWalk(make_env("FrozenLake-v1", **lake))
    state = replace(walk.environment.start_state(0), actions=(1, 2), text="SFFF\nFPFH\nFFFF\nFFFG")
    scores = {move: walk.score(move, state) for move in "LDRU"}
    assert {move: score["score"] for move, score in scores.items()} == {"L": 0, "D": 1, "R": 1, "U": 0}
    assert [move for move, score in scores.items() if score["flawed"]] == ["R"]


def test_an_empty_room_is_a_map_to_walk_through():
    pytest.importorskip("minigrid")
    env = make_env(IDS["minigrid"])
    first = env.reset(0)
    assert first.endswith("#####\n#>..#\n#...#\n#..G#\n#####\nMission: get to the green goal square.")
    turned = env.step("I turn right.")[0]
    assert turned.startswith("#####\n#v..#\n")
    for answer in ("forward", "forward", "left", "forward"):
        env.step(answer)
    _, reward, terminated, _, info = env.step("forward")
    assert terminated and 0.9 < reward < 1.0 and info["success"] and info["turns"] == 6


def test_connect_four_is_won_by_a_column_of_four_and_lost_by_a_full_one():
    pytest.importorskip("pettingzoo")
    pytest.importorskip("pygame")
    env, ends, firsts = make_env(CONNECT_FOUR), {}, set()
    for seed in range(30):
        shown, info = env.reset(seed), {"end_reason": None}
        firsts.add(shown.count("O\n") + shown.count("O."))
        while info["end_reason"] is None:
            shown, reward, _, _, info = env.step("column 3")
        ends[reward] = shown
        assert info["success"] == (reward == 1.0)
    assert firsts == {0, 1}  # who begins
    columns = {reward: "".join(line[3] for line in text.splitlines()[-7:-1]) for reward, text in ends.items()}
    assert "XXXX" in columns[1.0] and "." not in columns[-1.0] and "XXXX" not in columns[-1.0]
    assert env.get_state(7) == env.get_state(7)


SERVER = """
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **given):
        self.secret, self.tries = (seed or 0) % 10, 0
        return Hint(hint="a number below 10")

    def step(self, action, timeout_s=None, **given):
        self.tries += 1
        if action.number == self.secret:
            return Hint(hint="right", done=True, reward=1.0)
        return Hint(hint="too low" if action.number < self.secret else "too high", reward=-0.1)

    @property
    def state(self):
        return State(step_count=self.tries)


uvicorn.run(create_app(Guessing, Guess, Hint, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator:
    """Starts a real OpenEnv server on loopback; returns its URL."""
    running = []

    def start() -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        file = tmp_path / "server.py"
        file.write_text(SERVER)
        running.append(subprocess.Popen([sys.executable, str(file), str(port)]))
        url = f"http://127.0.0.1:{port}"
        while running[-1].poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                return url
            except OSError:
                time.sleep(0.2)
        raise AssertionError("the server did not start")

    yield start
    for process in running:
        process.kill()
        process.wait()


def test_an_openenv_server_plays_episodes_by_its_url(serve):
    pytest.importorskip("openenv")
    env = make_env(f"openenv:{serve()}", max_turns=5)
    twin = env.clone()
    assert env.reset(7) == "Answer with the number, a number.\n\na number below 10" and twin.reset(3) == env.prompt
    assert env.step("I say 5")[:3] == ("too low", -0.1, False)
    assert twin.step("5")[:2] == ("too high", -0.1)  # a session of its own
    text, _, _, _, info = env.step("no idea")
    assert text == "That was no legal action.\ntoo low" and info["invalid"] == 1
    text, reward, terminated, _, info = env.step("7")
    assert (text, reward, terminated) == ("right", 1.0, True) and info["return"] == pytest.approx(0.9)
    assert env.reset(8) and env.step("8")[2]
    for one in (env, twin):
        one.close()
    with pytest.raises(ValueError, match="not repeatable"):
        env.get_state(0)


def test_ids_say_what_registers_them():
    assert split_id("openenv:http://a:80")[1:] == ("OpenEnv-v0", {"url": "http://a:80"})
    assert split_id("my.module:Game-v0") == ("my.module", "Game-v0", {}) and split_id("Game-v0")[0] == ""
