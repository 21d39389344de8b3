"""Real files and a real tokenizer: what users' rows become, and what they are told when rows are unusable."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import main
from configs import errors, extras
from configs.errors import ConfigError
from configs.schema import DataConfig, DatasetClassConfig, RolloutConfig
from data.chat import encode_prompt
from data.rl_dataset import RLHFDataset, collate_fn, create_rl_dataset, get_dataset_class
from data.rows import read_rows
from data.sampler import PromptLoader, SequentialSampler
from tests.runs import compose
from tests.test_chat import tokenizer_with
from tests.test_chat_families import chat_of
from training.preparation import check_rows, overlong_rows, row_maker

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}{% if think %}<{{ think }}>{% endif %}"
)
QUESTION = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1?"}]
GSM8K_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": QUESTION,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 41, "split": "train"},
}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with(TEMPLATE, "</s>")


@pytest.fixture
def untemplated(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", None)
    errors.noticed.clear()
    return tokenizer


def text(tokenizer, ids):
    return "".join(tokenizer.convert_ids_to_tokens(ids))


def write(path, rows):
    if path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text(json.dumps(rows, indent=1))
    return str(path)


def dataset(path, tokenizer, max_samples=-1, **settings):
    return RLHFDataset(path, tokenizer, config=DataConfig(**settings), max_samples=max_samples)


@pytest.fixture
def of_rows(tmp_path, tokenizer):
    """of_rows(rows, settings…): the dataset of a file with these rows."""
    return lambda rows, **settings: dataset(write(tmp_path / "rows.jsonl", rows), tokenizer, **settings)


@pytest.mark.parametrize("ending", [".parquet", ".json", ".jsonl"])
def test_a_verl_row_comes_out_whole_in_plain_python_with_its_token_ids(tmp_path, tokenizer, ending):
    rows = dataset(write(tmp_path / f"train{ending}", [GSM8K_ROW, GSM8K_ROW]), tokenizer)
    assert len(rows) == 2
    row = rows[1]
    assert text(tokenizer, row.pop("raw_prompt_ids")) == "s:Add.;u:1+1?;a:"
    assert row == {**GSM8K_ROW, "raw_prompt": QUESTION, "index": 41}
    assert type(row["prompt"]) is list and type(row["prompt"][0]) is dict


def test_lines_of_objects_are_read_from_json_too_and_line_separators_inside_texts_do_no_harm(tmp_path, tokenizer):
    file = tmp_path / "rows.json"
    file.write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\n', encoding="utf-8")
    assert [row["raw_prompt"] for row in dataset(file, tokenizer)] == ["a\u2028b", "c"]


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_values_keep_their_type_beside_missing_ones(tmp_path, ending):
    """A data frame would turn level 3 into 3.0, and digits in a text into a number."""
    path = write(tmp_path / f"rows{ending}", [{"prompt": "a", "answer": "007"}, {"prompt": "b", "answer": "8"}])
    other = write(tmp_path / f"more{ending}", [{"prompt": "c", "level": 3}])
    assert [row for _, row in read_rows([path, other])] == [
        {"prompt": "a", "answer": "007", "level": None},
        {"prompt": "b", "answer": "8", "level": None},
        {"prompt": "c", "answer": None, "level": 3},
    ]


def test_folders_and_globs_are_all_their_files_by_name(tmp_path):
    for name, prompt in (("b/2.jsonl", "b2"), ("a/1.jsonl", "a1"), ("a/_draft.jsonl", "draft"), ("a/notes.txt", "no")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"prompt": prompt}))
    (tmp_path / "a/3.csv").write_text('prompt,extra_info\na3,"{""index"": 7}"\n')
    for source, prompts in ((tmp_path, ["a1", "a3", "b2"]), (f"{tmp_path}/*/[12].jsonl", ["a1", "b2"])):
        assert [row["prompt"] for _, row in read_rows(source)] == prompts
    (tmp_path / "empty").mkdir()
    for source, said in ((f"{tmp_path}/*.json", "no file matches it"), (tmp_path / "empty", "no file in it ends in")):
        with pytest.raises(FileNotFoundError, match=said):
            read_rows(source)


@pytest.mark.parametrize(
    ("columns", "prompt", "response"),
    [
        ({"instruction": "Say hi.", "output": "hi"}, "Say hi.", "hi"),
        ({"instruction": "Add.", "input": "1+1", "output": "2"}, "Add.\n\n1+1", "2"),
        ({"instruction": "Say hi.", "input": ""}, "Say hi.", None),
        ({"messages": QUESTION}, QUESTION, None),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "2"}]}, QUESTION, "2"),
        ({"prompt": "p", "response": "r", "instruction": "i", "output": "o", "messages": []}, "p", "r"),
    ],
)
def test_other_spellings_of_prompt_and_response_are_accepted(of_rows, columns, prompt, response):
    [row] = of_rows([columns])
    assert row["raw_prompt"] == row["prompt"] == prompt
    assert row.get("response") == response
    assert columns.items() <= row.items(), "the columns as the user wrote them stay"


def test_what_a_row_lacks_is_filled(of_rows):
    first, second = of_rows([{"prompt": "a"}, {"prompt": "b", "extra_info": {"split": "train"}}])
    assert first["extra_info"] == {} and first["data_source"] == "rows.jsonl" and first["index"] == 0
    assert second["extra_info"] == {"split": "train"} and second["index"] == 1
    assert "reward_model" not in first
    [row] = of_rows([{"question": "a", "task": "sums"}], prompt_key="question", reward_fn_key="task")
    assert row["data_source"] == "sums"


def test_template_arguments_are_passed_on(of_rows, tokenizer):
    [row] = of_rows([{"prompt": QUESTION}], apply_chat_template_kwargs={"think": "no"})
    assert text(tokenizer, row["raw_prompt_ids"]).endswith("a:<no>")


def test_messages_without_a_template_become_lines_with_one_notice(untemplated, capsys):
    expected = "system: Add.\nuser: 1+1?\nassistant:"
    assert text(untemplated, encode_prompt(QUESTION, untemplated)) == expected
    assert text(untemplated, encode_prompt(QUESTION, untemplated)) == expected
    assert capsys.readouterr().err.count("the tokenizer has no chat template") == 1
    with pytest.raises(ValueError, match="need a tokenizer with a chat template"):
        encode_prompt([{"role": "assistant", "content": "?", "tool_calls": [{"name": "add"}]}], untemplated)
    [parts] = ([{"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]}],)
    assert text(untemplated, encode_prompt(parts, untemplated)) == "user: 1\n2\nassistant:"


def test_nulls_that_parquet_adds_to_messages_do_not_reach_the_template(tmp_path, tokenizer):
    prompt = [{"role": "user", "content": "a", "name": "Ann"}, {"role": "user", "content": "b"}]
    row = dataset(write(tmp_path / "rows.parquet", [{"prompt": prompt}]), tokenizer)[0]
    assert row["prompt"][1] == {"role": "user", "content": "b", "name": None}
    assert row["raw_prompt"] == prompt


def calls(*arguments: object) -> list[dict]:
    """Rows whose prompts end with a call, each with its own arguments."""
    functions = [{"name": "add", "arguments": each} for each in arguments]
    asked = [{"role": "assistant", "content": None, "tool_calls": [{"function": each}]} for each in functions]
    return [{"prompt": [{"role": "user", "content": "a"}, call], "note": {"x": None, "y": 1}} for call in asked]


@pytest.mark.parametrize(
    ("ending", "arguments", "written"),
    [
        (".parquet", [{"city": "Rome"}, {"x": 1, "y": {"z": [2]}}, {}], None),
        (".jsonl", [{"city": None}, '{"x": 1}', "", None, "null"], ['{"city": null}', '{"x": 1}', "{}", "{}", "{}"]),
        (".parquet", ['{"x": 1}', "{}", None], ['{"x": 1}', "{}", "{}"]),
    ],
)
def test_arguments_of_calls_reach_the_template_as_they_were_meant(tmp_path, ending, arguments, written):
    """JSON texts are values, and the keys that Arrow gives to all rows are no arguments; other columns keep theirs."""
    rows = dataset(write(tmp_path / f"rows{ending}", calls(*arguments)), qwen := chat_of("Qwen2.5").tokenizer)
    for row, expected in zip(rows, written or map(json.dumps, arguments), strict=True):
        assert f'"arguments": {expected}}}\n</tool_call>' in text(qwen, row["raw_prompt_ids"])
        assert row["note"] == {"x": None, "y": 1}


@pytest.mark.parametrize("arguments", ["{", "3", '"x"', [1]])
def test_arguments_that_are_no_dictionary_are_refused(tmp_path, tokenizer, arguments):
    with pytest.raises(ValueError, match=r'rows.jsonl.*tool_calls holds \{"function": \{"name": …, "arguments": JSON'):
        dataset(write(tmp_path / "rows.jsonl", calls(arguments)), tokenizer)


@pytest.mark.parametrize("name", ["train_files", "val_files"])
def test_a_file_that_is_not_there_is_named_with_the_setting_that_gave_it(tmp_path, tokenizer, name):
    file = f"{tmp_path}/rows.jsonl"
    with pytest.raises(FileNotFoundError, match=rf"^data\.{name}={file}: there is no such file \(looked in "):
        dataset(file, tokenizer, **{name: [file]})


def test_overlong_prompts_are_dropped_counted_and_listed(tmp_path, of_rows, caplog):
    lengths, path = [3, 9, 10, 11, 10, 12, 13, 14], f"{tmp_path}/rows.jsonl"
    rows = of_rows([{"prompt": "x" * length} for length in lengths], max_prompt_length=10)
    assert [len(row["raw_prompt_ids"]) for row in rows] == [3, 9, 10, 10]
    assert rows.num_filtered == 4
    assert f"max_prompt_length=10 tokens: {path}, row 3; {path}, row 5; {path}, row 6; …" in caplog.text


@pytest.mark.parametrize(("side", "kept"), [("left", "cdefg"), ("right", "abcde"), ("middle", "abefg"), ("error", "")])
def test_an_unfiltered_overlong_prompt_is_cut_at_the_named_side_or_refused(of_rows, tokenizer, side, kept):
    rows, settings = [{"prompt": "ok"}, {"prompt": "abcdefg"}], {"filter_overlong_prompts": False, "truncation": side}
    if side == "error":
        with pytest.raises(ValueError, match=r"row 1: .* 7 tokens, more than data.max_prompt_length=5: .*trunc"):
            of_rows(rows, max_prompt_length=5, **settings)
        return
    row = of_rows(rows, max_prompt_length=5, **settings)[1]
    assert text(tokenizer, row["raw_prompt_ids"]) == kept and row["raw_prompt"] == "abcdefg"


def test_sub_sampling_is_the_first_rows_or_a_seeded_draw(of_rows):
    rows = [{"prompt": str(i)} for i in range(50)]

    def drawn(**settings):
        return [row["raw_prompt"] for row in of_rows(rows, max_samples=5, **settings)]

    assert drawn(shuffle=False) == ["0", "1", "2", "3", "4"]
    assert drawn() == drawn(seed=0) == [str(i) for i in np.random.default_rng(0).choice(50, 5, replace=False)]
    assert drawn(seed=1) != drawn(seed=0)
    with pytest.raises(ValueError, match="leaves no rows: -1 takes all"):
        of_rows(rows, max_samples=0)
    assert len(of_rows(rows, max_samples=99)) == len(of_rows(rows)) == 50


class States(RLHFDataset):
    """A dataset without files: rows are made when they are asked for, as those of an environment are."""

    def __init__(self, tokenizer, config):
        super().__init__(None, tokenizer, config=config)

    def __len__(self):
        return 100

    def __getitem__(self, i):
        return self.make_row({"prompt": f"state {i}", "state": i}, i)


def test_a_subclass_brings_rows_without_files(tokenizer):
    row = States(tokenizer, DataConfig())[12]
    assert text(tokenizer, row.pop("raw_prompt_ids")) == "state 12"
    columns = {"prompt": "state 12", "state": 12}
    assert row == {**columns, "raw_prompt": "state 12", "index": 12, "extra_info": {}, "data_source": "unknown"}


def test_rows_made_on_demand_keep_to_the_length_limit(tokenizer):
    cut = States(tokenizer, DataConfig(max_prompt_length=2, truncation="left"))
    assert text(tokenizer, cut[12]["raw_prompt_ids"]) == "12"
    with pytest.raises(ValueError, match=r"States, row 12: the prompt has 8 tokens, more than data.max_prompt_len"):
        States(tokenizer, DataConfig(max_prompt_length=7))[12]


def test_collating_stacks_tensors_and_keeps_everything_else_as_elements():
    rows = [
        {"state": torch.tensor([i, i + 1]), "raw_prompt_ids": [1, i], "extra_info": {"i": i}, "board": np.eye(2) * i}
        for i in range(3)
    ]
    batch = collate_fn(rows)
    assert torch.equal(batch["state"], torch.tensor([[0, 1], [1, 2], [2, 3]]))
    for name in ("raw_prompt_ids", "extra_info", "board"):
        assert batch[name].dtype == object and batch[name].shape == (3,)
        assert all(kept is row[name] for kept, row in zip(batch[name], rows, strict=True))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"prompt": "a", "state": 1}, {"prompt": "b"}], "is missing from row"),
        ([{"prompt": "b"}, {"prompt": "a", "state": 1}], "is missing from row"),
        ([{"state": torch.zeros(2)}, {"state": torch.zeros(3)}], r"holds tensors of shapes \[\(2,\), \(3,\)\]"),
    ],
)
def test_rows_that_cannot_be_collated_are_refused_by_the_key(rows, said):
    with pytest.raises(ValueError, match=f"column 'state' {said}"):
        collate_fn(rows)


CUSTOM = """
import torch

