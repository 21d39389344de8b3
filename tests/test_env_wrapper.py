"""Text environments over the real gymnasium ones: exact replay, marked players, optimal moves, episodes, errors."""

import pickle
import re
import threading
from collections import Counter, deque
from contextlib import nullcontext
from typing import ClassVar

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import generate_random_map
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError
from configs.schema import SuccessConfig
from custom.env_wrapper import ENVIRONMENTS, EnvState, TextEnv, make_env
from custom.gym.planning import best_actions, shortest_paths
from custom.gym.text_env import is_success, success_rule
from custom.gym.texts import last_mention, mark_ansi
from custom.reward_manager import CustomRewardManager
from data.protocol import DataProto
from data.types import NotScored
from extras.gym import walks
from tests.runs import compose
from training.environment import build_environment

LAKE = {"env_id": "FrozenLake-v1", "is_slippery": False}
RANDOM_LAKE = {**LAKE, "random_maps": True, "size": 4}
PLAIN = ("FrozenLake8x8-v1", "CliffWalking-v1", "CliffWalkingSlippery-v1", "Taxi-v4", "Blackjack-v1")
SHIPPED = [
    *(LAKE, RANDOM_LAKE, {**RANDOM_LAKE, "is_slippery": True}, *({"env_id": env_id} for env_id in PLAIN)),
    {"env_id": "Taxi-v4", "is_rainy": True, "fickle_passenger": True},
]
all_shipped = pytest.mark.parametrize("config", SHIPPED, ids=lambda config: "-".join(map(str, config.values())))


class Lock(gym.Env):
    """A third party's environment: find the digit that opens the lock. Tuple observations; it holds a real lock.
    Those derived from it are registered by their names, too."""

    def __init_subclass__(cls) -> None:
        gym.register(f"{cls.__name__}-v0", cls)

    def __init__(self, digits: int = 4, colour: int = 0) -> None:
        self.action_space = gym.spaces.Discrete(digits)
        self.observation_space = gym.spaces.Tuple((gym.spaces.Discrete(9), gym.spaces.Discrete(3)))
        self._lock = threading.Lock()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tries, self.secret = 0, int(self.np_random.integers(self.action_space.n))
        return (0, 0), {}

    def step(self, action):
        self.tries += 1
        order = int(np.sign(self.secret - action))
        return (self.tries, order + 1), float(order == 0), order == 0, self.tries == 8, {"secret": self.secret}


class Said(Lock):
    """A lock that says of itself that it was a success, whatever happens."""

    def step(self, action):
        return *super().step(action)[:4], {"success": True}


class Unseeded(Lock):
    """A lock that draws from numpy's global generator."""

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return (np.random.randint(10**9), 0), {}


class Growing(Lock):
    """A lock that carries something from one episode into the next."""

    episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        return (self.episodes, 0), super().reset(seed=seed)[1]


class Moody(Lock):
    """A lock whose rewards are its number of episodes, which no observation shows."""

    episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        return super().reset(seed=seed)

    def step(self, action):
        return (0, 0), float(self.episodes), False, False, {}


gym.register("Lock-v0", Lock)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"env_id": "FrozenLak-v1"}, r"'FrozenLak-v1'.*FrozenLake.*my_module:MyGame-v0"),
        ({"env_id": "Taxi-v3"}, r"Please use `Taxi-v4` instead\.$"),
        ({"env_id": "Taxi-v4", "random_maps": True}, "random_maps=True works for FrozenLake-v1,"),
        ({**RANDOM_LAKE, "map_name": "8x8"}, "without desc or map_name"),
        ({"env_id": "Blackjack-v1", "action_names": "abc"}, "3 action_names for 2 actions"),
        ({"env_id": "Blackjack-v1", "reward": "progress"}, "reward='progress' for Blackjack-v1"),
        ({"env_id": "Lock-v0", "max_turns": 0}, "max_turns=0"),
        ({"env_id": "Lock-v0", "invalid_action": "punish"}, "invalid_action='punish'"),
        ({"env_id": "Lock-v0", "success": {"ended": True}}, r"success has \['ended'\]: the conditions are terminated"),
        ({"env_id": "Unseeded-v0"}, r"Unseeded-v0 does not repeat itself: after reset\(seed=\d\).*repeatable=false"),
        ({"env_id": "Growing-v0"}, r"Growing-v0 does not .*seed=0\) and actions \[\] the observation was '"),
        ({"env_id": "Moody-v0", "instruction": ""}, r"Moody-v0 does not repeat .*actions \[\d\] the reward was"),
        ({**LAKE, "desc": ["SFH", "FHF", "HFG"]}, "is the goal within reach"),
        ({**RANDOM_LAKE, "size": 2, "exclude_seeds": range(100)}, "all held out"),
        ({"env_id": "Unseeded-v0", "repeatable": False}, r"Unseeded-v0 is not repeatable: .* env\.mode=episode"),
    ],
)
def test_settings_environments_and_states_that_cannot_work_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        make_env(**config).get_state(0)


