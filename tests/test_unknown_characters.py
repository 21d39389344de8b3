"""Characters without a token are counted and named when rows are read: files, an environment's states."""

import json
from collections import Counter

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configs.schema import DataConfig
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import make_env
from custom.tiny_model import build_tokenizer
from data.data_report import unknown_characters
from data.rl_dataset import RLHFDataset

TOKENIZER = build_tokenizer()


def pairs(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, list[int]]]:
    return [(text, tokenizer.encode(text, add_special_tokens=False)) for text in texts]


def silent_tokenizer() -> PreTrainedTokenizerFast:
    """Knows a, b and c and has no unknown token: what else is in a text is dropped."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize(
    ("make", "found", "rows"),
    [
        (build_tokenizer, {"é": 2, "→": 1}, 2),
        (silent_tokenizer, {"é": 2, "→": 1}, 2),  # the space vanishes, as it is meant to
        (byte_tokenizer, {}, 0),
    ],
)
def test_characters_are_counted_by_occurrence_and_by_row(make, found, rows):
    tokenizer = make()
    assert unknown_characters(pairs(["abc", "aé bé", "a→c"], tokenizer), tokenizer) == (Counter(found), rows)


def test_rows_of_a_file_are_looked_at_when_they_are_read(tmp_path, capsys):
    chat = [{"role": "system", "content": "Größe?"}, {"role": "user", "content": "1→2"}]
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": chat}, {"prompt": "plain"}, {"raw_prompt": "→"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    RLHFDataset(file, TOKENIZER, config=DataConfig())
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"notice: 4 characters of 2 rows of {file} have no token in ")
    assert "'→', " in said and "'ö'" in said and "'ß'" in said and "take a tokenizer that has them" in said


def test_states_of_an_environment_are_looked_at_before_training(capsys):
    for instruction, lines in (("Go.", 0), ("Gehe übers Eis.", 1)):
        environment = make_env("FrozenLake-v1", instruction=instruction)
        CustomEnvDataset(environment, TOKENIZER, DataConfig(), size=5)
        said = capsys.readouterr().err.splitlines()
        assert len(said) == lines
    assert said[0].startswith("notice: 5 characters of 5 rows of 5 states of FrozenLake-v1 have no token")
