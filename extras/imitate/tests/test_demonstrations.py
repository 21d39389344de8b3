"""Rows to imitate: legal and canonical answers of any player, in any space of actions, as a policy will see them."""

import json
import sys
from itertools import islice

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import make_env
from extras.imitate.__main__ import main
from extras.imitate.demonstrations import Demonstrations, round_action
from extras.sft.__main__ import main as sft
from extras.sft.dataset import ConversationFormat
from extras.sft.settings import SFTDataConfig
from tests.engines import Scripted
from tests.episodes import TOKENIZER, counting, played

KEY_AND_DOOR = "env.id=examples/games/key_and_door.py:KeyAndDoor-v0"


class Anything(gym.Env):
    """Takes any action for three moves, and pays for some."""

    observation_space = spaces.Discrete(10)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.moves = 0
        return 0, {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.moves += 1
        return self.moves, float(sum(map(ord, str(action))) % 3), self.moves == 3, False, {}


gym.register("Anything-v0", Anything)
BOX = spaces.Box(np.array([-1.0, 0.15], np.float32), np.array([1.0, 0.19], np.float32))
SPACES = [
    spaces.Discrete(5, start=2),
    spaces.MultiDiscrete([3, 4]),
    spaces.MultiBinary(3),
    BOX,
    spaces.Box(-20.0, 20.0, (), np.float64),
    spaces.Box(-np.inf, np.inf, (2,)),
    spaces.Text(6, charset="abc"),
    spaces.Dict(gas=spaces.Box(0, 1, (1,)), gear=spaces.Discrete(5, start=1)),
    spaces.Tuple((spaces.Discrete(3), spaces.Dict(turn=BOX))),
]


def demonstrations(environment, name="random", seed=0):
    return Demonstrations(environment, CustomEnvDataset(environment), name, seed)


def turns(environment, count=20, **which):
    return [*islice(demonstrations(environment, **which).turns(), count)]


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("name", ["random", "best"])
def test_answers_are_legal_canonical_and_short_in_every_space_of_actions(space, name):
    reward = {"reward": "playouts", "playouts": 2} if name == "best" else {}
    environment = make_env("Anything-v0", action_space=space, **reward)
    rows = turns(environment, name=name)
    assert len(rows) == 20 and rows == turns(environment, name=name) != turns(environment, name=name, seed=1)
    for row in rows:
        action = environment.extract_action(row["response"])
        assert action is not None and environment.action_to_text(action) == row["response"]
        assert all(len(word) <= 6 for word in row["response"].split())


def test_numbers_have_two_digits_of_their_range():
    assert str(round_action((-0.04321, 0.16789), BOX)) == "(0.0, 0.168)" and round_action((1.0, 0.15), BOX) == (
        1.0,
        BOX.low[1],
    )
    wide = spaces.Box(-1e6, 1e6, (1,))
    assert round_action((523456.7,), wide) == (500000.0,) and round_action((3,), spaces.Box(0, 9, (1,), int)) == (3,)


def test_the_best_player_plays_as_the_search_says():
    environment = make_env(KEY_AND_DOOR.removeprefix("env.id="), reward="search", max_turns=60)
    made = demonstrations(environment, "best")
    for state in map(environment.get_state, range(10)):
        assert environment.compute_reward(state, environment.extract_action(made.answer(state))) == 1
    for row in islice(made.transcripts(), 5):
        assert len(row["messages"]) <= 2 * 17  # the way to the key, and on to the door


class Hidden(gym.Env):
    """One of three boxes holds a prize, the first in half of the resets: nothing shows which."""

    action_space, observation_space = spaces.Discrete(3), spaces.Text(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.box = int(self.np_random.choice(3, p=[0.5, 0.3, 0.2]))
        return "open", {}

    def step(self, action):
        return "open", float(action == self.box), True, False, {}


gym.register("Hidden-v0", Hidden)


@pytest.mark.parametrize("reward", ["playouts", "search"])
def test_what_a_text_does_not_show_has_no_part_in_its_answer(reward):
    made = demonstrations(make_env("Hidden-v0", reward=reward), "best")
    rows = [*islice(made.turns(), 300)]
    answers = [row["response"] for row in rows]
    assert {*answers} == {"0", "1", "2"} and 0.4 < answers.count("0") / 300 < 0.6  # each knows the box
    settled = made.settle(rows)
    assert [row["response"] for row in settled] == ["0"] * 300 and all("values" not in row for row in settled)


def test_a_transcript_is_token_for_token_what_its_episode_shows_a_policy():
    config, game = counting()
    rows = islice(Demonstrations(game.environment, game.dataset, "random", 3).transcripts(), 4)
    for index, row in enumerate(rows):
        answers = iter([message["content"] for message in row["messages"] if message["role"] == "assistant"])
        engine = Scripted(config, TOKENIZER, lambda text, times, answers=answers: next(answers))
        batch = played(config, game, engine, [game.environment.train_seed(index)])
        sample = ConversationFormat(TOKENIZER, SFTDataConfig(), TOKENIZER.eos_token_id).sample(row["messages"], None)
        shown = batch.input_ids[0][batch.attention_mask[0] == 1].tolist()
        assert next(answers, None) is None and shown == [*sample.prompt_ids, *sample.token_ids]
        learnt = batch.responses[0][batch.response_mask[0] == 1].tolist()
        pairs = zip(sample.token_ids, sample.policy_mask, strict=True)
        assert learnt == [token for token, policy in pairs if policy]


PLAYERS = """
def left(environment, state):
    return 2

def cheats(environment, state):
    return 99

def stumbles(environment, state):
    return [][0]

number = 3
"""
REFUSED = {
    "cheats": ("--player", "cheats, after reset(seed=", "and actions [", "99 is no action of Discrete(4)"),
    "stumbles": ("--player", "stumbles, after reset(seed=", "IndexError: list index out of range", "players.py:9"),
    "nobody": ("--player", "has no 'nobody'; it has cheats, left, number, stumbles"),
    "number": ("--player", "number is 3; it must be player(environment, state) -> action"),
}


def run(monkeypatch, tmp_path, *arguments):
    monkeypatch.setattr(sys, "argv", ["imitate", "--output", str(tmp_path / "rows.jsonl"), "--rows", "6", *arguments])
    main()
    return [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", REFUSED)
def test_a_player_that_cannot_play_is_refused_in_one_line(name, monkeypatch, tmp_path, write, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, tmp_path, "--player", f"{write('players.py', PLAYERS)}:{name}", KEY_AND_DOOR)
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert all(part in line for part in REFUSED[name]) and not (tmp_path / "rows.jsonl").exists()


def test_best_without_a_way_to_know_it_is_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, tmp_path, "--player", "best", KEY_AND_DOOR)
    assert "no table of its moves: set env.kwargs.reward=search or playouts" in capsys.readouterr().err


@pytest.mark.parametrize("history", ["turns", "transcript"])
def test_the_command_writes_rows_that_train(history, monkeypatch, tmp_path, write, tiny_model):
    own = f"{write('players.py', PLAYERS)}:left"
    rows = run(monkeypatch, tmp_path, "--player", own, "--history", history, KEY_AND_DOOR, "env.max_turns=4")
    answers = [row["response"] if history == "turns" else row["messages"][-1]["content"] for row in rows]
    assert answers == ["2"] * 6
    settings = f"data.train_files={tmp_path}/rows.jsonl data.train_batch_size=3 model.path={tiny_model}"
    ends = f"trainer.default_local_dir={tmp_path}/run trainer.logger=[] trainer.total_epochs=1 data.max_length=400"
    assert not sft([*settings.split(), *ends.split()])
    assert (tmp_path / "run/metrics.jsonl").is_file()