def replay(config: dict, state: EnvState):
    """Restore a state through gymnasium alone; returns the environment and the observation."""
    kwargs = {k: v for k, v in config.items() if k not in ("env_id", "random_maps", "size")}
    if config.get("random_maps"):
        kwargs["desc"] = generate_random_map(size=config["size"], seed=state.seed)
    env = gym.make(config["env_id"], **kwargs)
    observation, _ = env.reset(seed=state.seed)
    for action in state.actions:
        observation, _, terminated, _, _ = env.step(action)
        assert not terminated
    return env.unwrapped, observation


def lake_distances(lake: list[str], origin: tuple[int, int]) -> dict[tuple[int, int], int]:
    """Steps between `origin` and every cell that is not a hole, by a search over the map itself."""
    size, distances, queue = len(lake), {origin: 0}, deque([origin])
    while queue:
        row, column = queue.popleft()
        for cell in [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]:
            inside = 0 <= cell[0] < size and 0 <= cell[1] < size
            if inside and lake[cell[0]][cell[1]] != "H" and cell not in distances:
                distances[cell] = distances[row, column] + 1
                queue.append(cell)
    return distances


@all_shipped
def test_seed_and_actions_replay_every_state_through_gymnasium_alone(config):
    env = make_env(**config, seed=3)
    for i in range(30):
        state = env.get_state(i)
        unwrapped, observation = replay(config, state)
        assert env.observation_to_text(unwrapped, observation) == state.text
        assert "\x1b" not in env.state_to_text(state)


@all_shipped
def test_states_depend_on_the_seed_and_the_index_alone(config):
    forwards, env = make_env(**config, seed=1), make_env(**config, seed=1)
    states = [forwards.get_state(i) for i in range(20)]
    assert [env.get_state(i) for i in reversed(range(20))] == states[::-1]
    assert [env.clone().get_state(i) for i in range(3)] == states[:3]
    assert [make_env(**config, seed=2).get_state(i) for i in range(20)] != states


def test_states_of_a_lake_are_all_its_cells_on_the_way_and_equally_often():
    env = make_env(**LAKE)
    counts = Counter(env.get_state(i).text.replace("\n", "").index("P") for i in range(2200))
    assert set(counts) == {0, 1, 2, 3, 4, 6, 8, 9, 10, 13, 14}  # all but the holes 5, 7, 11, 12 and the goal 15
    assert max(abs(count - 200) for count in counts.values()) < 70  # 5 standard deviations of Binomial(2200, 1/11)


def test_random_walks_are_of_any_length_up_to_the_setting_and_cut_anywhere_where_an_episode_ended():
    lock = make_env("Lock-v0", digits=1000)  # truncated at the 8th; 13 in 21 walks are longer
    lengths = Counter(len(lock.get_state(i).actions) for i in range(800))
    assert set(lengths) == set(range(8))
    assert sum((count - 100) ** 2 / 100 for count in lengths.values()) < 24.3  # of chi-square's 7 degrees, p = 0.001
    environment = build_environment(compose("env.id=MountainCar-v0", "~env.kwargs", "env.max_walk=3"))
    assert {len(environment.get_state(i).actions) for i in range(60)} == {0, 1, 2, 3}


def test_a_reset_seed_gives_states_of_its_own_map_and_start_state_its_start():
    env = make_env(**RANDOM_LAKE)
    lake = "".join(generate_random_map(size=4, seed=7))
    start = env.start_state(7)
    assert start == EnvState(7, (), "\n".join(["P" + lake[1:4], lake[4:8], lake[8:12], lake[12:]]))
    assert env.reset(7) == env.state_to_text(start)
    cells = [env.get_state(i, reset_seed=7) for i in range(10)]
    assert {state.seed for state in cells} == {7} and len({state.text for state in cells}) > 1


def test_held_out_maps_never_occur_though_their_seeds_differ():
    config = {**RANDOM_LAKE, "size": 3}  # few layouts: equal ones are certain unless they are held out
    held_out = {make_env(**config).layout(seed) for seed in range(20)}
    env, careless = make_env(**config, exclude_seeds=range(20)), make_env(**config)
    assert not held_out & {env.layout(env.get_state(i).seed) for i in range(2000)}
    assert held_out & {careless.layout(careless.get_state(i).seed) for i in range(2000)}