class MyDataset(torch.utils.data.Dataset):
    def __init__(self, data_files, tokenizer, processor=None, config=None, **kwargs):
        self.prompts = [f"{name}: 1+{i}=" for name in data_files for i in range(config.max_prompt_length)]
        self.kwargs = kwargs

    def __len__(self):
        return len(self.prompts)

    def __getitem__(self, i):
        return {"raw_prompt": self.prompts[i]}

def make_dataset(**kwargs):
    return MyDataset(**kwargs)
"""


@pytest.fixture
def custom(tmp_path):
    def config(name):
        chosen = DatasetClassConfig(path=str(tmp_path / "my_data.py"), name=name)
        return DataConfig(max_prompt_length=3, custom_cls=chosen)

    (tmp_path / "my_data.py").write_text(CUSTOM)
    return config


def test_a_users_dataset_class_is_built_by_keyword(custom, tokenizer):
    made = create_rl_dataset(["a", "b"], custom("MyDataset"), tokenizer, max_samples=2)
    assert isinstance(made, Dataset) and len(made) == 6
    assert made[3] == {"raw_prompt": "b: 1+0="}
    assert made.kwargs == {"max_samples": 2}
    config = custom("MyDataset")  # which has the last word
    config = replace(config, custom_cls=replace(config.custom_cls, kwargs={"level": 3, "data_files": ["c"]}))
    made = create_rl_dataset(["a", "b"], config, tokenizer)
    assert made.kwargs == {"level": 3, "max_samples": -1} and made[0] == {"raw_prompt": "c: 1+0="}


def test_a_users_class_that_is_no_dataset_is_refused(custom):
    with pytest.raises(TypeError, match=r"data.custom_cls.name=make_dataset in .* subclass of torch"):
        get_dataset_class(custom("make_dataset"))


def test_without_a_users_class_the_files_are_needed(tmp_path, tokenizer):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    made = create_rl_dataset(path, DataConfig(shuffle=False), tokenizer, max_samples=1)
    assert type(made) is RLHFDataset and [row["raw_prompt"] for row in made] == ["a"]
    with pytest.raises(ValueError, match=r"data.train_files is not set"):
        create_rl_dataset(None, DataConfig(), tokenizer)


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_labels_are_found_wherever_a_row_has_them(tmp_path, tokenizer, ending):
    verl = {"style": "rule", "ground_truth": "2"}
    texts = [{"reward_model": json.dumps(verl), "ground_truth": "3"}, {"ground_truth": "2"}, {"reward_model": "{}"}, {}]
    texts.append({"reward_model": '{"style": "rule"}', "ground_truth": "2"})
    texts = [{"prompt": "1+1?", "extra_info": '{"index": 7}', **text} for text in texts]
    rows = [*dataset(write(tmp_path / f"rows{ending}", texts), tokenizer)]
    bare = [{"ground_truth": truth} for truth in ("2", None, None)]
    assert [row["reward_model"] for row in rows] == [verl, *bare, verl]
    assert all(row["extra_info"] == {"index": 7} and row["index"] == 7 for row in rows)


def test_a_label_may_have_a_column_of_another_name(of_rows):
    [row] = of_rows([{"prompt": "1+1?", "answer": 2}], ground_truth_key="answer")
    assert row["reward_model"] == {"ground_truth": 2} and row["answer"] == 2


class Bare(Dataset):
    """Rows as a class of the user's returns them."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return 9

    def __getitem__(self, i):
        return dict(self.columns)


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": QUESTION},
        {"raw_prompt": QUESTION},
        {"raw_prompt": QUESTION, "prompt": None},
        {"raw_prompt_ids": None},
    ],
)
def test_a_row_with_only_a_prompt_is_completed(tokenizer, columns):
    ids = encode_prompt(QUESTION, tokenizer)
    columns = {name: np.array(ids) if name == "raw_prompt_ids" else value for name, value in columns.items()}
    rows = Bare(**columns, uid="mine", responses="b", index=5, ground_truth="2")
    make_row = row_maker(rows, tokenizer, DataConfig())
    row = make_row(rows[3], 3)
    assert row["raw_prompt_ids"] == ids and all(type(token) is int for token in row["raw_prompt_ids"])
    assert row["raw_prompt"] == (None if "raw_prompt_ids" in columns else QUESTION)
    assert (row["dataset_uid"], row["dataset_responses"], row["index"]) == ("mine", "b", 5) and "uid" not in row
    assert row["data_source"] == "unknown" and row["extra_info"] == {} and row["reward_model"] == {"ground_truth": "2"}
    assert make_row(row, 3) == row


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("tool_agent", "row 1 has agent_name=tool_agent: .*enable=true"),
        ("other", "row 1 has agent_name=other; the agents are single_turn_agent, tool"),
    ],
)
def test_rows_ask_for_agents_that_there_are(of_rows, agent, words):
    rows = of_rows([{"prompt": "a", "agent_name": name} for name in ("single_turn_agent", agent)])
    with pytest.raises(ConfigError, match=words):
        check_rows(RolloutConfig(), PromptLoader(rows, 1, SequentialSampler(rows, DataConfig())), [])


