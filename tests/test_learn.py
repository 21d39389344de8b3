"""`python -m scripts.learn`: its stages are the commands that it prints, what is done is not done again, and what does
not gain is not kept."""

import json
import re
import shlex
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from configs.loader import compose
from extras.imitate.look import Earnings, Look
from scripts import games, learn
from tests.runs import ROOT

NIM = f"{ROOT}/examples/games/nim.py:Nim-v0"
ONE_ROUND = "--minutes", "0.001"
BLIND = """
import gymnasium as gym

class Blind(gym.Env):
    action_space, observation_space = gym.spaces.Discrete(2), gym.spaces.Text(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.turn = 0
        return "go", {}

    def step(self, action):
        self.turn += 1
        return "go", 1.0, self.turn == 3, False, {}

gym.register("Blind-v0", Blind, max_episode_steps=3)
"""


@pytest.fixture
def course(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch):
    """course(environment, …) learns in tmp_path, with few rows and steps; returns the summary and the stages."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learn, "EPISODES", 40)
    monkeypatch.setattr(learn, "ROWS", 64)
    monkeypatch.setattr(learn, "LEAST_ROWS", 64)
    for name in ("STATES", "WHOLE_EPISODES"):
        few = [re.sub("(steps|batch_size)=.*", r"\1=2", each) for each in getattr(learn, name)]
        monkeypatch.setattr(learn, name, few)

    def run(environment: str, *options: str) -> tuple[dict, dict]:
        small = [f"actor_rollout_ref.model.path={tiny_model}", "env.kwargs.instruction="]
        learn.main([environment, *small, "trainer.default_local_dir=out", *options])
        return tuple(json.loads(Path("out", f"{name}.json").read_text()) for name in ("summary", "stages"))

    return run


def test_every_stage_is_a_command_that_was_printed_and_is_done_once(course, capsys: pytest.CaptureFixture[str]):
    summary, stages = course(NIM)
    printed = capsys.readouterr().out
    assert [*stages][:5] == ["look", "demonstrations 1", "untrained", "imitation 1", "return of imitation 1"]
    assert {"moves by policy 1", "improvement 1", "return of improvement 1"} <= {*stages}
    assert "env.kwargs.horizon=null" in stages["moves by policy 1"]["command"]  # of a short game
    assert {"states 1", "return of states 1", "episodes 1", "return of episodes 1", "sampled"} <= {*stages}
    for stage in stages.values():
        assert stage["command"] in printed
        command = shlex.split(stage["command"])[1:]
        if command[0] == "main.py":
            compose("ppo_trainer", command[1:])
    assert summary["labels"].startswith("env.kwargs.reward=playouts")
    assert -1 <= summary["random"] < 0 < summary["teacher"] <= 1
    returns = {name[10:]: stage["result"] for name, stage in stages.items() if name.startswith("return of ")}
    assert summary["after"] == learn.return_of(stages["held-out return"]["result"])
    returns = {"untrained": stages["untrained"]["result"]} | returns
    tried = {name: learn.return_of(result) for name, result in returns.items()}
    best = max(tried, key=tried.get)
    assert best == "untrained" or best.replace(" ", "_") in summary["model"]
    for kind in ("states", "episodes"):  # each but the last round has gained
        rounds = [tried[name] for name in tried if name.startswith(kind)]
        assert rounds[:-1] == sorted({*rounds[:-1]})
    assert games.row("nim", -0.5, 1.0, [summary], [0.5]).startswith("| nim | -0.50 | 1.00 |")  # of `make games`

    again, unchanged = course(NIM)
    assert (again, unchanged) == (summary, stages)
    assert capsys.readouterr().out.count("done before") == len(stages)
    _, other = course(NIM, "--seed", "1", *ONE_ROUND)
    assert other["imitation 1"]["result"] != stages["imitation 1"]["result"]  # nothing goes on from another seed's


def test_a_game_whose_moves_are_all_alike_says_so(course, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "blind.py").write_text(BLIND)
    summary, stages = course("blind.py:Blind-v0")
    assert summary["labels"] == "" and "--player random" in stages["demonstrations 1"]["command"]
    assert "demonstrations 2" not in stages
    assert summary["random"] == summary["teacher"] == 3.0
    assert "--labels file.py:player" in summary["verdict"]
    assert summary["verdict"] in capsys.readouterr().out


def test_an_environment_that_is_not_there_is_refused_in_one_line(course, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        course("nowhere.py:Game-v0")
    assert ended.value.code == 2
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: env.id=nowhere.py")


def test_mastery_and_shares_by_hand():
    seen = Look(random=-1.0, teacher=1.0, settings=("a=b",), repeatable=True, error=0.04, seconds=0.0)
    assert seen.share(0.0) == 0.5 and seen.share(1.5) == 1.25
    assert seen.is_mastered_by(0.9) and not seen.is_mastered_by(0.89)
    for sampled, words in ((0.1, "learnt: 50% of the way"), (0.5, "learnt: 75% of the way")):
        said = learn.verdict(seen, 0.0, sampled)
        assert words in said and ("Play it sampled" in said) == (sampled > 0.2)
    unsure = Look(**{**asdict(seen), "error": 0.5})
    assert unsure.is_mastered_by(0.5) and not unsure.is_mastered_by(0.49)
    assert not Look(**{**asdict(seen), "teacher": -1.0}).is_mastered_by(5.0)
    one, other = (Earnings(np.ones(4), np.array(each), 0.0) for each in ([0.5, 0.4, 0.9, 0.6], [0.2, 0.3, 0.4, 0.3]))
    assert one.is_above(other, 4.0) and not one.is_above(other, 4.5)  # by 0.3 ± 0.0707, sooner and not more
    assert not one.is_above(one, 0.0)


def test_a_user_who_sets_how_moves_are_judged_is_not_overruled(course):
    settings = ("env.kwargs.reward=playouts", "env.kwargs.horizon=2", "env.kwargs.playouts=3")
    summary, stages = course(NIM, *settings, *ONE_ROUND)
    assert summary["labels"] == settings[0] and settings[1] in stages["demonstrations 1"]["command"]


def test_time_counts_the_stages_of_this_command_alone(tmp_path: Path):
    earlier = {"imitation 1": {"command": "python other", "result": 1, "seconds": 900, "cpu": 1}}
    course = learn.Course(tmp_path, [], minutes=1, results=earlier)
    assert course.seconds_left == 60
    assert course.run("look", ["this"], lambda: 5) == 5 and course.seconds_left > 59
    assert not course.is_short_of("look") and course.is_short_of("imitation 1")