def test_states_and_settings_travel_by_pickle():
    env = make_env(**RANDOM_LAKE, exclude_seeds=range(3))
    state = env.get_state(5)
    assert pickle.loads(pickle.dumps(state)) == state
    assert pickle.loads(pickle.dumps(env)).get_state(5) == state
    lock = make_env("Lock-v0")
    lock.reset(0)  # holds a lock by now
    assert pickle.loads(pickle.dumps(lock)).get_state(5) == lock.get_state(5)


def test_taxi_shows_the_taxi_in_every_state_and_no_two_states_look_alike():
    env = gym.make("Taxi-v4").unwrapped
    texts = [ENVIRONMENTS["Taxi-v4"]["observation_to_text"](env, state) for state in range(500)]
    assert len(set(texts)) == 500
    for state, text in enumerate(texts):
        row, column, _, _ = env.decode(state)
        rows = text.split("\n")[:5]
        assert rows[row][2 * column] == "T" and "".join(rows).count("T") == 1


@pytest.mark.parametrize(
    ("ansi", "text"),
    [
        ("S\x1b[41mF\x1b[0mH", "S[F]H"),
        ("\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m: ", "[R]: "),  # nested, as Taxi does
        ("\x1b[41mS\x1b[0m\x1b[42mF\x1b[0m", "[S][F]"),  # neighbours keep a mark each
        ("\x1b[2J\x1b[HA\x1b[K\x1b[?25l", "A"),  # clear screen, home, erase line, hide cursor
        ("\x1b[1mopen", "open"),  # never closed
        ("\x1b[0mclosed\x1b[m", "closed"),  # never opened
        ("plain [x]", "plain [x]"),
    ],
)
def test_ansi_highlights_become_brackets(ansi, text):
    assert mark_ansi(ansi) == text


def actions_of(env_id: str, *texts: str) -> list[int | None]:
    env = make_env(env_id)
    return [env.extract_action(text) for text in texts]


ANSWERS = {
    0: ["LEFT", "Move:L\n"],
    1: ["**Down**!", "'D'"],
    2: ["R", "r", "I go right.", "right. I'd bet on it"],
    3: ["<answer>U</answer>", "not left, not down: up"],
    None: [
        *("I walk around a LUMP.", "Upside-down? I'd say no. All uphill.", "You'd better make a U-turn.", "2", ""),
        "ſ İ ı K \udcff",  # letters whose lower case is another letter, or longer
    ],
}


def test_frozen_lake_reads_letters_and_words():
    lake = make_env(**LAKE)
    for action, answers in ANSWERS.items():
        assert [lake.extract_action(answer) for answer in answers] == [action] * len(answers), answers


def test_each_environment_has_its_own_action_numbers():
    assert actions_of("FrozenLake-v1", "left", "down", "right", "up") == [0, 1, 2, 3]
    assert actions_of("CliffWalking-v1", "up", "right", "down", "left") == [0, 1, 2, 3]
    assert actions_of("Taxi-v4", "South", "north", "east", "west", "Pick up!", "drop-off", "up") == [*range(6), None]
    assert actions_of("Blackjack-v1", "I stick.", "HIT me", "stand", "sticky") == [0, 1, 0, None]
    assert actions_of("Lock-v0", "2", "7", "0 or 1", "3.5", "12", "no. 1.") == [2, None, 1, None, None, 1]


@all_shipped
def test_the_canonical_answer_reads_back_as_its_action(config):
    env = make_env(**config)
    for action in range(gym.make(config["env_id"]).action_space.n):
        assert env.extract_action(env.action_to_text(action)) == action


@given(st.text() | st.lists(st.sampled_from(["left", "R", "-", "'", " ", ".", "ſ", "İ"])).map("".join))
@settings(max_examples=100, deadline=None)
def test_any_text_is_read_or_is_no_action(text):
    assert last_mention(("L|left", "D", "R", "s"), text) in (None, 0, 1, 2, 3)


