"""The games of examples/games and scripts/games.py: they keep gymnasium's rules, and playing well pays."""

import json
import subprocess
import sys

import pytest
from gymnasium.utils.env_checker import check_env

from conftest import ROOT
from custom.gym.text_env import TextEnv
from scripts import games

FILES = {file.stem: file for file in sorted((ROOT / "examples/games").glob("*.py"))}
STEPWISE = "nim", "thermostat", "mastermind", "connect_three", "stock", "bandit", "dialogue"  # judged by playouts


def test_every_game_is_short_and_has_a_player():
    assert {*games.PLAYERS} == {*FILES} and len(FILES) == 12
    assert all(len(file.read_text().splitlines()) <= 40 for file in FILES.values())


@pytest.mark.parametrize("game", FILES)
def test_a_game_keeps_gymnasiums_rules_and_shows_little(game):
    environment = TextEnv(f"{FILES[game]}:{games.name_of(game)}", instruction="")  # which tries it out
    env = environment.world_of(0).env.unwrapped
    check_env(env, skip_render_check=True)
    texts = [environment.get_state(i).text for i in range(10)]
    assert max(map(len, texts)) < 60 and len({*texts}) > 5
    assert environment.max_turns < 50


@pytest.mark.parametrize("game", FILES)
def test_playing_well_pays(game):
    random, best = (games.mean_return(game, player, 30) for player in (None, games.PLAYERS[game]))
    assert best > random + 0.2 * abs(random) + 0.3


@pytest.mark.parametrize("game", FILES)
def test_what_judges_a_move_finds_some_better_than_others(game):
    judge = "playouts" if game in STEPWISE else "search"
    environment = TextEnv(f"{FILES[game]}:{games.name_of(game)}", reward=judge)
    assert any(environment.optimal_actions(environment.get_state(i)) for i in range(3))


@pytest.mark.parametrize("game", ["maze", "blocks", "sokoban", "key_and_door"])
def test_every_start_can_be_solved(game):
    assert games.mean_return(game, games.PLAYERS[game], 50) == 1


def test_a_table_of_what_was_learnt(monkeypatch, tmp_path, capsys):
    """Runs that are done are read, others made; seeds go there, and settings."""
    monkeypatch.setattr(games, "FOLDER", tmp_path)
    summary = {"random": 0, "before": 0, "after": 0.5, "cpu": {"imitation 1": 4, "imitation 2": 5}}
    summary |= {"verdict": "learnt", "labels": "search"}
    commands = []

    def run(command, check):
        commands.append(command)
        folder = tmp_path / command[-1].rpartition("/")[2]
        folder.mkdir(exist_ok=True)
        if "nim" not in folder.name:
            (folder / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(games, "EPISODES", 1)
    monkeypatch.setattr(games, "mean_return", lambda game, player: 1.0 if player else 0.25)
    asked = ["games", "--games", "maze,nim", "env.val_episodes=5", "--seeds", "0", "1"]
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", asked)
        games.main()
        shown = capsys.readouterr().out
        assert "| maze | 0.25 | 1.00 | 0.00 / 0.00 | 0.50 / 0.50 | 0.33 / 0.33 | imitation 9 | search |" in shown
        assert "| nim | failed |" in shown
        assert "0.5 of the way in the median seed: 0 of 2 games" in shown
    assert len(commands) == 4 + 2
    assert commands[1][2:-1] == ["scripts.learn", "examples/games/maze.py:Maze-v0", "--seed", "1", "env.val_episodes=5"]
