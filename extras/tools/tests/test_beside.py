"""The policy calls tools beside an environment."""

from pathlib import Path
from typing import Any

import pytest

from data.tools import FunctionTool
from tests.engines import Scripted
from tests.episodes import TOKENIZER, counting, played, row_text


@pytest.fixture
def twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The settings of a tool that pays ½ for an episode."""

    async def half(self, instance_id: str, **kwargs: Any) -> float:
        return 0.5

    monkeypatch.setattr(FunctionTool, "calc_reward", half)
    tools = "actor_rollout_ref.rollout.multi_turn"
    (tmp_path / "tools.py").write_text("def twice(number: int) -> int:\n    'Doubles it.'\n    return 2 * number\n")
    return [f"{tools}.enable=true", f"{tools}.function_tool_path={tmp_path}/tools.py", f"{tools}.format=plain"]


def test_tools_beside_an_environment_are_called_between_its_turns(twice: list[str]):
    """An answer with a call is no action: the environment does not hear of it. At the end a tool pays by itself."""
    config, game = counting(*twice)
    answers = iter(["twice(1)", "2", "twice(x)", "2", "1"])
    batch = played(config, game, Scripted(config, TOKENIZER, lambda text, times: next(answers)), [11])
    said = row_text(batch, 0)
    assert said.startswith("<|user|>0<|end|><|assistant|>twice(1)<|end|><|tool|>2<|end|><|assistant|>2<|end|><|user|>2")
    assert (batch.tool_call_counts[0], batch.token_level_scores.sum(), batch.end_reason[0]) == (2, 5.5, "terminated")
    assert batch.non_tensor_batch["__num_turns__"][0] == 5 and batch.invalid_actions[0] == 0


@pytest.mark.parametrize(
    ("width", "said", "end"),
    [
        (400, ["twice(1)", "2", "2", "2"], "terminated"),
        (10, ["twice(1)"], "context_full"),
        (23, ["twice(1)", "22"], "max_tokens"),
        (9, ["twice(1)"], "max_tokens"),
    ],
)
def test_a_tool_pays_for_the_whole_episode_however_that_ends(width, said, end, twice):
    config, game = counting(*twice, f"data.max_response_length={width}")
    answers = iter(said)
    batch = played(config, game, Scripted(config, TOKENIZER, lambda text, times: next(answers)), [11])
    earned = sum(float(answer) for answer in said[1:] if len(answer) == 1)
    assert (batch.end_reason[0], batch.episode_return[0]) == (end, earned + 0.5)
    last = batch.response_mask[0].nonzero()[-1]
    assert batch.token_level_scores.sum() == earned + 0.5 and batch.token_level_scores[0, last] >= 0.5