def test_a_move_is_rewarded_exactly_if_it_shortens_the_way():
    env = make_env(**RANDOM_LAKE)
    moves = [(0, -1), (1, 0), (0, 1), (-1, 0)]
    for i in range(150):
        state = env.get_state(i)
        lake = generate_random_map(size=4, seed=state.seed)
        distances = lake_distances(lake, (3, 3))
        row, column = divmod(state.text.replace("\n", "").index("P"), 4)
        assert len(state.actions) == lake_distances(lake, (0, 0))[row, column]
        for action, (down, right) in enumerate(moves):
            after = (row + down, column + right)  # off the map or into a hole: not among the distances
            nearer = distances.get(after, 99) < distances[row, column]
            assert env.compute_reward(state, action) == float(nearer)
            assert (action in env.optimal_actions(state)) == nearer
        assert env.compute_reward(state, env.get_action(state)) == 1.0
        assert env.compute_reward(state, None) == 0.0


def play(env: TextEnv, seed: int) -> list[float]:
    """Plays an episode of optimal answers; returns its rewards."""
    env.reset(seed)
    state, rewards, terminated, truncated = env.start_state(seed), [], False, False
    while not (terminated or truncated):
        action = env.get_action(state)
        text, reward, terminated, truncated, _ = env.step(f"I choose {env.action_to_text(action)}.")
        assert "\x1b" not in text
        rewards.append(reward)
        state = EnvState(seed, (*state.actions, action), text)
    assert terminated
    return rewards


def test_optimal_answers_solve_cliff_walking_and_taxi():
    assert play(make_env("CliffWalking-v1"), 0) == [-1.0] * 13
    for seed in range(10):
        *steps, last = play(make_env("Taxi-v4"), seed)
        assert set(steps) == {-1.0} and last == 20.0 and len(steps) < 20


@pytest.mark.parametrize("env_id", ["FrozenLake-v1", "CliffWalkingSlippery-v1"])
def test_best_actions_agree_with_value_iteration_written_in_loops(env_id):
    table = gym.make(env_id).unwrapped.P
    values = [0.0] * len(table)
    for _ in range(2500):  # 0.99^2500 < 1e-10
        sums = [
            [sum(p * (r + 0.99 * values[n] * (not done)) for p, n, r, done in row[a]) for a in row]
            for row in table.values()
        ]
        values = [max(row) for row in sums]
    scale = max(abs(r) for row in table.values() for outcomes in row.values() for _, _, r, _ in outcomes)
    assert best_actions(table).tolist() == [[v >= max(row) - 1e-7 * scale for v in row] for row in sums]


def test_outcomes_of_different_number_are_weighed_by_probability():
    table = {
        0: {0: [(1.0, 1, 0.0, False)], 1: [(0.5, 0, 0.0, False), (0.5, 1, 4.0, True)]},
        1: {0: [(1.0, 1, 3.0, True)], 1: [(0.7, 1, 4.0, True), (0.3, 1, 0.0, True)]},
    }
    # state 1 is worth 3, not 2.8; in state 0, trying again for an even chance of 4 is worth 2 / (1 - 0.99 / 2) = 3.96
    assert best_actions(table).tolist() == [[False, True], [True, False]]


def test_paths_are_shortest_and_lead_through_no_end():
    table = {
        0: {0: [(1.0, 1, 0.0, False)], 1: [(1.0, 2, 0.0, False)]},
        1: {0: [(1.0, 2, 0.0, False)], 1: [(1.0, 3, 0.0, True)]},
        2: {0: [(1.0, 0, 0.0, False)], 1: [(1.0, 1, 0.0, False)]},
        3: {0: [(1.0, 4, 0.0, False)], 1: [(1.0, 3, 0.0, False)]},
        4: {0: [(1.0, 4, 0.0, False)], 1: [(1.0, 4, 0.0, False)]},
    }
    assert shortest_paths(table, 0) == {0: (), 1: (0,), 2: (1,)}
    table[2][1] = [(0.5, 1, 0.0, False), (0.5, 2, 0.0, False)]
    assert shortest_paths(table, 0) == {}  # a random transition: no path is sure


def test_the_environments_own_reward_is_an_option():
    env = make_env("CliffWalking-v1", reward="env")
    start = env.start_state(0)
    assert [env.compute_reward(start, action) for action in (0, 1, 2, 3, None)] == [-1.0, -100.0, -1.0, -1.0, -100.0]
    goal = make_env(**LAKE, reward="env", invalid_reward=-0.5)
    beside = EnvState(0, (2, 2, 1, 1, 1), "")
    assert [goal.compute_reward(beside, action) for action in (2, 0, None)] == [1.0, 0.0, -0.5]


