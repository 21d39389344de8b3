"""Tests of verl's data set: its hooks, whichever class they are defined below, and what they see of the rows."""

import pickle

import pandas as pd
import pytest

from configs.import_utils import load_module
from custom.env_dataset import CustomEnvDataset
from custom.env_wrapper import make_env
from data import rl_dataset
from extras.verl.hooks import RLHFDataset
from tests.test_chat import tokenizer_with
from tests.test_rl_dataset import QUESTION, TEMPLATE, text, write


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with(TEMPLATE, "</s>")


def test_arguments_have_verls_order(tmp_path, tokenizer):
    path, config = write(tmp_path / "rows.jsonl", [{"prompt": "abcd"}]), {"max_prompt_length": 3, "truncation": "left"}
    rows = RLHFDataset(path, tokenizer, config | {"filter_overlong_prompts": False, "mine": 1}, None, 1)
    assert (rows.max_prompt_length, rows.config.mine, rows.image_key) == (3, 1, "images")
    assert text(tokenizer, rows[0]["raw_prompt_ids"]) == "bcd"


def test_a_hook_may_change_the_row_that_it_is_given_and_one_that_is_not_called_is_named(tmp_path, tokenizer, capsys):
    class Popping(RLHFDataset):  # as verl's own
        def _build_messages(self, example, key=None):
            return [{**message, "content": message["content"] + "!"} for message in example.pop(key)]

        def process_vision_info(self, messages): ...

    rows = Popping(write(tmp_path / "rows.jsonl", [{"prompt": QUESTION}]), tokenizer)
    assert [rows[0]["raw_prompt"][-1]["content"] for _ in range(2)] == [QUESTION[-1]["content"] + "!"] * 2
    assert rows.rows[0]["prompt"] == QUESTION
    assert "Popping.process_vision_info is not called here: extras/images reads images." in capsys.readouterr().err


HOOKS = """
from data.rl_dataset import RLHFDataset

class Louder:
    def _build_messages(self, example, key=None):
        return super()._build_messages(example) + "!"

class Above(Louder, RLHFDataset): ...

class Plain(RLHFDataset): ...

class Below(Plain):
    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = self.dataframe.filter(lambda row: row["prompt"] != "b")

class Longest(Above):
    def maybe_filter_out_long_prompts(self, dataframe=None):
        return super().maybe_filter_out_long_prompts(dataframe).select([1])
"""


@pytest.mark.parametrize(("name", "prompts"), [("Above", ["a!", "b!"]), ("Below", ["a"]), ("Longest", ["b!"])])
def test_hooks_are_called_of_a_class_that_was_derived_from_ours(name, prompts, tmp_path, tokenizer):
    (tmp_path / "mine.py").write_text(HOOKS)
    module = load_module(str(tmp_path / "mine.py"))
    made = getattr(module, name)(write(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}]), tokenizer)
    assert [row["raw_prompt"] for row in made] == prompts
    assert [text(tokenizer, row["raw_prompt_ids"]) for row in made] == prompts, "as it is measured, so it is given out"
    assert isinstance(made, RLHFDataset) and not issubclass(module.Plain, RLHFDataset)
    assert rl_dataset.has_default_getitem(made)
    assert pickle.loads(pickle.dumps(type(made))) is type(made) is getattr(module, name)


def test_a_hook_of_a_data_set_of_states_is_called(tokenizer):
    class Said(CustomEnvDataset):
        def _build_messages(self, example):
            return [{"role": "system", "content": "Go."}, *super()._build_messages(example)]

    states = Said(make_env("FrozenLake-v1"), tokenizer, rl_dataset.DataConfig(max_prompt_length=500), size=2)
    assert text(tokenizer, states[0]["raw_prompt_ids"]).startswith("s:Go.;u:") and states.video_key == "videos"


def test_our_class_shows_its_rows_and_reads_a_mapping_as_verls_does(tmp_path, tokenizer):
    rows = rl_dataset.RLHFDataset(write(tmp_path / "rows.jsonl", [{"prompt": "ab"}] * 2), tokenizer, {"mine": 1})
    assert rows.dataframe["prompt"] == ["ab"] * 2 and rows.config.mine == 1 and rows.is_set_up


def test_the_frame_of_rows_does_as_verls_data_sets_do_and_may_be_exchanged(tmp_path, tokenizer):
    levels = [3, 1, 2]
    path = write(tmp_path / "rows.jsonl", [{"prompt": "x" * level, "level": level} for level in levels])
    rows = RLHFDataset(path, tokenizer, {"max_prompt_length": 4})
    frame = rows.dataframe
    assert frame["level"] == levels and frame[:2]["level"] == [3, 1] and frame.num_rows == len(frame) == 3
    frame[0]["level"] = 9
    assert frame.to_list()[0]["level"] == 3, "what is read is a copy"
    frame = frame.filter(lambda row: row["level"] > 1, num_proc=2).select([1, 0])
    assert frame["level"] == [2, 3] and {*map(str, (frame.shuffle(seed)["level"] for seed in range(9)))} == {
        "[2, 3]",
        "[3, 2]",
    }
    longer = frame.map(lambda row, k: {"prompt": row["prompt"] * k}, remove_columns=["level"], fn_kwargs={"k": 2})
    assert "level" not in longer.column_names
    for new, prompts in ((frame, ["xx", "xxx"]), (longer, ["xxxx"]), (pd.DataFrame({"prompt": ["b"]}), ["b"])):
        rows.dataframe = new
        assert [row["raw_prompt"] for row in rows] == prompts and len(rows) == len(prompts)
    assert rows.num_filtered == 1, "the longer of two, measured anew"
    with pytest.raises(ValueError, match=r"self.dataframe.map: batched is left out here"):
        frame.map(len, batched=True)
    with pytest.raises(ValueError, match=r"RLHFDataset: self.dataframe is .*; it must be a datasets.Dataset"):
        rows.dataframe = [1]
