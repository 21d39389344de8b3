"""Episodes in other processes: the same as in this one, whatever hangs, crashes or raises beside them."""

import asyncio
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from configs.errors import ConfigError
from custom.env_wrapper import make_env
from data import concurrency
from extras.gym.process_env import ProcessEnv
from tests.processes import is_alive
from tests.runs import compose
from training.environment import build_environment

STUBBORN = """
import os
import time

import gymnasium as gym


class Stubborn(gym.Env):
    action_space = gym.spaces.Discrete(5)
    observation_space = gym.spaces.Discrete(100)

    def __init__(self, flag):
        self.flag = flag

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = int(self.np_random.integers(50))
        return self.place, {}

    def step(self, action):
        if os.path.exists(self.flag):
            if action == 2:
                time.sleep(3600)
            if action == 3:
                os._exit(3)
            if action == 4:
                raise KeyError("lost")
        self.place += int(action)
        return self.place, float(action), False, False, {"held": lambda: "what cannot be pickled stays in the process"}


gym.register("Stubborn-v0", Stubborn)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("users") / "stubborn.py"
    file.write_text(STUBBORN)
    return file


@pytest.fixture
def stubborn(file: Path, tmp_path: Path) -> tuple[str, Path]:
    """An id, and the file whose existence makes it stubborn: it is tried out before."""
    return f"{file}:Stubborn-v0", tmp_path / "flag"


def shared(played: tuple) -> tuple:
    return (*played[:4], {key: value for key, value in played[4].items() if key != "held"})


def pid_of(env: ProcessEnv) -> int:
    return env._process._child.processes[-1].process.pid


def test_a_step_that_hangs_is_killed_and_the_episodes_beside_it_go_on_as_if_nothing_had_been(stubborn):
    env_id, flag = stubborn
    env = make_env(env_id, flag=str(flag), processes=1, timeout=5.0)
    twin, local = env.clone(), make_env(env_id, flag=str(flag))
    flag.touch()
    env.reset(7)
    assert twin.reset(8) == local.reset(8)
    env.step("1")
    pid = pid_of(env)
    for answer in ("1", "?", "0"):  # an illegal answer is part of the story
        assert shared(twin.step(answer)) == shared(local.step(answer))
    assert "held" in local.step("1")[4] and "held" not in twin.step("1")[4]
    assert pid == pid_of(twin) != os.getpid() and is_alive(pid)
    with pytest.raises(
        TimeoutError,
        match=r"reset\(seed=7\) and actions \[1, 2\]: not done after 5 seconds \(env.timeout\), so .* was killed",
    ):
        env.step("2")
    assert not is_alive(pid)
    assert shared(twin.step("1")) == shared(local.step("1")) and twin.state == local.state
    assert env.reset(7) == local.reset(7) and env.step("1")[4]["return"] == 1.0


def test_episodes_that_begin_at_once_in_several_threads_share_one_event_loop(monkeypatch):
    """Answers of a process that one event loop started would never reach whoever waits in another."""
    start, started = concurrency.start_loop, []

    def start_slowly():
        started.append(start())
        time.sleep(0.2)  # until the other thread is there
        return started[-1]

    monkeypatch.setattr(concurrency, "start_loop", start_slowly)
    concurrency.background_loop.cache_clear()
    here = Barrier(2)

    async def loop_of_work():
        return asyncio.get_running_loop()

    def ask(_):
        here.wait()
        return concurrency.run_in_background(loop_of_work())

    try:
        with ThreadPoolExecutor(2) as threads:
            assert len(set(threads.map(ask, range(2)))) == len(started) == 1
    finally:
        concurrency.background_loop.cache_clear()
        for loop in started:
            concurrency.stop_loop(*loop)


def test_a_crash_and_an_exception_say_what_led_there(stubborn):
    env_id, flag = stubborn
    env = make_env(env_id, flag=str(flag), processes=2, timeout=60.0)
    clones = [env.clone() for _ in range(4)]
    flag.touch()
    for clone in clones:
        clone.reset(1)
    for clone in clones:
        clone.step("0")
    assert len({*map(pid_of, clones)}) == 2
    with pytest.raises(RuntimeError, match=r"seed=1\) and actions \[0, 3\]: its process ended with exit code 3"):
        clones[0].step("3")
    with pytest.raises(RuntimeError, match=r"'lost', after .*actions \[0, 4\] \(at .*stubborn\.py:27\)") as raised:
        clones[1].step("4")
    assert "in the environment's process" in raised.value.__notes__[0]
    pole = make_env(env_id, flag=str(flag), processes=1, repeatable=False)
    first, second = pole.clone(), pole.clone()
    for clone in (first, second):
        clone.reset(1)
    with pytest.raises(RuntimeError, match="exit code 3"):
        first.step("3")
    with pytest.raises(RuntimeError, match=r"its process is lost: .*actions \[3\]: its process .* exit code 3"):
        second.step("0")
    clones[2].close()
    with pytest.raises(ValueError, match=r"call reset\(seed\) first"):
        clones[2].step("0")
    assert clones[2].reset(5) and clones[3].step("1")[4]["return"] == 1.0


def test_what_is_no_business_of_an_episode_is_asked_in_this_process(stubborn):
    env_id, flag = stubborn
    env, local = make_env(env_id, flag=str(flag), processes=3), make_env(env_id, flag=str(flag))
    assert env.get_state(4) == local.get_state(4) and env.extract_action("2") == 2 and env.env_id == env_id
    again = pickle.loads(pickle.dumps(env))
    assert again.processes == 3 and again.timeout == 60.0 and again.instruction == local.instruction


def test_the_config_chooses_processes_and_what_an_illegal_answer_does():
    config = compose("env.processes=2", "env.invalid_action=end")
    environment = build_environment(config)
    assert isinstance(environment, ProcessEnv) and environment.processes == 2 and environment.invalid_action == "end"
    assert not isinstance(build_environment(compose()), ProcessEnv)
    with pytest.raises(ConfigError, match=r"env\.invalid_action"):
        compose("env.invalid_action=punish")