def test_blackjack_has_no_table_so_the_game_itself_pays():
    env = make_env("Blackjack-v1")
    states = [env.get_state(i) for i in range(60)]
    assert {env.get_action(state) for state in states} == {None} and env.optimal_actions(states[0]) == ()
    for state in states:
        game, _ = replay({"env_id": "Blackjack-v1"}, state)
        assert env.compute_reward(state, 0) == env.compute_reward(state, 0) == game.step(0)[1]
    assert {env.compute_reward(state, 0) for state in states} == {-1.0, 0.0, 1.0}
    assert env.compute_reward(states[0], None) == -1.0  # silence pays no better than losing


def test_the_limit_of_turns_is_ours():
    env = make_env(**LAKE, max_turns=150)  # gymnasium's is 100
    env.reset(0)
    assert [env.step("left")[2:4] for _ in range(150)] == [(False, False)] * 149 + [(False, True)]
    with pytest.raises(ValueError, match=r"call reset\(seed\) first"):
        env.step("left")
    assert make_env("FrozenLake8x8-v1").max_turns == 200
    win = make_env(**LAKE, desc=["SG"], max_turns=1)
    win.reset(0)
    text, reward, terminated, truncated, info = win.step("R")
    assert (text, reward, terminated, truncated, info["end_reason"]) == ("SP", 1.0, True, False, "terminated")


def test_an_invalid_answer_costs_a_turn_and_changes_nothing():
    env = make_env("Taxi-v4", max_turns=4)
    prompt = env.reset(5)
    text, reward, terminated, truncated, info = env.step("What is a taxi?")
    feedback, _, shown = text.partition("\n")
    assert feedback == "That was no legal action." and prompt.endswith(f"\n\n{shown}") and env.prompt == prompt
    assert (reward, terminated, truncated) == (-10.0, False, False)
    assert info == {"success": False, "action": None, "turns": 1, "invalid": 1, "return": -10.0, "end_reason": None}
    assert env.step("pickup")[4]["invalid"] == 1
    env.step("?")
    *_, truncated, info = env.step("!")
    assert truncated and info["invalid"] == 3 and info["turns"] == 4 and info["end_reason"] == "max_turns"


def test_an_episode_may_start_from_a_training_state():
    env = make_env(**RANDOM_LAKE)
    state = env.get_state(4)
    assert env.reset(state.seed, state.actions) == env.state_to_text(state)
    with pytest.raises(ValueError, match="end the episode"):
        make_env(**LAKE).reset(0, (2, 1))


def test_states_can_be_asked_for_while_an_episode_runs():
    disturbed, calm = make_env("FrozenLake-v1"), make_env("FrozenLake-v1")
    assert disturbed.reset(3) == calm.reset(3)
    for i, move in enumerate("LULUL"):
        disturbed.compute_reward(disturbed.get_state(i), 1)
        assert disturbed.step(move) == calm.step(move)


def test_an_environment_without_an_entry_is_rendered_or_printed(monkeypatch):
    monkeypatch.delitem(ENVIRONMENTS, "FrozenLake-v1")
    lake = make_env("FrozenLake-v1", is_slippery=False)
    assert lake.reset(0) == "Answer with one of: 0, 1, 2, 3.\n\n\n[S]FFF\nFHFH\nFFFH\nHFFG\n"
    assert lake.step("action 1")[0] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG\n"
    assert make_env("Lock-v0", instruction="").reset(0) == "0, 0"


def test_the_environments_own_truncation_is_told_from_ours():
    assert last_info(make_env("Lock-v0", digits=99), *["98"] * 8)["end_reason"] == "env_truncated"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (KeyError("lost"), "raised KeyError: 'lost'"),
        (SystemExit(3), "raised SystemExit: 3"),
        (StopIteration("no more levels"), "raised StopIteration: no more levels"),
        (None, "raised ValueError: the reward nan is no finite number below 1e+30"),
    ],
)
def test_a_move_that_the_environment_cannot_score_is_its_responses_failure_alone(monkeypatch, error, says):
    env = make_env("Lock-v0")
    manager, plain_step = CustomRewardManager(env), Lock.step

    def step(self, action):
        if action == 2 and error is not None:
            raise error
        observation, _, *rest = plain_step(self, action)
        return observation, float("nan") if action == 2 else 0.5, *rest

    monkeypatch.setattr(Lock, "step", step)
    info = [{"state": env.start_state(7)}] * 3
    data = DataProto.from_single_dict({"responses": ["1", "2", "3"], "extra_info": info})
    before, failed, after = manager(data)
    assert before == after == {"score": 0.5, "valid_action": 1.0} and isinstance(failed, NotScored)
    assert failed.reason.startswith(f"Lock-v0 {says}, after reset(seed=7) and actions [2]")
    assert ("(at " in failed.reason) is (error is not None)


