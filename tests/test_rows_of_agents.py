"""Rows that ask for what plays their episodes are looked at before anything expensive."""

from pathlib import Path
from typing import Any

import pytest

from configs.errors import ConfigError
from configs.schema import DataConfig, RolloutConfig
from custom.tiny_model import build_tokenizer
from data.files import dump_jsonl
from data.rl_dataset import RLHFDataset
from data.sampler import PromptLoader, SequentialSampler
from training.preparation import check_rows


def loader(folder: Path, rows: list[dict[str, Any]]) -> PromptLoader:
    dump_jsonl(folder / "rows.jsonl", rows)
    config = DataConfig()
    dataset = RLHFDataset(folder / "rows.jsonl", build_tokenizer(), config=config)
    return PromptLoader(dataset, 1, SequentialSampler(dataset, config))


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("tool_agent", "row 1 has agent_name=tool_agent: .*enable=true"),
        ("other", "row 1 has agent_name=other; the agents are single_turn_agent, tool"),
    ],
)
def test_rows_ask_for_agents_that_there_are(tmp_path, agent, words):
    rows = [{"prompt": "a", "agent_name": "single_turn_agent"}, {"prompt": "a", "agent_name": agent}]
    with pytest.raises(ConfigError, match=words):
        check_rows(RolloutConfig(), loader(tmp_path, rows), [])
