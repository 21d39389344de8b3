"""Many rows of parquet files are those that are read one by one: which are left out, what is drawn, what is said."""

import json
import subprocess
import sys
from functools import cache
from math import inf
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from configs.paths import ROOT
from configs.schema import DataConfig
from data.files import read_metrics
from data.rl_dataset import RLHFDataset, create_rl_dataset
from data.rows import report_overlap
from extras.many_rows import parquet_rows
from extras.many_rows.dataset import ManyRows
from extras.many_rows.prompt_lengths import LEFT_OUT, Words
from extras.sft.dataset import SFTDataset
from extras.sft.settings import SFTDataConfig
from tests.test_chat import SPECIALS, TEMPLATES, tokenizer_with
from tests.test_chat_families import FAMILIES, template_of

CHATML = TEMPLATES["ChatML, as Qwen and SmolLM2"][0]
PROMPTS = {
    **{name: template for name, (template, _) in TEMPLATES.items()},
    **{name: template_of(name) for name in FAMILIES},
    "shouts": "{% for m in messages %}{{ m.role + m.content | upper }}{% endfor %}",
    "twice": "{% for m in messages %}{{ m.content + m.content }}{% endfor %}",
    "asks": "{% for m in messages %}{{ m.content + 'x' * 9 * ('ab' in m.content) }}{% endfor %}",
    "JSON": "{% for m in messages %}{{ m.content | tojson }}{% endfor %}",
}


@pytest.fixture(autouse=True)
def _many(monkeypatch):
    monkeypatch.setattr(parquet_rows, "MANY", 1)