def test_held_out_seeds_leave_training_states_where_all_seeds_share_one_map():
    env = make_env("Blackjack-v1", exclude_seeds=range(10))
    assert env.train_seed(0) == make_env("Blackjack-v1").train_seed(0)
    assert env.train_seed(0) != make_env("Blackjack-v1", exclude_seeds=[env.train_seed(0)]).train_seed(0)


@pytest.mark.parametrize(
    ("rule", "terminated", "last_reward", "total", "wanted"),
    [
        ({"terminated": True}, True, -1.0, -40.0, True),  # MountainCar at its goal
        ({"terminated": True}, False, -1.0, -200.0, False),
        ({"terminated": False}, True, 1.0, 9.0, False),  # CartPole falls at once
        ({"terminated": False}, False, 1.0, 500.0, True),
        ({"last_reward_above": 0}, True, 0.0, 0.0, False),  # FrozenLake, in a hole
        ({"last_reward_above": 0}, True, 1.0, 1.0, True),
        ({"return_above": 474}, True, 1.0, 474.0, False),
        ({"return_above": 474}, True, 1.0, 475.0, True),
        ({"terminated": True, "return_above": -20}, True, -1.0, -13.0, True),  # all conditions count
        ({"terminated": True, "return_above": -20}, True, -1.0, -113.0, False),
    ],
)
def test_a_success_fulfils_all_conditions_of_the_rule(rule, terminated, last_reward, total, wanted):
    assert is_success(success_rule(rule), terminated, last_reward, total) is wanted


def last_info(env: TextEnv, *answers: str) -> dict:
    env.reset(0)
    return [env.step(answer) for answer in answers][-1][4]


def test_without_a_rule_the_environment_says_what_a_success_is_and_a_rule_has_the_last_word():
    assert last_info(make_env("Lock-v0", max_turns=1), "0")["success"] is None
    assert last_info(make_env("Said-v0", max_turns=2), "0", "silence")["success"] is True  # what was said last
    assert last_info(make_env("Said-v0", max_turns=2, success={"terminated": True}), "0", "0")["success"] is False
    assert make_env("Said-v0", success={}).success == SuccessConfig(info_success=True)


def test_shipped_environments_know_their_successes():
    lake = make_env(**LAKE)
    assert [last_info(lake, *way)["success"] for way in ("RRDDDR", "RD", "R")] == [True, False, False]
    fell = last_info(make_env("CliffWalking-v1", max_turns=1), "right")
    assert fell["success"] is False and fell["return"] == -100.0
    assert {make_env(config["env_id"]).success is None for config in SHIPPED} == {False}


COSTS = {  # CliffWalking's by the table: no short walk is sure to fall; CartPole's, as silence must not live on its 1s
    "FrozenLake-v1": 0.0, "CliffWalking-v1": -100.0, "Taxi-v4": -10.0, "Blackjack-v1": -1.0, "MountainCar-v0": -1.0,
    "CartPole-v1": 0.0,
}  # fmt: skip


@pytest.mark.parametrize(("env_id", "cost"), COSTS.items())
def test_an_answer_without_a_move_costs_no_less_than_the_worst_move(env_id, cost):
    env = make_env(env_id)
    env.reset(0)
    assert env.step("?")[1] == cost == env.clone().invalid_reward
    assert make_env(env_id, invalid_reward=0.25).invalid_reward == 0.25


def test_an_environment_is_tried_out_once_and_not_again_by_its_clones(monkeypatch):
    env = make_env("Lock-v0")
    monkeypatch.setattr(walks, "try_out", lambda environment: pytest.fail("tried out again"))
    assert pickle.loads(pickle.dumps(env.clone())).get_state(1) == env.get_state(1)


def test_an_action_outside_the_space_is_an_invalid_answer_however_it_was_read():
    env = make_env("Lock-v0")
    env.reset(0)
    assert env.act(9)[4]["invalid"] == 1 and env.act(None)[4]["invalid"] == 2 and env.act(1)[4]["invalid"] == 2
    assert env.compute_reward(env.start_state(0), 9) == env.compute_reward(env.start_state(0), None) == 0.0
    for play in (env.act, lambda action: env.compute_reward(env.start_state(0), action)):
        with pytest.raises(ValueError, match="the action 'left' was given: Lock-v0 takes actions of Disc"):
            play("left")


