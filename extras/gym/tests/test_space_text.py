"""Any gymnasium space as text: observations by hand, actions there and back, every id of two of gymnasium's suites."""

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from custom.env_wrapper import ENVIRONMENTS, make_env, make_text_env
from extras.gym.space_text import SpaceText, bar, fixed_number, number_text
from tests.runs import compose
from training.environment import build_environment

INF = float("inf")
CAR = spaces.Dict(gas=spaces.Box(0, 1, (1,)), steer=spaces.Box(-1, 1, (1,)), gear=spaces.Discrete(5, start=1))
BOARD = spaces.Box(0, 9, (2, 3), np.int64)
OBSERVATIONS = [
    (spaces.Discrete(7), np.int64(3), "3"),
    (spaces.MultiDiscrete([4, 9]), np.array([2, 7]), "2 7"),
    (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), "1 0 1"),
    (spaces.MultiBinary((2, 2)), np.array([[1, 0], [0, 1]], np.int8), "1 0\n0 1"),
    (BOARD, np.array([[1, 2, 3], [4, 5, 6]]), "1 2 3\n4 5 6"),
    (spaces.Box(0, 1, (), np.float32), np.float32(0.5), "0.500"),
    (spaces.Box(0, 9, (2, 1, 2), np.int64), np.arange(4).reshape(2, 1, 2), "0 1\n\n2 3"),
    (spaces.Text(9), "hello", "hello"),
    (spaces.Tuple((spaces.Discrete(3), spaces.Text(5))), (1, "ab"), "1, ab"),
    (spaces.Tuple((spaces.Discrete(3), BOARD)), (1, np.zeros((2, 3))), "1\n0 0 0\n0 0 0"),
    (spaces.Dict(hand=spaces.Discrete(3), table=BOARD), {"hand": 1, "table": np.ones((2, 3), int)},
     "hand: 1\ntable:\n1 1 1\n1 1 1"),
    (spaces.OneOf((spaces.Discrete(3), spaces.Text(5))), (np.int64(1), "ab"), "1: ab"),
    (spaces.Sequence(spaces.Discrete(9)), (1, 5), "1, 5"),
    (spaces.Sequence(spaces.Discrete(9)), (), "none"),
    (spaces.Sequence(spaces.MultiBinary(2), stack=True), np.array([[0, 1], [1, 1]], np.int8), "0 1, 1 1"),
    (spaces.Graph(spaces.Discrete(9), spaces.Discrete(4)),
     spaces.GraphInstance(np.array([3, 5]), np.array([2]), np.array([[0, 1]])), "node 0: 3\nnode 1: 5\nedge 0 to 1: 2"),
    (spaces.Graph(spaces.Discrete(9), None), spaces.GraphInstance(np.array([3]), None, None), "node 0: 3"),
]  # fmt: skip


@pytest.mark.parametrize(("space", "observation", "text"), OBSERVATIONS, ids=str)
def test_observations_of_every_space_are_written_out(space, observation, text):
    SpaceText(space).check()
    assert SpaceText(space).write(observation) == text


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.123456, -1.0, 1.0, "0.123"),
        (-0.0001, -1.0, 1.0, "0.000"),  # no minus before nothing
        (0.0123456, -0.07, 0.07, "0.0123"),
        (123456.7, -INF, INF, "123000"),
        (1e-9, -INF, 3.4e38, "0.000000001"),
        (INF, -INF, INF, "inf"),
    ],
)
def test_numbers_keep_a_thousandth_of_their_range_or_three_digits(value, low, high, text):
    assert number_text(value, low, high) == text


def test_names_go_before_the_numbers_and_must_fit():
    space = spaces.Box(np.array([-1, 0]), np.array([1, 9]), dtype=np.float64)
    assert SpaceText(space).write(np.array([0.5, 2]), ["angle", "speed"]) == "angle 0.500, speed 2.000"
    with pytest.raises(ValueError, match="1 observation_names for Box"):
        SpaceText(space).check(["angle"])
    with pytest.raises(ValueError, match="name the numbers of a flat array"):
        SpaceText(spaces.Discrete(3)).check(["x"])


def test_images_are_refused_wherever_they_are():
    image = spaces.Box(0, 255, (84, 84, 3), np.uint8)
    for space in (image, spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple((image,))), spaces.Sequence(image)):
        with pytest.raises(ValueError, match=r"84 x 84 x 3 = 21168 numbers, .* give it an observation_to_text"):
            SpaceText(space).check()


