"""The rollouts of a validation as records: what was shown and said, turn by turn."""

from pathlib import Path
from typing import Any

import pytest

from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import ENVIRONMENTS
from custom.reward_manager import CustomRewardManager
from extras.report.transcripts import sample_rows
from tests.test_validation import TOKENIZER, Unmeasured, on_episodes, optimal_answers
from training.ray_trainer import RayPPOTrainer


def rollouts(validator: RayPPOTrainer, step: int = 0) -> list[dict[str, Any]]:
    _, [batch] = validator.measure()
    return sample_rows(batch, TOKENIZER, step)


def test_episodes_show_the_users_prompt_and_read_answers_by_the_users_parser(tmp_path):
    compass = dict(zip("LDRU", "WSEN", strict=True))
    answers = {f"Be quick.? {text}": compass[answer] for text, answer in optimal_answers().items()}
    parts = {"dataset_class": AskingDataset, "manager_class": CompassManager}
    overrides = ["data.max_prompt_length=40"]
    episodes = rollouts(on_episodes(tmp_path, lambda text, times: answers[text], *overrides, **parts))
    assert all(episode["score"] == 1.0 for episode in episodes)
    assert all(turn["prompt"].startswith("Be quick.? ") for turn in episodes[0]["turns"])
    # a move to the environment, and none to this manager
    episodes = rollouts(on_episodes(tmp_path, lambda text, times: "R", *overrides, **parts), 1)
    assert len({turn["prompt"] for turn in episodes[0]["turns"]}) == 1


def test_a_prompt_that_outgrows_the_limit_ends_the_episode_or_is_cut_or_refused_by_rule(tmp_path):
    # 3 tokens of template: 14 characters fit, which is the first cell of the second row
    fitting, end = lengths_of_prompts(tmp_path)
    assert end == "context_full" and fitting and max(fitting) <= 14
    whole = "data.filter_overlong_prompts=false"
    cut, end = lengths_of_prompts(tmp_path, whole, "data.truncation=left")
    assert end != "context_full" and len(cut) > len(fitting) and max(cut) <= 16
    with pytest.raises(RuntimeError, match=r"reset\(seed=1000\) and 2 actions: .*max_prompt_length=17: raise"):
        lengths_of_prompts(tmp_path, whole)


def lengths_of_prompts(folder: Path, *overrides: str) -> list[tuple[list[int], str]]:
    """(characters of each prompt, end reason) of the episodes of a lake whose text grows from 10 to 25 characters."""
    text = {"observation_to_text": lambda env, cell: "x" * (10 + cell)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ENVIRONMENTS, "FrozenLake-v1", {**ENVIRONMENTS["FrozenLake-v1"], **text})
        settings = ("env.val_episodes=1", "data.max_prompt_length=17")
        right_or_down = lambda text, times: "R" if times % 2 else "D"  # noqa: E731
        [episode] = rollouts(on_episodes(folder, right_or_down, *settings, *overrides, dataset_class=Unmeasured))
    return [len(turn["prompt"]) for turn in episode["turns"]], episode["end_reason"]


class AskingDataset(CustomEnvDataset):
    def messages(self, state):
        return [{"role": "system", "content": "Be quick."}, *super().messages(state)]

    def state_to_text(self, state):
        return f"? {state.text}"


class CompassManager(CustomRewardManager):
    def extract_action(self, text):
        return super().extract_action({"W": "L", "S": "D", "E": "R", "N": "U"}.get(text, ""))