def test_an_answer_is_written_as_the_users_function_reads_it():
    """Letters are read here, as in README, and not the numbers of CartPole."""
    env = TextEnv("CartPole-v1", text_to_action=lambda text: {"L": 0, "R": 1}.get(text.strip()[:1]))
    assert [env.action_to_text(action) for action in (0, 1)] == ["L", "R"]
    assert TextEnv("CartPole-v1").action_to_text(0) == "0"
    with pytest.raises(ValueError, match=r"no answer that reads as 0 .*set action_names"):
        TextEnv("CartPole-v1", text_to_action=lambda text: 1).action_to_text(0)


@pytest.mark.parametrize("returned", [1, "1", " 1", 1.0, np.int64(1), np.float32(1), True])
def test_a_whole_number_of_any_type_is_a_numbered_action(returned):
    env = TextEnv("Blackjack-v1", text_to_action=lambda text: returned)
    assert env.extract_action("hit") == 1 and type(env.extract_action("hit")) is int


@pytest.mark.parametrize("returned", ["hit", 0.5, [1], float("nan"), float("inf"), {"action": 1}])
def test_anything_else_is_refused_with_the_value_and_the_rule(returned):
    words = rf"returned {re.escape(repr(returned))} for the answer '0': .* takes actions of Discrete\(2\), or None"
    with pytest.raises(ValueError, match=words):
        TextEnv("Blackjack-v1", text_to_action=lambda text: returned)
    env = TextEnv("Blackjack-v1", text_to_action=lambda text: returned if text == "hit" else 0)
    with pytest.raises(ValueError, match=words.replace("answer '0'", "answer 'hit'")):
        env.extract_action("hit")


def test_an_illegal_answer_may_end_the_episode_and_such_an_end_is_no_success():
    env = make_env("CliffWalking-v1", invalid_action="end", invalid_reward=-3.0)  # terminated is success there
    env.reset(0)
    env.step("up")
    text, reward, terminated, truncated, info = env.step("fly")
    assert (reward, terminated, truncated) == (-3.0, True, False) and text.startswith("That was no legal action.\n")
    assert info["end_reason"] == "terminated" and info["success"] is False and info["return"] == -4.0
    pole = make_env("CartPole-v1", invalid_action="end", success={"terminated": False})
    assert last_info(pole, "?")["success"] is False
    pole = make_env("CartPole-v1", max_turns=2, success={"terminated": False})
    successes = [last_info(pole, *answers)["success"] for answers in ("??", "?R", "LR")]
    assert successes == [False, False, True]  # the pole has not stood as long as nothing was done


def test_what_is_said_of_an_illegal_answer_is_a_setting_and_no_part_of_the_state():
    env = make_env(**LAKE, invalid_feedback="No.")
    prompt = env.reset(0)
    assert env.step("?")[0] == "No.\nPFFF\nFHFH\nFFFH\nHFFG" == env.state.reply
    assert env.state.text == "PFFF\nFHFH\nFFFH\nHFFG" and env.prompt == prompt
    assert env.step("R")[0] == "SPFF\nFHFH\nFFFH\nHFFG" == env.state.reply
    silent = make_env(**LAKE, invalid_feedback="")
    silent.reset(0)
    assert silent.step("?")[0] == "PFFF\nFHFH\nFFFH\nHFFG"


def test_what_does_not_repeat_itself_may_play_episodes():
    env = make_env("Unseeded-v0", repeatable=False)
    assert env.reset(0) != env.reset(0) and env.step("1")[4]["turns"] == 1 and env.invalid_reward == 0.0


class Changing(Lock):
    """A lock whose number of digits changes at a reset (`at` 0) or after a step; an equal space is another object."""

    def __init__(self, at=0, digits=4):
        super().__init__()
        self.at, self.changed = at, digits

    def reset(self, *, seed=None, options=None):
        return self.change(super().reset(seed=seed))

    def step(self, action):
        return self.change((*super().step(action)[:2], False, False, {}))

    def change(self, result):
        if self.tries == self.at:
            self.action_space = gym.spaces.Discrete(self.changed)
        return result


@pytest.mark.parametrize("digits", [2, 4, 6])
@pytest.mark.parametrize(("at", "way"), [(0, r"\[\]"), (2, r"\[\d, \d\]")])
def test_actions_that_change_are_refused_by_name_at_the_trial_and_in_episodes(at, digits, way):
    says = rf"Changing-v0: action_space is Discrete\({digits}\) after reset\(seed=\d\) and actions {way}, and was Di"
    arguments = {"observation_to_text": lambda env, _: "", "env_kwargs": {"at": at, "digits": digits}}
    with nullcontext() if digits == 4 else pytest.raises(ValueError, match=says):
        TextEnv("Changing-v0", **arguments)
    env = TextEnv("Changing-v0", **arguments, repeatable=False)
    with nullcontext() if digits == 4 else pytest.raises(ValueError, match=says):
        env.reset(7)
        for answer in "010":
            env.step(answer)