@pytest.mark.parametrize(
    ("space", "answer", "action"),
    [
        (spaces.Box(-1, 1, (1,)), "I steer 0.5", (0.5,)),
        (spaces.Box(-1, 1, (1,)), "not 0.25 but -.5.", (-0.5,)),  # the last one
        (spaces.Box(-1, 1, (1,)), "3", (1.0,)),  # beyond a bound counts as at it
        (spaces.Box(-1, 1, (1,)), "nan inf x2", None),
        (spaces.Box(-INF, INF, (1,)), "1e999", None),
        (spaces.Box(-1, 1, (2,)), "0.5", None),  # one too few
        (spaces.Box(-1, 1, (2,)), "first 9, then 0.5 and 0.25", (0.5, 0.25)),
        (spaces.Box(0, 9, (1,), np.int64), "7.0", (7,)),
        (spaces.Box(0, 9, (1,), np.int64), "7.5", None),
        (spaces.MultiDiscrete([3, 4], start=[1, 0]), "3-3", (3, 3)),
        (spaces.MultiBinary(2), "1, 300", None),
        (CAR, "gas 0.5, steer 7, gear 2", ((0.5,), (1.0,), 2)),  # in the order of the instruction
        (spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(2))), "2 0 1", (2, (0, 1))),
        (spaces.Text(5), " abc\n", "abc"),
    ],
    ids=str,
)  # fmt: skip
def test_actions_are_read_out_of_answers(space, answer, action):
    assert SpaceText(space).read(answer) == action
    assert action is None or space.contains(SpaceText(space).native(action))


ACTIONS = [
    spaces.Box(-2, 2, (3,)),
    spaces.Box(np.array([-1, -INF]), np.array([INF, INF]), dtype=np.float64),
    spaces.Box(-5, 5, (2, 2), np.int8),
    spaces.MultiDiscrete([[2, 3], [4, 5]]),
    spaces.MultiBinary(4),
    spaces.Text(8),
    CAR,
    spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,)))),
]


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (0.123456, -1.0, 1.0, "+0.123"),
        (-0.0001, -1.0, 1.0, "+0.000"),
        (7.0, 0.0, 255.0, "007.0"),
        (7, 0, 12, "07"),
        (-3, -10, 10, "-03"),
        (21.5, -INF, INF, "+0021.50"),
        (-0.0003, -INF, INF, "-3.0e-04"),
        (123456.7, 0.0, INF, "+1.2e+05"),
        (INF, -INF, INF, "inf"),
    ],
)
def test_numbers_of_a_fixed_width_by_hand(value, low, high, text):
    assert fixed_number(value, low, high) == text


@given(st.floats(-1e6, 1e6, width=32), st.sampled_from([(-INF, INF), (-1e5, 1e5), (-2.5, 0.5), (0.0, 7.0)]))
def test_a_number_of_a_fixed_width_is_as_wide_as_any_and_near_its_value(value, ends):
    value = min(max(value, ends[0]), ends[1])
    text = fixed_number(value, *ends)
    assert len(text) == len(fixed_number(1.0, *ends)) and float(text) == pytest.approx(
        value, rel=0.06, abs=0.01 + (ends[1] == 1e5)
    )


def test_a_style_is_a_setting_of_an_environment():
    names = make_env("CartPole-v1", observation_style="fixed").start_state(0).text
    assert re.fullmatch(r"position [+-]\S{5}, speed [+-]\S{7}, angle [+-]\S{6}, turning [+-]\S{7}", names)
    both = spaces.Dict(a=spaces.Tuple([spaces.Box(0, 99, (2,))]))
    assert SpaceText(both, fixed_width=True).write({"a": ([1.0, 23.0],)}) == "a: 01.00 23.00"
    with pytest.raises(ValueError, match="observation_style='wide': it is one of plain, fixed, bars"):
        make_env("CartPole-v1", observation_style="wide")


@pytest.mark.parametrize(
    ("value", "low", "high", "filled"),
    [(0, 0, 1, 0), (1, 0, 1, 16), (0.25, -1, 1, 10), (0.03, 0, 1, 0), (9, 0, 1, 16), (-9, 0, 1, 0), (3, 3, 3, 0)]
    + [(INF, 0, 1, 0)],
)
def test_bars_by_hand(value, low, high, filled):
    assert bar(value, low, high) == "#" * filled + "." * (16 - filled)


