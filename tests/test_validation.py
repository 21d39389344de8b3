"""Validation: several answers a row scored by the user's function, and whole episodes in the real environment."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from configs.checks import check_config
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import make_env
from custom.reward_manager import CustomRewardManager
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from data.rl_dataset import RLHFDataset
from data.sampler import PromptLoader, SequentialSampler
from data.types import SamplingParams
from tests import engines
from tests.batches import padded
from tests.engines import Playing, trainer_on
from tests.runs import compose
from training.environment import EnvSetup
from training.episode_rows import EpisodeRows
from training.ray_trainer import RayPPOTrainer
from training.reward import load_reward_manager

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


def on_rows(
    folder: Path, rollout: Scripted, *overrides: str, prompts: list = ("1+1=", "2+3=", "2*3="), reward: str = REWARD
) -> RayPPOTrainer:
    rows = [
        {"prompt": text, "data_source": source, "reward_model": {"style": "rule", "ground_truth": truth}}
        for text, source, truth in zip(prompts, ("sums", "sums", "products"), "256", strict=True)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "val.parquet")
    (folder / "my_reward.py").write_text(reward)
    config = compose(
        f"reward.custom_reward_function.path={folder}/my_reward.py",
        "actor_rollout_ref.rollout.val_kwargs.n=4",
        *overrides,
        name="ppo_trainer",
    )
    dataset = RLHFDataset(folder / "val.parquet", TOKENIZER, config=config.data)
    loader = PromptLoader(dataset, 2, SequentialSampler(dataset, config.data), drop_last=False)
    reward = load_reward_manager(config.reward, TOKENIZER, None)
    return trainer_on(config, TOKENIZER, rollout, reward, val_loader=loader)


def on_episodes(
    folder: Path,
    answer: Callable[[str, int], str],
    *overrides: str,
    dataset_class: type = CustomEnvDataset,
    manager_class: type = CustomRewardManager,
    **env_kwargs: Any,
) -> RayPPOTrainer:
    config = compose("env.val_episodes=6", "env.val_seed=1000", *overrides)
    environment = make_env("FrozenLake-v1", max_turns=12, **MAPS, **env_kwargs)
    dataset = dataset_class(environment, TOKENIZER, config.data, size=4)
    manager = manager_class(environment)
    game = EnvSetup(environment, dataset, manager)
    playing = Playing(config, engines.Scripted(config, TOKENIZER, answer), game)
    return trainer_on(config, TOKENIZER, playing, manager, env_setup=game)


def test_several_answers_a_row_are_compared_within_the_row_and_averaged_within_the_source(tmp_path):
    # 1+1 right in 1 of 4, 2+3 in 3 of 4, 2*3 in none
    right = {"1+1=": (0,), "2+3=": (0, 1, 3), "2*3=": ()}
    truth = {"1+1=": "2", "2+3=": "5", "2*3=": "6"}
    rollout = Scripted(lambda text, times: truth[text] if times in right[text] else "9")
    metrics, _ = on_rows(tmp_path, rollout).measure()
    assert metrics["val-core/sums/reward/mean@4"] == (0.25 + 0.75) / 2
    assert metrics["val-core/products/reward/mean@4"] == 0.0 == metrics["val-core/products/reward/best@4/mean"]
    # best of 4 draws with replacement: 1 - (3/4)^4 and 1 - (1/4)^4
    expected = ((1 - 0.75**4) + (1 - 0.25**4)) / 2
    assert metrics["val-core/sums/reward/best@4/mean"] == pytest.approx(expected, abs=0.03)
    assert metrics["val-core/sums/reward/maj@4/mean"] < 0.75  # pred votes; 2+3 wins its vote, 1+1 loses it
    assert rollout.asked == [text for text in truth for _ in range(4)]  # two batches, answers of a row in a row


def test_a_prompt_with_an_answer_that_could_not_be_scored_counts_with_the_others(tmp_path):
    rollout = Scripted(lambda text, times: "?" if (text, times) == ("2+3=", 1) else "2" if text == "1+1=" else "9")
    strict = REWARD.replace("assert", "assert solution_str != '?' and")
    metrics, [batch] = on_rows(tmp_path, rollout, reward=strict).measure()
    assert [*batch.end_reason].count("reward_error") == 1
    assert metrics["val-core/sums/reward/mean@4"] == 0.5
    assert not any("@3" in name for name in metrics)


def test_sampling_of_validation_is_its_own_and_does_not_depend_on_the_step(tmp_path):
    overrides = [
        f"actor_rollout_ref.rollout.val_kwargs.{what}" for what in ("temperature=0.6", "top_p=0.9", "do_sample=true")
    ]
    rollout = Scripted(lambda text, times: "2")
    validator = on_rows(
        tmp_path, rollout, *overrides, "data.max_response_length=8", "actor_rollout_ref.rollout.top_k=7"
    )
    for validator.global_step in (1, 2):
        validator.measure()
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
    metrics, [batch] = on_episodes(tmp_path, lambda text, times: answers[text]).measure()
    assert metrics["val-core/FrozenLake-v1/acc/mean@1"] == 1.0
    assert metrics["val-aux/FrozenLake-v1/return/mean@1"] == 1.0
    assert metrics["val-aux/num_turns/min"] >= 6  # from corner to corner
    episodes = EpisodeRows(batch)
    assert [*batch.end_reason[episodes.last_row]] == ["terminated"] * 6 and episodes.scores().tolist() == [1.0] * 6


def test_a_player_who_never_moves_runs_out_of_turns(tmp_path):
    stays = lambda text, times: "L"  # noqa: E731  (from the corner, it stays where it is)
    metrics, [batch] = on_episodes(tmp_path, stays).measure()
    assert metrics["val-core/FrozenLake-v1/acc/mean@1"] == 0.0
    assert metrics["val-aux/num_turns/min"] == metrics["val-aux/num_turns/max"] == 12
    assert [*batch.end_reason[EpisodeRows(batch).last_row]] == ["max_turns"] * 6 and len(batch) == 6 * 12


class Unmeasured(CustomEnvDataset):
    """A dataset that lets all sizes pass, as if the prompts that were measured had happened to fit."""

    def check_sizes(self, states, what):
        pass


def test_episodes_of_which_none_can_be_shown_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none of 6 validation episodes can be shown.*max_prompt_length\. Raise it"):
        on_episodes(tmp_path, lambda text, times: "L", "data.max_prompt_length=8", dataset_class=Unmeasured).measure()