def test_a_row_without_a_prompt_or_with_one_too_long_names_the_dataset(tokenizer):
    rows = Bare(question="1+1?")
    with pytest.raises(ValueError, match=r"Bare, row 3: the prompt is None.*this row fills the columns question"):
        row_maker(rows, tokenizer, DataConfig())(rows[3], 3)
    with pytest.raises(ValueError, match=r"Bare, row 3 is \['a'\]; a row must be a dictionary"):
        row_maker(rows, tokenizer, DataConfig())(["a"], 3)
    rows = Bare(raw_prompt_ids=[1, 2, 3])
    with pytest.raises(ValueError, match=r"Bare, row 3: the prompt has 3 tokens, more than data.max_prompt_length=2"):
        row_maker(rows, tokenizer, DataConfig(max_prompt_length=2))(rows[3], 3)


class Growing(Dataset):
    """Row i is i characters long."""

    def __len__(self):
        return 9

    def __getitem__(self, i):
        return {"prompt": "x" * (i + 1)}


class GrowingStates(Growing, States):
    """Rows of growing length, each completed by the dataset itself, as make_row is offered to do."""

    def __getitem__(self, i):
        return self.make_row(super().__getitem__(i), i)


@pytest.mark.parametrize("kind", [Growing, GrowingStates])
def test_overlong_rows_of_a_users_dataset_are_dropped_counted_and_listed_at_the_start(tokenizer, caplog, kind):
    config = DataConfig(max_prompt_length=5)
    rows = kind() if kind is Growing else kind(tokenizer, config)
    left_out = overlong_rows(rows, tokenizer, config)
    listed = "; ".join(f"{kind.__name__}, row {row}" for row in (5, 6, 7))
    assert f"dropped 4 of 9 prompts, longer than data.max_prompt_length=5 tokens: {listed}; …" in caplog.text
    make_row = row_maker(rows, tokenizer, config)
    loader = PromptLoader(rows, 2, SequentialSampler(rows, config), make_row=make_row, left_out=left_out)
    assert len(loader) == 2
    assert [list(loader.next_batch()["dataset_position"]) for _ in range(3)] == [[0, 1], [2, 3], [0, 1]]
    assert not overlong_rows(Growing(), tokenizer, DataConfig(max_prompt_length=9))