def test_bars_stand_beside_the_numbers_that_have_a_range():
    space = spaces.Dict(a=spaces.Discrete(3), b=spaces.Tuple([spaces.Box(0, 9, (2,)), spaces.Box(0, 9, (1,), int)]))
    value = {"a": 2, "b": ([0.0, 9.0], [4])}
    both = SpaceText(space, fixed_width=True).write(value, ranges=[[0, 9], [0, 18]])
    assert both == "a: 2\nb: 0.000 ................ 9.000 ########........, 4"


def test_bars_show_the_range_that_random_play_meets_in_every_copy_of_the_environment():
    env = make_env("CartPole-v1", observation_style="bars")
    (low, high), *_ = env.observation_ranges
    assert len(env.observation_ranges) == 4 and -2.4 < low < -0.05 and 0.05 < high < 2.4  # of bounds of ±4.8
    text, again = env.start_state(0).text, make_env("CartPole-v1", observation_style="bars")
    assert re.fullmatch(r"position \S{6} #{5,12}\.+, speed \S{8} #+\.+, angle \S{7} #+\.+, turning \S{8} #+\.+", text)
    assert text == env.clone().start_state(0).text == again.start_state(0).text
    given = make_env("CartPole-v1", observation_style="bars", observation_ranges=[[-9, 0], [0, 9]] * 2)
    assert re.fullmatch(r"(\w+ \S+ #{16}, \w+ \S+ \.{16}(, )?){2}", given.start_state(0).text)
    for more in ({"observation_ranges": [[0, 1]]}, {"repeatable": False}):
        with pytest.raises(ValueError, match="observation_ranges"):
            make_env("CartPole-v1", observation_style="bars", **more)


@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_any_action_survives_being_said_and_read(space):
    space.seed(0)
    text = SpaceText(space)
    for _ in range(50):
        action = text.plain(space.sample())
        assert text.read(text.answer(action)) == action == text.plain(text.native(action))
        assert hash(action) is not None and space.contains(text.native(action))


@pytest.mark.parametrize("space", ACTIONS, ids=str)
@given(text=st.text() | st.lists(st.sampled_from(["-", "1", "0.5", "e", "9" * 400, ".", " "])).map("".join))
@settings(max_examples=50, deadline=None)
def test_any_answer_is_read_or_is_no_action(space, text):
    action = SpaceText(space).read(text)
    assert action is None or isinstance(space, spaces.Text) or space.contains(SpaceText(space).native(action))


@pytest.mark.parametrize(
    ("space", "instruction"),
    [
        (spaces.Box(-2, 2, (3,)), "Answer with 3 numbers from -2 to 2."),
        (spaces.Box(0, INF, (1,)), "Answer with a number from 0."),
        (spaces.MultiDiscrete([3, 4]), "Answer with 2 whole numbers: from 0 to 2, from 0 to 3."),
        (CAR, "Answer with 3 numbers: gas from 0 to 1, steer from -1 to 1, gear from 1 to 5."),
    ],
    ids=str,
)
def test_the_instruction_says_what_to_answer(space, instruction):
    assert SpaceText(space).how_to_answer() == instruction


PLAIN = [
    name
    for name, spec in gym.registry.items()
    if re.match(r"gymnasium\.envs\.(toy_text|classic_control)\.", str(spec.entry_point))
]


@pytest.mark.parametrize("bare", [False, True], ids=["shipped", "without an entry"])
@pytest.mark.parametrize("env_id", PLAIN)
def test_every_id_of_gymnasium_that_needs_no_more_runs_without_a_function(env_id, bare, monkeypatch):
    if bare:
        monkeypatch.delitem(ENVIRONMENTS, env_id, raising=False)
    env, space = make_env(env_id), gym.make(env_id).action_space
    prompt, total = env.reset(seed=1), 0.0
    assert (prompt.startswith(env.instruction) and env.instruction.startswith("Answer with") is bare) or not bare
    space.seed(2)
    for turn in range(3):
        action = SpaceText(space).plain(space.sample())
        text, reward, terminated, truncated, info = env.step(f"I choose {env.action_to_text(action)}")
        total += reward
        assert info["action"] == action and info["turns"] == turn + 1 and info["invalid"] == 0
        assert re.search(r"\w", text) and "array" not in text and "\x1b" not in text and len(text) < 500
        if terminated or truncated:
            break
    assert info["return"] == pytest.approx(total)
    assert env.get_state(3) == env.get_state(3) and isinstance(hash(env.get_state(3)), int)


