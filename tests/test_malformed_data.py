"""Malformed data files: each ends, before a run, in an error that names file and place, or in rows that are left out
and counted. What is kept always makes a batch."""

import gzip
import io
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configs.schema import DataConfig
from data.rl_dataset import RLHFDataset, collate_fn

GOOD = {"prompt": "1+1=", "ground_truth": "2"}
LINE = json.dumps(GOOD).encode() + b"\n"
PLACE = r"data\.\w+(, row \d+|, line \d+)"
TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('who is ' ~ m.role ~ '?') }}{% endif %}{{ m.content }};{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """Makes a tokenizer with one token for each word and each sign."""
    words = Tokenizer(models.WordLevel({"<unk>": 0, "1": 1, "+": 2, "=": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|[+=]"), behavior="isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def chat(*messages):
    return json.dumps({"prompt": list(messages)}).encode()


def parquet(*rows, columns=None) -> bytes:
    table = pyarrow.Table.from_pylist(list(rows)) if columns is None else columns
    sink = io.BytesIO()
    pyarrow.parquet.write_table(table, sink)
    return sink.getvalue()


WHOLE = parquet(GOOD, GOOD)
# What stands between two good lines of a .jsonl file.
BAD_LINES = {
    "cut off": b'{"prompt": "1+',
    "text behind": b'{"prompt": "1"} # a comment',
    "two objects": b'{"prompt": "1"}{"prompt": "1"}',
    "a text": b'"1+1="',
    "null": b"null",
    "a list": b'[{"prompt": "1"}]',
    "latin-1": '{"prompt": "é"}'.encode("latin-1"),
    "a control character": b'{"prompt": "1\x00"}',
    "too deep": b"[" * 100_000,
    "too many digits": b'{"prompt": "1", "n": ' + b"9" * 5000 + b"}",
    "another column": b'{"question": "1+1="}',
    "prompt null": b'{"prompt": null}',
    "prompt empty": b'{"prompt": ""}',
    "prompt of spaces": b'{"prompt": " \\n"}',
    "prompt a number": b'{"prompt": 11}',
    "prompt an object": b'{"prompt": {"role": "user", "content": "1"}}',
    "no messages": b'{"prompt": []}',
    "half a character": b'{"prompt": "1 \\ud83d"}',
    "no role": chat({"content": "1"}),
    "no content": chat({"role": "user"}),
    "content null": chat({"role": "user", "content": None}),
    "role a number": chat({"role": 1, "content": "1"}),
    "messages and text": chat({"role": "user", "content": "1"}, "1"),
    "content empty": chat({"role": "user", "content": ""}),
    "a role that the template refuses": chat({"role": "alien", "content": "1"}),
    "an image beside it": b'{"prompt": "1", "images": [{"path": "one.png"}]}',
    "one image beside it": b'{"prompt": "1", "image": {"path": "one.png"}}',
    "an image in a part": chat({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1"}]}),
    "extra_info a text": b'{"prompt": "1", "extra_info": "easy"}',
    "extra_info a list": b'{"prompt": "1", "extra_info": [1]}',
    "reward_model a number": b'{"prompt": "1", "reward_model": 2}',
    "reward_model a text": b'{"prompt": "1", "reward_model": "not json"}',
    "reward_model a list in a text": b'{"prompt": "1", "reward_model": "[2]"}',
    "instruction a number": b'{"instruction": 5}',
    "messages a text": b'{"messages": "1+1="}'.replace(b'"1+1="', b"{}"),
}
# Files of other kinds with one bad row among good ones.
BAD_ROWS = {
    "null.parquet": parquet(GOOD, {**GOOD, "prompt": None}, GOOD),
    "empty.parquet": parquet(GOOD, {**GOOD, "prompt": ""}, GOOD),
    "array.json": b"[" + LINE + b", 5, " + LINE + b"]",
    "wide.csv": b"prompt,ground_truth\n1,2\n1,2,3\n1,2\n",
    "narrow.csv": b"prompt,ground_truth\n1,2\n1\n1,2\n",
    "gap.csv": b"prompt,ground_truth\n1,2\n,2\n1,2\n",
}
# Files that cannot be read, or hold nothing to train on.
UNREADABLE = {
    "cut.parquet": WHOLE[:-20],
    "torn.parquet": WHOLE[:40] + b"\0" * 40 + WHOLE[80:],
    "magic.parquet": b"PAR1PAR1",
    "nothing.parquet": b"",
    "json.parquet": LINE,
    "rows.parquet": parquet(columns=pyarrow.table({"prompt": pyarrow.array([], "string")})),
    "bytes.parquet": parquet({"prompt": b"1"}),
    "numbers.parquet": parquet({"prompt": 1}),
    "column.parquet": parquet({"question": "1"}),
    "printed.csv": b"prompt,ground_truth\n\"[{'role': 'user', 'content': '1+1='}]\",2\n",
    "quoted.jsonl": b'{"prompt": "[{\\"role\\": \\"user\\"}]"}\n',
    "parquet.jsonl": WHOLE,
    "gzip.jsonl": gzip.compress(LINE),
    "nothing.jsonl": b"",
    "blank.jsonl": b"\n \n\n",
    "nothing.json": b"[]",
    "cut.json": b"[" + LINE + b", {",
    "comma.json": b"[" + LINE + LINE + b"]",
    "twice.json": b"[" + LINE + b"]\n[" + LINE + b"]",
    "pretty.json": json.dumps(GOOD, indent=1).encode() * 2,
    "names.csv": b"prompt,prompt\n1,2\n",
    "unnamed.csv": b"prompt,\n1,2\n",
    "semicolons.csv": b"prompt;ground_truth\n1+1=;2\n",
    "headless.csv": b"1+1=,2\n1+1=,2\n",
    "only names.csv": b"prompt\n",
    "quote.csv": b'prompt\n"1\n',
    "latin.csv": "prompt\n1\né\n".encode("latin-1"),
    "rows.txt": LINE,
}


def load(path: Path, tokenizer, **settings) -> RLHFDataset:
    """Loads a dataset, and checks that all of its rows make a batch."""
    rows = RLHFDataset(path, tokenizer, config=DataConfig(max_prompt_length=8, **settings))
    batch = collate_fn([rows[position] for position in range(len(rows))])
    assert all(len(ids) > 0 for ids in batch["raw_prompt_ids"])
    return rows


def left_out_and_counted(path: Path, tokenizer, said: str, capsys) -> None:
    with pytest.raises(ValueError, match=said):
        load(path, tokenizer)
    assert len(load(path, tokenizer, max_bad_fraction=0.5)) == 2
    assert f"{path}: 2 of 3 rows\n" in (out := capsys.readouterr().out)
    assert "left out, unusable: 1 (" in out


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_or_left_out_and_counted(tmp_path, tokenizer, capsys, name):
    file = tmp_path / "data.jsonl"
    file.write_bytes(LINE + BAD_LINES[name] + b"\n" + LINE)
    is_object = name not in ("a text", "null", "a list")
    place = r"data\.jsonl(, row 1|, line 2)" if is_object else r"data\.jsonl, line 2 is .*; a row must be a JSON object"
    left_out_and_counted(file, tokenizer, place, capsys)


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_of_another_kind_of_file_is_named_or_left_out_and_counted(tmp_path, tokenizer, capsys, name):
    file = (tmp_path / "data").with_suffix(Path(name).suffix)
    file.write_bytes(BAD_ROWS[name])
    left_out_and_counted(file, tokenizer, PLACE, capsys)


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_is_refused_whatever_may_be_left_out(tmp_path, tokenizer, name):
    file = (tmp_path / "data").with_suffix(Path(name).suffix)
    file.write_bytes(UNREADABLE[name])
    with pytest.raises(ValueError, match=re.escape(str(file))):
        load(file, tokenizer, max_bad_fraction=0.9)


def test_marks_of_windows_do_no_harm(tmp_path, tokenizer):
    file = tmp_path / "data.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + LINE.replace(b"\n", b"\r\n") * 2)
    assert len(load(file, tokenizer)) == 2


def test_when_many_rows_are_bad_the_first_are_listed_with_the_remedy(tmp_path, tokenizer):
    file = tmp_path / "data.jsonl"
    file.write_bytes(LINE * 90 + b'{"prompt": ""}\n' * 10)
    assert len(load(file, tokenizer, max_bad_fraction=0.1)) == 90
    with pytest.raises(ValueError) as raised:
        load(file, tokenizer, max_bad_fraction=0.05)
    first, *others = str(raised.value).splitlines()
    assert first.startswith(f"{file}, row 90: the prompt is empty.") and "data.max_bad_fraction=0.05 of 100" in first
    assert [other.split(":")[0].strip() for other in others] == [f"{file}, row {row}" for row in range(91, 95)]
    with pytest.raises(ValueError, match=r"row 90.*Mend it .*data\.jsonl:91.*data\.max_bad_fraction=0\.01"):
        load(file, tokenizer)
