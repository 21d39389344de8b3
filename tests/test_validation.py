"""Validation: several answers a row scored by the user's function, and whole episodes in the real environment."""

import json
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from configs.checks import check_config
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import ENVIRONMENTS, make_env
from custom.reward_manager import CustomRewardManager
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from data.rl_dataset import RLHFDataset
from data.sampler import PromptLoader, SequentialSampler
from data.types import SamplingParams
from extras.report.lines import validation_summary
from extras.report.transcripts import read_episodes, spread
from tests import engines
from tests.batches import padded
from tests.engines import Playing
from tests.runs import compose
from training.environment import EnvSetup
from training.reward import load_reward_manager
from training.validation import Validator

TOKENIZER = build_tokenizer()
MAPS = {"is_slippery": False, "random_maps": True, "instruction": ""}

REWARD = """
def compute_score(data_source, solution_str, ground_truth, split):
    assert split == "val"
    return {"score": float(solution_str == ground_truth), "pred": solution_str}
"""


class Scripted:
    """A rollout that answers from a function of (prompt text, how often it was asked that before)."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked: list[str] = []
        self.calls: list[tuple[SamplingParams, int]] = []

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        assert prompts.meta_info == {"validate": True}
        self.calls.append((sampling, seed))
        responses = []
        for ids in prompts.raw_prompt_ids:
            text = TOKENIZER.decode(ids, skip_special_tokens=True)
            answer = TOKENIZER.encode(self.answer(text, self.asked.count(text)))
            self.asked.append(text)
            responses.append([*answer, TOKENIZER.eos_token_id])
        return prompts.union(padded([*prompts.raw_prompt_ids], responses, 64, 8, TOKENIZER.pad_token_id))


def on_rows(folder: Path, rollout: Scripted, *overrides: str, prompts: list = ("1+1=", "2+3=", "2*3=")) -> Validator:
    rows = [
        {"prompt": text, "data_source": source, "reward_model": {"style": "rule", "ground_truth": truth}}
        for text, source, truth in zip(prompts, ("sums", "sums", "products"), "256", strict=True)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "val.parquet")
    (folder / "my_reward.py").write_text(REWARD)
    config = compose(
        f"reward.custom_reward_function.path={folder}/my_reward.py",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        f"trainer.validation_data_dir={folder}/dumps",
        *overrides,
        name="ppo_trainer",
    )
    dataset = RLHFDataset(folder / "val.parquet", TOKENIZER, config=config.data)
    loader = PromptLoader(dataset, 2, SequentialSampler(dataset, config.data), drop_last=False)
    reward = load_reward_manager(config.reward, TOKENIZER, None)
    return Validator(config, TOKENIZER, {"rollout": rollout}, reward, loader, None)


def on_episodes(
    folder: Path,
    answer: Callable[[str, int], str],
    *overrides: str,
    dataset_class: type = CustomEnvDataset,
    manager_class: type = CustomRewardManager,
    **env_kwargs: Any,
) -> Validator:
    config = compose(
        "env.val_episodes=6",
        "env.val_seed=1000",
        f"trainer.validation_data_dir={folder}/dumps",
        *overrides,
    )
    environment = make_env("FrozenLake-v1", max_turns=12, **MAPS, **env_kwargs)
    dataset = dataset_class(environment, TOKENIZER, config.data, size=4)
    manager = manager_class(environment)
    game = EnvSetup(environment, dataset, manager)
    playing = Playing(config, engines.Scripted(config, TOKENIZER, answer), game)
    return Validator(config, TOKENIZER, {"rollout": playing}, manager, None, game)


def dumped(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "dumps" / f"{step}.jsonl").read_text().splitlines()]


def test_several_answers_a_row_are_compared_within_the_row_and_averaged_within_the_source(tmp_path):
    # 1+1 right in 1 of 4, 2+3 in 3 of 4, 2*3 in none
    right = {"1+1=": (0,), "2+3=": (0, 1, 3), "2*3=": ()}
    truth = {"1+1=": "2", "2+3=": "5", "2*3=": "6"}
    rollout = Scripted(lambda text, times: truth[text] if times in right[text] else "9")
    metrics = on_rows(tmp_path, rollout, "trainer.log_val_generations=0").run(step=7)
    assert metrics["val-core/sums/reward/mean@4"] == (0.25 + 0.75) / 2
    assert metrics["val-core/products/reward/mean@4"] == 0.0 == metrics["val-core/products/reward/best@4/mean"]
    # best of 4 draws with replacement: 1 - (3/4)^4 and 1 - (1/4)^4
    expected = ((1 - 0.75**4) + (1 - 0.25**4)) / 2
    assert metrics["val-core/sums/reward/best@4/mean"] == pytest.approx(expected, abs=0.03)
    assert metrics["val-core/sums/reward/maj@4/mean"] < 0.75  # pred votes; 2+3 wins its vote, 1+1 loses it
    assert rollout.asked == [text for text in truth for _ in range(4)]  # two batches, answers of a row in a row


def test_answers_to_rows_are_dumped_with_all_that_the_reward_said(tmp_path):
    on_rows(tmp_path, Scripted(lambda text, times: "2"), "trainer.log_val_generations=0").run(step=3)
    rows = dumped(tmp_path, 3)
    assert len(rows) == 12
    assert rows[0].items() >= {
        "step": 3, "input": "1+1=", "output": "2", "gts": "2", "score": 1.0, "end_reason": "terminated", "pred": "2",
        "uid": "val-0-0", "data_source": "sums",
    }.items()  # fmt: skip


def test_sampling_of_validation_is_its_own_and_does_not_depend_on_the_step(tmp_path):
    overrides = [
        f"actor_rollout_ref.rollout.val_kwargs.{what}" for what in ("temperature=0.6", "top_p=0.9", "do_sample=true")
    ]
    rollout = Scripted(lambda text, times: "2")
    validator = on_rows(
        tmp_path, rollout, *overrides, "data.max_response_length=8", "actor_rollout_ref.rollout.top_k=7"
    )
    validator.run(step=1)
    validator.run(step=2)
    assert {sampling for sampling, _ in rollout.calls} == {SamplingParams(True, 0.6, -1, 0.9, 8)}
    seeds = [seed for _, seed in rollout.calls]
    assert seeds[:2] == seeds[2:] and seeds[0] != seeds[1]


@pytest.mark.parametrize(
    ("settings", "drawn"),
    [
        ("{}", (False, 1.0)),
        ("{temperature: 0.6}", (True, 0.6)),  # as verl, which asks the temperature alone
        ("{do_sample: true}", (True, 1.0)),
        ("{do_sample: true, temperature: 0}", (False, 0.0)),
        ("{do_sample: false, temperature: 0.6}", (False, 0.6)),
    ],
)
def test_validation_samples_where_it_is_asked_to_or_has_a_temperature(settings: str, drawn: tuple[bool, float], capsys):
    config = compose(f"actor_rollout_ref.rollout.val_kwargs={settings}")
    check_config(config)
    params = SamplingParams.from_config(config.actor_rollout_ref.rollout.val_kwargs, 4)
    assert (params.do_sample, params.temperature) == drawn
    contradiction = "do_sample=false takes the likeliest token at any"
    assert (contradiction in capsys.readouterr().err) == (drawn == (False, 0.6))


def optimal_answers() -> dict[str, str]:
    """Prompt -> the letter of an optimal move, for every state of the maps that are played below."""
    environment, answers = make_env("FrozenLake-v1", **MAPS), {}
    for seed in range(1000, 1006):
        for i in range(200):
            state = environment.get_state(i, reset_seed=seed)
            answers[environment.state_to_text(state)] = environment.action_to_text(environment.get_action(state))
    return answers


def test_an_optimal_player_wins_every_episode(tmp_path):
    answers = optimal_answers()
    metrics = on_episodes(tmp_path, lambda text, times: answers[text], "trainer.log_val_generations=0").run(0)
    assert metrics["val-core/FrozenLake-v1/acc/mean@1"] == 1.0
    assert metrics["val-aux/FrozenLake-v1/return/mean@1"] == 1.0
    assert metrics["val-aux/num_turns/min"] >= 6  # from corner to corner
    episodes = dumped(tmp_path, 0)
    assert {episode["end_reason"] for episode in episodes} == {"terminated"}
    assert [sum(turn["reward"] for turn in episode["turns"]) for episode in episodes] == [1.0] * 6


def test_a_player_who_never_moves_runs_out_of_turns(tmp_path):
    stays = lambda text, times: "L"  # noqa: E731  (from the corner, it stays where it is)
    metrics = on_episodes(tmp_path, stays, "trainer.log_val_generations=0").run(0)
    assert metrics["val-core/FrozenLake-v1/acc/mean@1"] == 0.0
    assert metrics["val-aux/num_turns/min"] == metrics["val-aux/num_turns/max"] == 12
    assert {episode["end_reason"] for episode in dumped(tmp_path, 0)} == {"max_turns"}
    assert [len(episode["turns"]) for episode in dumped(tmp_path, 0)] == [12] * 6


def test_an_answer_that_names_no_move_costs_a_turn_and_leaves_the_state(tmp_path):
    answers = optimal_answers()
    validator = on_episodes(
        tmp_path,
        lambda text, times: answers[text] if times > 5 else "?",
        "trainer.log_val_generations=0",
        "env.val_episodes=1",
    )
    validator.run(0)
    [episode] = dumped(tmp_path, 0)
    assert [turn["response"] for turn in episode["turns"][:7]] == ["?"] * 6 + [answers[episode["input"]]]
    assert len({turn["prompt"] for turn in episode["turns"][:7]}) == 1


def test_printed_episodes_are_their_turns_and_the_dump_has_all_of_them(tmp_path, capsys):
    on_episodes(tmp_path, lambda text, times: "L", "trainer.log_val_generations=2").run(4)
    printed = capsys.readouterr().out
    assert "validation episodes at step 4 · 1 of 2" in printed and "2 of 2" in printed
    for text in ("P", "4 more turns", "max_turns", "return", "success"):
        assert text in printed
    assert "'prompt'" not in printed and "None" not in printed and "policy_mask" not in printed
    assert printed.count("G") == 2 * 8, "the map is shown in each of the turns that are shown"
    assert [len(episode["turns"]) for episode in dumped(tmp_path, 4)] == [12] * 6
    assert [len(rows) for rows in read_episodes(tmp_path / "dumps" / "4.jsonl")] == [12] * 6


def test_a_printed_row_tells_system_from_user_and_says_what_kind_it_is(tmp_path, capsys):
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    validator = on_rows(
        tmp_path, Scripted(lambda text, times: "2"), "trainer.log_val_generations=1", prompts=[chat] * 3
    )
    validator.run(step=3)
    lines = [line.strip("│ ").split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert ["system", "Add."] in lines and ["user", "1+1="] in lines
    assert "validation rows at step 3 · 1 of 1" in " ".join(chain(*lines))
    assert dumped(tmp_path, 3)[0]["input"] == "Add.1+1=" and dumped(tmp_path, 3)[0]["raw_prompt"] == chat


def test_the_summary_names_the_means_of_each_source():
    metrics = {
        "val-core/openai/gsm8k/acc/mean@4": 0.25,
        "val-aux/openai/gsm8k/reward/mean@4": 0.5,
        "val-aux/openai/gsm8k/reward/std@4": 0.1,
        "val-core/CartPole-v1/return/mean@1": 21.33333,
        "val-aux/num_turns/mean": 21.0,
    }
    assert validation_summary(20, metrics).splitlines() == [
        "validation at step 20: openai/gsm8k: acc 0.25, reward 0.5",
        "validation at step 20: CartPole-v1: return 21.33",
    ]


def test_shown_samples_span_from_best_to_worst():
    scores = (0.0, 3.0, 1.0, 4.0, 2.0)
    assert [scores[place] for place in spread(scores, 3)] == [4.0, 2.0, 0.0]
    assert [scores[place] for place in spread(scores, 9)] == [4.0, 3.0, 2.0, 1.0, 0.0]
    assert [*spread([], 2)] == []


class AskingDataset(CustomEnvDataset):
    def messages(self, state):
        return [{"role": "system", "content": "Be quick."}, *super().messages(state)]

    def state_to_text(self, state):
        return f"? {state.text}"


class CompassManager(CustomRewardManager):
    def extract_action(self, text):
        return super().extract_action({"W": "L", "S": "D", "E": "R", "N": "U"}.get(text, ""))


def test_episodes_show_the_users_prompt_and_read_answers_by_the_users_parser(tmp_path):
    compass = dict(zip("LDRU", "WSEN", strict=True))
    answers = {f"Be quick.? {text}": compass[answer] for text, answer in optimal_answers().items()}
    parts = {"dataset_class": AskingDataset, "manager_class": CompassManager}
    overrides = ["trainer.log_val_generations=0", "data.max_prompt_length=40"]
    metrics = on_episodes(tmp_path, lambda text, times: answers[text], *overrides, **parts).run(0)
    assert metrics["val-core/FrozenLake-v1/acc/mean@1"] == 1.0
    assert all(turn["prompt"].startswith("Be quick.? ") for turn in dumped(tmp_path, 0)[0]["turns"])
    # a move to the environment, and none to this manager
    on_episodes(tmp_path, lambda text, times: "R", *overrides, **parts).run(1)
    assert len({turn["prompt"] for turn in dumped(tmp_path, 1)[0]["turns"]}) == 1


def growing_text(env: Any, cell: int) -> str:
    return "x" * (10 + cell)


def lengths_of_prompts(folder: Path, *overrides: str) -> list[tuple[list[int], str]]:
    """(characters of each prompt, end reason) of the episodes of a lake whose text grows from 10 to 25 characters."""
    text = {"observation_to_text": growing_text}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENTS, "FrozenLake-v1", {**ENVIRONMENTS["FrozenLake-v1"], **text})
        settings = ("trainer.log_val_generations=0", "env.val_episodes=1", "data.max_prompt_length=17")
        right_or_down = lambda text, times: "R" if times % 2 else "D"  # noqa: E731
        on_episodes(folder, right_or_down, *settings, *overrides, dataset_class=Unmeasured).run(0)
    [episode] = dumped(folder, 0)
    return [len(turn["prompt"]) for turn in episode["turns"]], episode["end_reason"]


class Unmeasured(CustomEnvDataset):
    """One whose sample of sizes happened to fit."""

    def check_sizes(self, states, what):
        pass


def test_a_prompt_that_outgrows_the_limit_ends_the_episode_or_is_cut_or_refused_by_rule(tmp_path):
    # 3 tokens of template: 14 characters fit, which is the first cell of the second row
    fitting, end = lengths_of_prompts(tmp_path)
    assert end == "context_full" and fitting and max(fitting) <= 14
    whole = "data.filter_overlong_prompts=false"
    cut, end = lengths_of_prompts(tmp_path, whole, "data.truncation=left")
    assert end != "context_full" and len(cut) > len(fitting) and max(cut) <= 16
    with pytest.raises(RuntimeError, match=r"reset\(seed=1000\) and 2 actions: .*max_prompt_length=17: raise"):
        lengths_of_prompts(tmp_path, whole)


def test_episodes_of_which_none_can_be_shown_are_refused(tmp_path):
    overrides = ["trainer.log_val_generations=2", "data.max_prompt_length=8"]
    with pytest.raises(ValueError, match=r"none of 6 validation episodes can be shown.*max_prompt_length\. Raise it"):
        on_episodes(tmp_path, lambda text, times: "L", *overrides, dataset_class=Unmeasured).run(0)
