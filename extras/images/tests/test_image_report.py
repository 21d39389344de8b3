"""The page of a run shows the images of a prompt in their places."""

import json
from pathlib import Path

import pytest

from configs.schema import ModelConfig
from data.pretrained import load_tokenizer
from extras.images.tests.conftest import ROWS
from extras.images.tests.test_scores import prompts_of, rollouts
from extras.report.samples import AROUND, text_of_prompt
from extras.report.transcripts import token_lists, token_texts_of


@pytest.mark.parametrize("family", ["qwen2_vl", "idefics3"])
def test_a_picture_stands_in_place_of_its_tokens(folders: dict[str, Path], family: str):
    texts = token_texts_of(load_tokenizer(ModelConfig(path=str(folders[family]))))
    batch = rollouts(prompts_of(folders[family], ROWS))
    shown = [text_of_prompt(json.loads(json.dumps(token_lists(batch, row, texts)))) for row in (0, 4, 6)]
    around = f"{AROUND}data:image/png;base64,"
    assert [text.count(around) for text in shown] == [1, 2, 0]
    assert shown[0].startswith("<|user|>") and "how many?<|end|>" in shown[0]
    assert "pad" not in shown[0] and "<image>" not in shown[0]
    assert shown[1].index(around) < shown[1].index(" and ") < shown[1].rindex(around)