class Odd(gym.Env):
    """Spaces as a test wants them; what was done is in info."""

    def __init__(self, observed: gym.Space, done: gym.Space) -> None:
        self.observation_space, self.action_space = observed, done

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        return self.observation_space.sample(), 1.0, False, False, {"given": action}


gym.register("Odd-v0", Odd)


def odd(observed: gym.Space, done: gym.Space, **given: Any):
    return make_env("Odd-v0", observed=observed, done=done, **given)


@pytest.mark.parametrize("space", ACTIONS, ids=str)
def test_environments_get_actions_of_their_own_form(space):
    env = odd(spaces.Discrete(3), space)
    env.reset(0)
    space.seed(1)
    action = SpaceText(space).plain(space.sample())
    info = env.step(env.action_to_text(action))[4]
    assert SpaceText(space).plain(info["given"]) == info["action"] == action == env.state.actions[0]
    assert env.compute_reward(env.start_state(0), action) == 1.0


def test_spaces_without_a_default_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"an action of Sequence.* is not made of numbers: pass text_to_action"):
        odd(spaces.Discrete(3), spaces.Sequence(spaces.Discrete(2)))
    with pytest.raises(ValueError, match=r"an observation has 20 x 20 = 400 numbers"):
        odd(spaces.Box(0, 1, (20, 20)), spaces.Discrete(2))
    assert odd(spaces.Box(0, 1, (20, 20)), spaces.Discrete(2), observation_to_text=lambda env, seen: "dark").reset(0)


def test_a_function_may_return_an_action_of_the_environments_own_form():
    for returned in (np.array([0.5], np.float32), [0.5], 0.5):
        env = odd(spaces.Discrete(3), spaces.Box(-1, 1, (1,)), text_to_action=lambda text, back=returned: back)
        assert env.extract_action("?") == (0.5,)
    assert odd(spaces.Discrete(3), spaces.Box(-1, 1, (1,)), text_to_action=lambda text: 7).extract_action("?") is None
    for returned in ("fast", [1, 2]):
        env = odd(spaces.Discrete(3), spaces.Box(-1, 1, (1,)), text_to_action=lambda text, back=returned: back)
        with pytest.raises(ValueError, match=r"for the answer 'go': Odd-v0 takes actions of Box"):
            env.extract_action("go")


def test_two_functions_make_any_id_an_environment(monkeypatch):
    monkeypatch.delitem(ENVIRONMENTS, "CartPole-v1")
    made = make_text_env("CartPole-v1", lambda env, seen: "falling" if seen[2] else "up", lambda text: int("R" in text))
    assert made.reset(0) == "falling" and made.step("R")[4]["action"] == 1
    again = make_env("CartPole-v1", max_turns=3)  # the functions are the id's from now on
    assert again.reset(0) == "falling" and again.max_turns == 3
    assert make_text_env("CartPole-v1", max_turns=2, instruction="Stand!").reset(0) == "Stand!\n\nfalling"


def test_what_an_id_was_made_with_reaches_the_run(monkeypatch):
    monkeypatch.setitem(ENVIRONMENTS, "CartPole-v1", {})
    settings = {"instruction": "Stand!", "success": {"return_above": 3.0}, "max_walk": 2, "max_turns": 4}
    settings |= {"observation_to_text": lambda env, seen: "up", "sutton_barto_reward": True, "seed": 7}
    make_text_env("CartPole-v1", **settings)
    run = build_environment(compose("env.id=CartPole-v1", name="ppo_trainer"))
    assert run.reset(0) == "Stand!\n\nup" and (run.max_walk, run.max_turns) == (2, 4)
    assert run.success.return_above == 3.0 and run.step("0")[1] == 0.0, "gymnasium's own argument too"
    assert run.seed != 7, "that is the run's"
    own = ("env.id=CartPole-v1", "env.max_walk=5", "env.kwargs.instruction=Balance.")
    run = build_environment(compose(*own, name="ppo_trainer"))
    assert run.reset(0).startswith("Balance.") and (run.max_walk, run.max_turns) == (5, 4)