@cache
def bpe(normalizer=None):
    """A tokenizer of bytes with merges, as Qwen's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizer and getattr(normalizers, normalizer)()
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIALS, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["ab ab abc system user assistant the"] * 9, trainer)
    return tokenizer


def tokenizer_of(kind, template):
    if kind == "characters":
        return tokenizer_with(template, "</s>")
    made = PreTrainedTokenizerFast(tokenizer_object=bpe(kind), eos_token="</s>", additional_special_tokens=SPECIALS)
    made.chat_template = template
    return made


TEXT = st.one_of(
    st.text("ab c\n", max_size=12),
    st.sampled_from(
        ["", " ", "ß", "\u0958" * 9, "x<|im_end|>", "<think>a</think>b", "[{'role': 'a'", "</think>", "\ufdd0"]
    ),
    st.text(max_size=9),
)
MESSAGE = st.fixed_dictionaries({
    "role": st.sampled_from(["system", "user", "user", "user", "assistant", "tool", "developer"]), "content": TEXT,
})  # fmt: skip
PROMPT = st.lists(MESSAGE, max_size=4) | st.just([{"role": "user", "content": "ab"}])
ROW = st.fixed_dictionaries({"prompt": PROMPT, "extra_info": st.just({"index": 3})})
MESSAGES = [{"role": "user", "content": "ab"}]


def write(folder, rows, name="rows.parquet"):
    folder.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / name, row_group_size=3)
    return [str(folder / name)]


def outcome(kind, files, tokenizer, config):
    """Returns what becomes of the rows: an error, or what is drawn and left out."""
    try:
        rows = kind(files, tokenizer, config)
    except ValueError as error:
        return str(error)
    return [*rows], rows.unusable, rows.num_filtered, list(rows.rows), [ids.tolist() for ids in rows.prompt_ids]


@given(st.data())
@settings(max_examples=200)
def test_rows_that_are_many_are_those_read_one_by_one(tmp_path_factory, data):
    name, kind = data.draw(st.tuples(st.sampled_from([*PROMPTS]), st.sampled_from(["characters", None, "NFC"])))
    texts = st.lists(TEXT.map(lambda text: {"prompt": text}), min_size=1, max_size=9)
    rows = data.draw(st.lists(ROW, min_size=1, max_size=9) | texts)
    chosen = {
        "max_prompt_length": st.integers(1, 90), "max_bad_fraction": st.sampled_from([0.0, 0.5, 0.99]),
        "filter_overlong_prompts": st.booleans(), "truncation": st.sampled_from(["error", "left"]),
    }  # fmt: skip
    tokenizer, config = tokenizer_of(kind, PROMPTS[name]), DataConfig(**data.draw(st.fixed_dictionaries(chosen)))
    files = write(tmp_path_factory.mktemp("rows"), rows)
    one_by_one = outcome(RLHFDataset, files, tokenizer, config)
    assert [outcome(ManyRows, files, tokenizer, config) for _ in range(2)] == [one_by_one] * 2


@pytest.mark.parametrize("columns", [
    {"messages": MESSAGES}, {"messages": [*MESSAGES, {"role": "assistant", "content": "c"}]}, {"instruction": "a"},
    {"prompt": MESSAGES, "output": "x", "gts": "y"}, {"prompt": MESSAGES, "extra_info": '{"index": 2}'},
    {"prompt": MESSAGES, "extra_info": "{"}, {"prompt": MESSAGES, "reward_model": "3"},
    {"prompt": MESSAGES, "images": [b"a"]},
    {"prompt": [{"role": "user", "content": "ab", "name": "Ann"}]}, {"question": "a"}, {"prompt": 3},
])  # fmt: skip
def test_columns_of_all_kinds_are_as_before(tmp_path, columns):
    files = write(tmp_path, [columns] * 3) + write(tmp_path, [{"prompt": MESSAGES, "level": 3}], "more.parquet")
    tokenizer, config = tokenizer_of(None, CHATML), DataConfig(max_bad_fraction=0.9)
    one_by_one = outcome(RLHFDataset, files, tokenizer, config)
    assert [outcome(ManyRows, files, tokenizer, config) for _ in range(2)] == [one_by_one] * 2


def test_a_row_in_the_middle_of_many_is_named(tmp_path, caplog):
    rows = [{"prompt": MESSAGES}] * 5000
    rows[4321] = {"prompt": [{"role": "user", "content": "ab c " * 99}]}
    files, tokenizer = write(tmp_path, rows), tokenizer_of(None, CHATML)
    made = create_rl_dataset(files, DataConfig(max_prompt_length=128), tokenizer)
    assert type(made) is ManyRows and len(made) == 4999
    assert f"dropped 1 of 5000 prompts, longer than data.max_prompt_length=128 tokens: {files[0]}, row 4321" in (
        caplog.text
    )
    rows[4999] = {"prompt": [{"role": "user", "content": ""}]}
    with pytest.raises(ValueError, match=r"rows\.parquet, row 4999: the prompt is empty"):
        create_rl_dataset(write(tmp_path, rows), DataConfig(max_prompt_length=128), tokenizer)


def starts_in(folder):
    """Counts the different starts that a folder knows of."""
    return len({entry["identity"] for entry in read_metrics(folder / LEFT_OUT) if "left_out" in entry})


def test_what_is_left_out_is_kept_by_what_decides_it(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "ab c " * times}]} for times in (1, 9, 40)]
    files = write(tmp_path, rows)

    def made(limit=64, template=CHATML, kind=None):
        config = DataConfig(max_prompt_length=limit)
        return len(ManyRows(files, tokenizer_of(kind, template), config)), starts_in(tmp_path)

    assert [made(), made(), made(limit=300)] == [(2, 1), (2, 1), (3, 2)]
    assert made(kind="NFC")[1] == 3 and made(template=PROMPTS["Llama 3.1"])[1] == 4
    write(tmp_path, rows[:1])
    assert made() == (1, 5)
    for broken in (b"", b"\xff\x00{", b'{"identity": ', b"[1]\n", json.dumps({"identity": "x"}).encode()):
        (tmp_path / LEFT_OUT).write_bytes(broken)
        assert made() == made() == (1, 1)
    (tmp_path / LEFT_OUT).unlink()
    (tmp_path / LEFT_OUT).mkdir()  # it cannot be written
    assert ManyRows(files, tokenizer_of(None, CHATML), DataConfig()).num_filtered == 0


def test_those_that_start_at_once_all_know_afterwards(tmp_path):
    files, limits = write(tmp_path, [{"prompt": MESSAGES}] * 50), [80, 81, 80]
    start = "import sys; from extras.many_rows.tests.test_many_rows import *; parquet_rows.MANY = 1; "
    start += "ManyRows(sys.argv[1:2], tokenizer_of(None, CHATML), DataConfig(max_prompt_length=int(sys.argv[2])))"
    started = [subprocess.Popen([sys.executable, "-c", start, *files, str(limit)], cwd=ROOT) for limit in limits]
    assert [process.wait() for process in started] == [0] * len(limits) and starts_in(tmp_path) == 2


def test_prompts_of_both_sets_are_counted_without_encoding_all(tmp_path, capsys):
    tokenizer = tokenizer_of(None, CHATML)
    prompts = [[{"role": "system", "content": "ab"}, {"role": "user", "content": f"q{number}"}] for number in range(40)]
    train = ManyRows(write(tmp_path, [{"prompt": prompt} for prompt in prompts]), tokenizer, DataConfig())
    val = RLHFDataset(
        write(tmp_path, [{"prompt": prompts[7]}, {"prompt": prompts[3][:1]}], "val.parquet"), tokenizer, DataConfig()
    )
    assert train.prompt_ids_like(val).positions.tolist() == [7]
    report_overlap(train.prompt_ids_like(val), val.prompt_ids, tokenizer)
    assert "the prompts of 1 row of 2 in data.val_files" in capsys.readouterr().err


LETTERS = r"'s|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@cache
def words_of(way):
    """Words of a tokenizer that learnt merges from this page's code, and cuts texts this way."""
    tokenizer, whole = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = {
        "GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False), "nowhere": whole,
        "Llama 3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LETTERS), "isolated"), whole]),
    }[way]  # fmt: skip
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(Path(__file__).read_text().split("\n\n"), trainer)
    return Words(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.mark.parametrize("way", ["GPT-2", "Llama 3"])
@given(
    st.text("ab  \n\t.'s1=\r(", max_size=20)
    | st.lists(st.sampled_from(Path(__file__).read_text().split(" "))).map(" ".join)
)
def test_words_bound_the_tokens_of_a_text(way, text):
    words = words_of(way)
    assert words.cuts_at_spaces and len(words.backend.encode(text, add_special_tokens=False).ids) <= words.most_tokens(
        text
    )
    assert words_of("nowhere").most_tokens(text) == inf and words.most_tokens(text + "é") == inf


CONVERSATION = st.lists(TEXT, min_size=1, max_size=5).map(
    lambda texts: {
        "messages": [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    }
)
PAIR = st.fixed_dictionaries({"prompt": st.just("ab ") | TEXT, "response": TEXT})


@given(st.data())
@settings(max_examples=100)
def test_supervised_rows_are_those_read_one_by_one(tmp_path_factory, data):
    name = data.draw(st.sampled_from([*PROMPTS]))
    rows = data.draw(st.lists(CONVERSATION, min_size=1, max_size=6) | st.lists(PAIR, min_size=1, max_size=6))
    config = SFTDataConfig(
        max_length=data.draw(st.integers(4, 120)),
        max_bad_fraction=data.draw(st.sampled_from([0.0, 0.5, 0.99])),
        truncation=data.draw(st.sampled_from(["error", "left", "right"])),
    )
    tokenizer, files = tokenizer_of(None, PROMPTS[name]), write(tmp_path_factory.mktemp("rows"), rows)

    def outcome_of(number):
        parquet_rows.MANY = number
        try:
            made = SFTDataset(files, tokenizer, config, tokenizer.eos_token_id)
        except ValueError as error:
            return str(error)
        assert bool(made.lengths) is (number == 1)
        return [*made.samples]

    one_by_one = outcome_of(99)
    assert [outcome_of(1) for _ in range(2)] == [one_by_one] * 2