def test_overlong_rows_of_a_users_dataset_are_refused_at_the_start_unless_they_may_be_dropped_or_cut(tokenizer):
    keep = DataConfig(max_prompt_length=5, filter_overlong_prompts=False)
    with pytest.raises(ValueError, match=r"Growing, row 5: .* 6 tokens, more than .*filter_overlong_prompts"):
        overlong_rows(Growing(), tokenizer, keep)
    with pytest.raises(ValueError, match=r"all 9 prompts are longer than .*=0 tokens, the longest has 9"):
        overlong_rows(Growing(), tokenizer, DataConfig(max_prompt_length=0))
    assert overlong_rows(Growing(), tokenizer, replace(keep, filter_overlong_prompts=True, truncation="left"))
    assert not overlong_rows(Growing(), tokenizer, replace(keep, truncation="left"))


def test_rows_that_change_by_the_step_are_not_measured(tokenizer):
    class Changing(Growing):
        def on_batch_end(self, batch): ...

    assert not overlong_rows(Changing(), tokenizer, DataConfig(max_prompt_length=5))


def test_a_prompt_that_a_subclass_changes_or_encodes_is_the_one_that_is_shown(tmp_path, tokenizer):
    class Changed(RLHFDataset):
        def __getitem__(self, i):
            row = super().__getitem__(i)
            if i == 0:
                row["raw_prompt"][0]["content"] += "!"
            elif i == 1:
                row["raw_prompt_ids"] = [1, 2]
            elif i == 2:
                del row["raw_prompt_ids"]
                row |= {"input_ids": torch.tensor([0, 5, 6]), "attention_mask": torch.tensor([0, 1, 1])}
            return row

    rows = Changed(write(tmp_path / "rows.jsonl", [{"prompt": QUESTION}] * 4), tokenizer)
    ids = [rows.make_row(rows[i], i)["raw_prompt_ids"] for i in range(4)]
    assert text(tokenizer, ids[0]) == "s:Add.!;u:1+1?;a:" and text(tokenizer, ids[3]) == "s:Add.;u:1+1?;a:"
    assert ids[1:3] == [[1, 2], [5, 6]]
    assert rows[3]["tools_kwargs"] == rows[3]["interaction_kwargs"] == {}


