"""The three files a user edits, as a user edits them: states as prompts, and rewards of actions."""

from typing import Any

import pytest

import main
from configs.schema import DataConfig
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import EnvState, TextEnv, make_env
from custom.reward_manager import CustomRewardManager
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from tests.runs import compose, short_run

TOKENIZER = build_tokenizer()
MAPS = {"is_slippery": False, "random_maps": True, "instruction": "Go."}


def make_dataset(size: int = 12, first: int = 0, **env_kwargs: Any) -> CustomEnvDataset:
    environment = make_env("FrozenLake-v1", **{**MAPS, **env_kwargs})
    return CustomEnvDataset(environment, TOKENIZER, DataConfig(max_prompt_length=64), size, first)


def test_a_row_is_a_state_a_prompt_that_shows_it_and_an_optimal_answer():
    dataset = make_dataset(first=5)
    environment = dataset.environment
    assert len(dataset) == 12
    for i in range(12):
        row, state = dataset[i], environment.get_state(5 + i)
        assert row["extra_info"] == {"index": i, "state": state} and row["data_source"] == "FrozenLake-v1"
        assert row["raw_prompt"] == [{"role": "user", "content": f"Go.\n\n{state.text}"}]
        assert TOKENIZER.decode(row["raw_prompt_ids"]) == f"<|user|>Go.\n\n{state.text}<|end|><|assistant|>"
        answer = row["reward_model"]["ground_truth"]
        assert environment.compute_reward(state, environment.extract_action(answer)) == 1.0


def test_an_environment_without_a_table_has_no_expected_answer():
    dataset = CustomEnvDataset(make_env("Blackjack-v1"), TOKENIZER, DataConfig(), size=3)
    assert dataset[0]["reward_model"]["ground_truth"] is None


class Growing(CustomEnvDataset):
    """A lake whose prompts have 10 to 24 characters, by the player's cell; the template adds 3 tokens."""

    def state_to_text(self, state):
        return "x" * (10 + state.text.replace("\n", "").index("P"))


def growing(limit: int, filter: bool, truncation: str, size: int = 200) -> Growing:
    config = DataConfig(max_prompt_length=limit, filter_overlong_prompts=filter, truncation=truncation)
    return Growing(make_env("FrozenLake-v1", is_slippery=False), TOKENIZER, config, size)


@pytest.mark.parametrize("filter", [True, False])
def test_prompts_that_are_too_long_are_counted_and_refused_when_the_dataset_is_made(filter):
    with pytest.raises(ValueError, match=r"Growing: \d+ of 64 states .*max_prompt_length=26 tokens, the longest 27: r"):
        growing(26, filter, "error")
    with pytest.raises(ValueError, match=r"Growing: 64 of 64 states .*the longest 27: raise it to at least 27"):
        growing(9, True, "left")
    growing(27, filter, "error")


def test_a_prompt_that_is_too_long_is_cut_or_another_state_drawn_by_rule(caplog):
    cut = growing(19, False, "right")
    assert "such prompts are cut (right)" in caplog.text
    lengths = [len(cut[i]["raw_prompt_ids"]) for i in range(200)]
    assert max(lengths) == 19 and lengths.count(19) > 50
    drawn, again = growing(19, True, "right"), growing(19, True, "right")
    assert "such prompts are left out" in caplog.text
    rows = [drawn[i] for i in range(200)]
    assert max(len(row["raw_prompt_ids"]) for row in rows) == 19 and drawn.num_filtered > 50
    assert rows[::-1] == [again[i] for i in reversed(range(200))]
    replaced = [i for i, length in enumerate(lengths) if length == 19 > len(rows[i]["raw_prompt_ids"])]
    assert len({rows[i]["extra_info"]["state"] for i in replaced}) > 20, "a state of its own in each place"


