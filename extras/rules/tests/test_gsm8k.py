"""GSM8K's public files become verl's rows, and its rule scores what verl's does."""

import json

import pytest

from configs.loader import CONFIG_DIR
from data.rows import read_rows
from extras.rules.gsm8k import compute_score
from scripts.gsm8k import main
from tests.runs import ROOT, compose
from training.reward import load_reward_manager
from training.reward_function import FunctionReward

PUBLIC = [
    {"question": "Natalia sold 48 clips, then half as many. How many?", "answer": "48/2 = <<48/2=24>>24\n#### 72"},
    {"question": "What does it cost?", "answer": "It costs $1,200.\n#### 1,200"},
    {"question": "By how much?", "answer": "It falls.\n#### -5"},
]


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_public_files_become_rows_in_verls_form(tmp_path, capsys):
    train, test = write(tmp_path / "train.jsonl", PUBLIC), write(tmp_path / "test.jsonl", PUBLIC[:1])
    main([train, test, "--to", str(tmp_path / "rows")])
    rows = [row for _, row in read_rows(tmp_path / "rows/train.parquet")]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["72", "1200", "-5"]
    asked = f'{PUBLIC[0]["question"]} Let\'s think step by step and output the final answer after "####".'
    assert rows[0] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": asked}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0, **PUBLIC[0]},
    }
    [only] = [row for _, row in read_rows(tmp_path / "rows/test.parquet")]
    assert only["extra_info"]["split"] == "test"
    assert "3 rows in" in capsys.readouterr().out


def test_another_method_is_refused():
    with pytest.raises(ValueError, match="must be strict or flexible"):
        compute_score("#### 1", "1", method="fuzzy")


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIG_DIR.glob("gsm8k*.yaml")))
def test_the_configs_find_the_rule_and_read_what_the_script_writes(name, capsys):
    config = compose(name=name)
    assert isinstance(load_reward_manager(config.reward, None, None), FunctionReward)
    assert config.data.train_files.endswith("/data/gsm8k/train.parquet")
    assert (ROOT / config.reward.custom_reward_function.path).is_file()