@pytest.fixture
def no_verl(monkeypatch):
    """A copy without extras/verl."""
    is_here = extras.is_here
    monkeypatch.setattr(extras, "is_here", lambda module: not module.startswith("extras.verl") and is_here(module))


def test_without_verls_extra_what_it_has_of_a_data_set_is_refused_by_name(of_rows, tokenizer, no_verl):
    with pytest.raises(ConfigError, match=r"Mine defines _build_messages, which verl's RLHFDataset calls: verl is not"):

        class Mine(RLHFDataset):
            def _build_messages(self, example): ...

    with pytest.raises(ConfigError, match=r"RLHFDataset\.dataframe=table: verl is not in this copy"):
        _ = of_rows([{"prompt": "a"}]).dataframe
    with pytest.raises(ConfigError, match="verl is not in this copy"):
        RLHFDataset(None, tokenizer, {"max_prompt_length": 3})


# Validation apart from training


def test_what_objects_of_a_caller_lack_is_said(tiny_model, tmp_path, capsys):
    rows = [{"prompt": "1+1=", "ground_truth": "2"}] * 4
    settings = [f"actor_rollout_ref.model.path={tiny_model}", "data.train_batch_size=2", "trainer.test_freq=1"]
    config = compose(*settings, f"trainer.default_local_dir={tmp_path}", name="ppo_trainer")
    with pytest.raises(ConfigError, match=r"a DataLoader is given for data.train_files: give its `dataset`; data.tr"):
        main.build(config, DataLoader(rows, batch_size=2), lambda response: 1.0)
    for val_rows, count in ((None, 1), (rows, 0)):
        main.build(config, rows, lambda response: 1.0, val_rows)
        assert capsys.readouterr().err.count("trainer.test_freq=1: no validation rows are given") == count


def test_prompts_both_trained_on_and_validated_on_are_counted_and_the_first_is_shown(tiny_model, tmp_path, caplog):
    """Prompts are compared as the model reads them: a string is not the chat message that says the same."""

    def said(**files: list) -> list[str]:
        written = [
            f"data.{name}={write(tmp_path / f'{name}.jsonl', [GSM8K_ROW | {'prompt': prompt} for prompt in prompts])}"
            for name, prompts in files.items()
        ]
        model = f"actor_rollout_ref.model.path={tiny_model}"
        main.build(compose(model, "data.train_batch_size=2", *written, name="ppo_trainer"))
        return [text for text in caplog.messages if "data.train_files too" in text]

    assert said(train_files=["a", "b", QUESTION], val_files=["c", "Add.1+1?"]) == []
    [line] = said(train_files=["a", QUESTION, "x" * 90], val_files=["b", "x" * 90, QUESTION, QUESTION])
    assert line.startswith(
        f"the prompts of 3 rows of 4 in data.val_files are in data.train_files too, the first is row 1: '{'x' * 80}'"
    )