def test_a_row_that_the_sample_at_the_start_missed_is_refused_where_nothing_may_be_cut():
    class Unmeasured(Growing):
        def check_sizes(self, states, what):
            pass

    environment = make_env("FrozenLake-v1", is_slippery=False)
    config = DataConfig(max_prompt_length=20, filter_overlong_prompts=False)
    with pytest.raises(
        ValueError, match=r"Unmeasured, FrozenLake-v1 after reset\(seed=\d+\) .*max_prompt_length=20: raise"
    ):
        [*map(Unmeasured(environment, TOKENIZER, config, 50).__getitem__, range(50))]
    none_fits = Unmeasured(environment, TOKENIZER, DataConfig(max_prompt_length=9), 50)
    with pytest.raises(ValueError, match="Unmeasured, row 7: 100 states in a row have prompts of more than"):
        none_fits[7]


def test_another_state_is_drawn_where_the_environment_fails_to_make_one(monkeypatch, capsys):
    dataset, whole = make_dataset(), make_dataset()
    get_state = TextEnv.get_state

    def failing(self: TextEnv, i: int, reset_seed: int | None = None) -> EnvState:
        if i in (3, 5):
            raise RuntimeError(f"no reply for {i}")
        return get_state(self, i, reset_seed)

    wanted = [whole[i] for i in range(12)]
    monkeypatch.setattr(TextEnv, "get_state", failing)
    rows = [dataset[i] for i in range(12)]
    assert [i for i in range(12) if rows[i] != wanted[i]] == [3, 5]
    assert rows[3]["extra_info"]["index"] == 3 and rows[3]["extra_info"]["state"] != rows[5]["extra_info"]["state"]
    assert capsys.readouterr().err.count("have others drawn in their place: no reply for 3") == 1
    monkeypatch.setattr(TextEnv, "get_state", lambda self, i, reset_seed=None: failing(self, 3))
    with pytest.raises(RuntimeError, match="no reply for 3"):
        dataset[0]


def test_the_reward_manager_works_alone_as_its_docstring_shows():
    manager = CustomRewardManager(make_env("FrozenLake-v1"))
    state = manager.environment.get_state(0)
    best = manager.environment.optimal_actions(state)
    answers = ["left", "I go DOWN", "R", "up", "no idea"]
    data = DataProto.from_single_dict({"responses": answers, "extra_info": [{"state": state}] * 5})
    expected = [{"score": float(action in best), "valid_action": 1.0} for action in range(4)]
    assert manager(data) == [*expected, {"score": 0.0, "valid_action": 0.0}]


MANAGER = """
from custom.reward_manager import CustomRewardManager


class Mine(CustomRewardManager):
    def __init__(self, environment, tokenizer, scale=1):
        super().__init__(environment)
        self.tokenizer, self.scale = tokenizer, scale

    def score(self, response, state):
        return float(len(self.tokenizer(response).input_ids)) * self.scale


class Reader(CustomRewardManager):
    def __init__(self, *arguments, **kwargs):
        super().__init__(*arguments, **kwargs)

    def extract_action(self, text):
        return None
"""


def test_a_manager_is_given_the_tokenizer_that_it_names_and_what_episodes_do_not_call_is_told(
    tmp_path, tiny_model, capsys
):
    (tmp_path / "mine.py").write_text(MANAGER)
    episodes = ["env.mode=episode", "env.history=turns", "env.val_size=0"]
    runs = (("Mine", ["+reward.reward_kwargs.scale=2"], False), ("Mine", episodes, True), ("Reader", episodes, False))
    for name, overrides, told in runs:
        manager = f"reward.reward_manager={{path: {tmp_path}/mine.py, name: {name}}}"
        run = main.build(compose(*short_run(tiny_model, tmp_path / "run", manager, *overrides)))
        assert ("env.mode=episode does not call its score: " in capsys.readouterr().err) == told
        if name == "Mine":
            assert run.parts.reward.score("abc", None) == (3.0 if told else 6.0)