class Strange(Lock):
    """A lock that misbehaves in its second step, as `does` says."""

    does = None
    closed: ClassVar[list["Strange"]] = []

    def step(self, action):
        shown, reward, _, _, info = super().step(action)
        strange = {
            "four": (shown, reward, False, info),
            "nan": (shown, float("nan"), False, False, info),
            "text": (shown, reward, False, False, {"success": "yes"}),
            "players": (shown, reward, {"a": False, "b": False}, False, info),
            "nothing": (shown, None, False, False, info),
            "no info": (shown, reward, False, False, None),
        }
        usual = shown, reward, False, False, info
        return strange.get(self.does, usual) if self.tries == 2 else usual

    def close(self):
        self.closed.append(self)
        raise OSError("the door is stuck")


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("four", r"step returned \(.*\): not observation, reward, terminated, truncated, info"),
        ("nan", "the reward nan is no finite number"),
        ("text", r"success is 'yes': it must be one number"),
        ("players", r"terminated is \{'a': False, 'b': False\}: it must be one number, or True"),
        ("nothing", "reward is None: it must be one number"),
        ("no info", r"step returned \(.*, None\): not observation, reward, terminated, truncated, info"),
        ("half", r"observation_to_text says a text that cannot be encoded: '\\udc80' at place 4 is half a character"),
    ],
)
def test_what_gymnasium_would_not_return_is_refused_at_the_trial_with_its_seed(monkeypatch, does, says):
    monkeypatch.setattr(Strange, "does", does)
    shown = lambda env, _: "half\udc80" if does == "half" and env.tries == 2 else str(env.tries)  # noqa: E731
    with pytest.raises(RuntimeError, match=rf"{says}.*, after reset\(seed=\d\) and actions \[\d, \d\]"):
        TextEnv("Strange-v0", shown)


def test_a_reset_in_gyms_older_form_is_refused_even_if_its_observation_has_two_parts(monkeypatch):
    monkeypatch.setattr(Strange, "reset", lambda self, seed=None, options=None: [3, 1])
    with pytest.raises(RuntimeError, match=r"reset returned \[3, 1\]: not observation, info, after reset\(seed=0\)"):
        TextEnv("Strange-v0", lambda env, _: "")


def test_what_is_not_used_any_more_is_closed_and_an_error_of_close_is_a_warning(caplog):
    Strange.closed.clear()
    env = TextEnv("Strange-v0", lambda env, _: "", random_map=lambda seed: {"colour": seed % 5}, repeatable=False)
    for seed in range(4):
        env.reset(seed)
        env.start_state(seed)
    assert len(Strange.closed) == 3
    env.close()
    assert len({*map(id, Strange.closed)}) == 4 + 4
    assert "Strange-v0 could not be closed: OSError: the door is stuck" in caplog.text


def test_a_trial_that_hangs_ends_by_the_timeout(monkeypatch):
    goes_on = threading.Event()

    def step(self, action):
        goes_on.wait()
        return plain_step(self, action)

    plain_step = Lock.step
    monkeypatch.setattr(Lock, "step", step)
    config = compose("env.id=Lock-v0", "env.timeout=0.1", "~env.kwargs", "env.val_episodes=0")
    with pytest.raises(ConfigError, match=r"move 1 took more than env\.timeout=0\.1 seconds: raise it, or leave"):
        build_environment(config)
    goes_on.set()


class Late(Lock):
    """A lock that reports a success with its last step, and never says that there was none."""

    def step(self, action):
        moved = super().step(action)
        return (*moved[:4], {"success": True}) if moved[2] else (*moved[:4], {})


def test_success_that_is_said_at_the_end_alone_means_the_same_in_every_episode(monkeypatch, capsys):
    env = make_env("Late-v0", max_turns=2)
    assert env.success == SuccessConfig(info_success=True)  # as the walks of the trial have found
    assert last_info(env, "?", "?")["success"] is False
    monkeypatch.setattr(walks, "MOVES", 0)
    unseen = make_env("Late-v0", max_turns=8)
    assert unseen.success is None
    ended = next(info for info in (last_info(unseen, str(number)) for number in range(4)) if info["end_reason"])
    assert ended["success"] is None and "set env.success.info_success=true" in capsys.readouterr().err
    told = make_env("Late-v0", max_turns=8, success={"info_success": True})
    assert any(last_info(told, str(number))["success"] for number in range(4))
