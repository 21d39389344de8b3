"""`make quickstart`: its folder is its own, and its demonstrations are safe moves."""

from custom.env_wrapper import EnvState, make_env
from scripts.quickstart import demonstrations, safe_moves

MAPS = {"is_slippery": False, "random_maps": True, "instruction": "Go."}


def test_safe_moves_by_hand():
    moves = {"PFH\nFHF\nFFG": [1, 2], "SPH\nFHF\nFFG": [0], "SFH\nFHP\nFFG": [1], "SFH\nFHF\nFPG": [0, 2]}
    for shown, expected in moves.items():
        assert safe_moves(EnvState(0, (), shown)) == expected


def test_demonstrations_hold_only_safe_moves_all_of_them_and_depend_on_the_seed():
    environment = make_env("FrozenLake-v1", **MAPS)
    rows = demonstrations(environment, 300, seed=0)
    for row in rows:
        [message] = row["prompt"]
        state = EnvState(0, (), message["content"].split("\n\n")[1])
        assert environment.extract_action(row["response"]) in safe_moves(state)
    assert {row["response"] for row in rows} == {"L", "D", "R", "U"}
    assert rows == demonstrations(environment, 300, seed=0) != demonstrations(environment, 300, seed=1)
