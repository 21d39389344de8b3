"""The tokens of a conversation that are learnt, written out by hand for four chat templates."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from configs.schema import DatasetClassConfig
from data.types import Sample
from extras.sft.dataset import SFTDataset, create_sft_dataset
from extras.sft.settings import SFTConfig, SFTDataConfig, check_sft
from tests.test_chat import TEMPLATES, tokenizer_with
from tests.test_chat_families import template_of

CHATML, LLAMA, PLAIN = "ChatML, as Qwen and SmolLM2", "headers and a trimmed content, as Llama 3", "none"
SPACE, LINE = "white space before the end, as Llama 2", "white space before the end, as deepseek-coder"
MARKED = "generation markers"
FORMATS = {name: TEMPLATES[name] for name in (CHATML, LLAMA, PLAIN, SPACE, LINE)} | {
    MARKED: (
        "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}"
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{%- generation -%}{{ m.content }}{% for call in m.tool_calls or [] %}<{{ call.name }}>{% endfor %}"
        "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        "<|im_end|>",
    )
}
SAID = [("system", "Sum."), ("user", "1+1"), ("assistant", "2"), ("user", "2+2"), ("assistant", "4"), ("user", "bye")]


def conversation(*said: tuple[str, str], **more: object) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in said], **more}


def sample(folder: Path, name: str, row: dict, **settings: object) -> tuple[SFTDataset, Sample]:
    template, end = FORMATS[name]
    tokenizer = tokenizer_with(template, end)
    file = folder / "rows.jsonl"
    file.write_text(json.dumps(row) + "\n")
    dataset = SFTDataset(file, tokenizer, SFTDataConfig(**settings), tokenizer.convert_tokens_to_ids(end))
    return dataset, dataset[0]["sample"]


def shown(folder: Path, name: str, row: dict, **settings: object) -> str:
    """A row's tokens as text, what is learnt in ⟦brackets⟧, the first bracket where the response starts."""
    dataset, found = sample(folder, name, row, **settings)
    texts = dataset.tokenizer.convert_ids_to_tokens([*found.prompt_ids, *found.token_ids])
    marks = [0] * len(found.prompt_ids) + found.policy_mask
    opened = [f"⟦{text}⟧" if mark else text for text, mark in zip(texts, marks, strict=True)]
    return "".join(opened).replace("⟧⟦", "")


GOLDEN = {
    CHATML: "<|im_start|>system\nSum.<|im_end|>\n<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n⟦2<|im_end|>⟧"
    "\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n⟦4<|im_end|>⟧",
    LLAMA: "<s><|start|>system<|stop|>\n\nSum.<|eot|><|start|>user<|stop|>\n\n1+1<|eot|><|start|>assistant<|stop|>\n\n"
    "⟦2<|eot|>⟧<|start|>user<|stop|>\n\n2+2<|eot|><|start|>assistant<|stop|>\n\n⟦4<|eot|>⟧",
    PLAIN: "system: Sum.\nuser: 1+1\nassistant:⟦2</s>⟧\nuser: 2+2\nassistant:⟦4</s>⟧",
    SPACE: "<s>[INST] Sum. [/INST]<s>[INST] 1+1 [/INST]⟦2</s>⟧<s>[INST] 2+2 [/INST]⟦4</s>⟧",
    LINE: "<s>### system:\nSum.\n### user:\n1+1\n### assistant:\n⟦2<|eot|>⟧\n### user:\n2+2\n### assistant:\n"
    "⟦4<|eot|>⟧",
}
GOLDEN[MARKED] = GOLDEN[CHATML]


@pytest.mark.parametrize("name", FORMATS)
def test_answers_and_their_ends_are_learnt_and_nothing_else(tmp_path: Path, name: str):
    assert shown(tmp_path, name, conversation(*SAID)) == GOLDEN[name]


@pytest.mark.parametrize("name", FORMATS)
def test_of_the_last_turn_alone_or_by_weight_the_rest_is_read(tmp_path: Path, name: str):
    first, _, second = GOLDEN[name].rpartition("⟦")
    last = first.replace("⟦", "").replace("⟧", "") + "⟦" + second
    assert shown(tmp_path, name, conversation(*SAID), turns_to_train="last") == last
    weighed = conversation(*SAID)
    weighed["messages"][2]["weight"] = 0
    assert shown(tmp_path, name, weighed) == last


BOTH = {
    CHATML: "<|im_start|>system\nSum.<|im_end|>\n<|im_start|>user\n⟦1+1<|im_end|>⟧\n<|im_start|>assistant\n"
    "⟦2<|im_end|>⟧\n<|im_start|>user\n⟦2+2<|im_end|>⟧\n<|im_start|>assistant\n⟦4<|im_end|>⟧\n<|im_start|>user\n"
    "⟦bye<|im_end|>⟧",
    LLAMA: "<s><|start|>system<|stop|>\n\nSum.<|eot|><|start|>user<|stop|>\n\n⟦1+1<|eot|>⟧<|start|>assistant<|stop|>"
    "\n\n⟦2<|eot|>⟧<|start|>user<|stop|>\n\n⟦2+2<|eot|>⟧<|start|>assistant<|stop|>\n\n⟦4<|eot|>⟧<|start|>user<|stop|>"
    "\n\n⟦bye<|eot|>⟧",
    PLAIN: "system: Sum.\nuser: ⟦1+1⟧\nassistant:⟦2</s>⟧\nuser: ⟦2+2⟧\nassistant:⟦4</s>⟧\nuser: ⟦bye⟧",
    SPACE: "<s>[INST] Sum. [/INST]<s>[INST] ⟦1+1⟧ [/INST]⟦2</s>⟧<s>[INST] ⟦2+2⟧ [/INST]⟦4</s>⟧<s>[INST] ⟦bye⟧",
    LINE: "<s>### system:\nSum.\n### user:\n⟦1+1⟧\n### assistant:\n⟦2<|eot|>⟧\n### user:\n⟦2+2⟧\n### assistant:\n"
    "⟦4<|eot|>⟧\n### user:\n⟦bye⟧",
}
BOTH[MARKED] = BOTH[CHATML]


@pytest.mark.parametrize("name", FORMATS)
def test_other_roles_are_learnt_with_their_ends(tmp_path: Path, name: str):
    padded = [(role, f"{said} " if role == "user" and name == LLAMA else said) for role, said in SAID]  # it is trimmed
    both = {"roles_to_train": ["assistant", "user"]}
    assert shown(tmp_path, name, conversation(*padded), **both) == BOTH[name]
    users = BOTH[name]
    for answer in "24":
        end = FORMATS[name][1]
        users = users.replace(f"⟦{answer}{end}⟧", f"{answer}{end}")
    assert shown(tmp_path, name, conversation(*padded), roles_to_train=["user"]) == users


def test_the_first_token_of_a_text_is_not_learnt_as_nothing_predicts_it(tmp_path: Path):
    _, found = sample(tmp_path, PLAIN, conversation(("user", "a")), roles_to_train=["user"])
    assert found.prompt_ids and found.policy_mask == [1]


def test_calls_are_learnt_as_the_template_writes_them_and_tools_are_shown(tmp_path: Path):
    row = conversation(("user", "x"), ("assistant", ""), ("tool", "9"), ("assistant", "9"), tools=[{"name": "add"}])
    row["messages"][1]["tool_calls"] = [{"name": "add"}]
    told = "<|im_start|>tool\n9<|im_end|>\n<|im_start|>assistant\n⟦9<|im_end|>⟧"
    asked = "[add]<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n⟦<add><|im_end|>⟧\n"
    assert shown(tmp_path, MARKED, row) == asked + told
    as_text = {**row, "tools": json.dumps(row["tools"])}
    appended = {"roles_to_train": ["assistant", "critic"]}  # not by the markers, which know of assistants alone
    assert shown(tmp_path, MARKED, as_text, **appended) == asked + told


def test_a_call_is_learnt_with_its_own_end_and_results_name_its_tool(tmp_path: Path):
    """The layout is gpt-oss's, which takes results behind calls alone, and has a channel before an answer's text."""
    FORMATS["gpt-oss"] = template_of("gpt-oss"), "<|end|>"
    row = conversation(("user", "x"), ("assistant", ""), ("tool", "9"), ("assistant", "n"))
    row["messages"][1]["tool_calls"] = [{"function": {"name": "add", "arguments": {"a": 1}}}]
    asked = '<|start|>user<|stop|>x<|end|><|start|>assistant⟦ to=add<|stop|>{"a": 1}<|eot|>⟧'
    told = '<|start|>tool add<|stop|>"9"<|end|><|start|>assistant⟦ final<|stop|>n<|end|>⟧'
    assert shown(tmp_path, "gpt-oss", row) == asked + told


def test_markers_take_what_appending_does_not(tmp_path: Path):
    row = conversation(("assistant", "hi"), ("assistant", "you"))
    whole = "<|im_start|>assistant\n⟦hi<|im_end|>⟧\n<|im_start|>assistant\n⟦you<|im_end|>⟧"
    assert shown(tmp_path, MARKED, row) == whole
    with pytest.raises(ValueError, match=r"row 0: messages must start with a prompt.*generation markers takes others"):
        sample(tmp_path, CHATML, row)


def test_markers_without_the_end_are_told_of_once(tmp_path: Path, capsys: pytest.CaptureFixture):
    endless = FORMATS[MARKED][0].replace("{{ '<|im_end|>' }}{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    FORMATS["endless"] = (endless, "<|im_end|>")
    assert "⟦2⟧<|im_end|>" in shown(tmp_path, "endless", conversation(*SAID))
    assert capsys.readouterr().err.count("will not learn to stop") == 1
    shown(tmp_path, MARKED, conversation(*SAID))
    assert not capsys.readouterr().err


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_calls_of_rows_are_learnt_as_values_without_the_arguments_of_other_rows(tmp_path: Path, ending: str):
    """Arguments as JSON are not encoded twice; Arrow gives each call and each tool the keys of all."""
    given = [{"city": "Rome"}, {"x": 1}] if ending == "parquet" else ['{"city": "Rome"}', {"x": 1}]
    rows = []
    for arguments, name in zip(given, ("city", "x"), strict=True):
        row = conversation(
            ("user", "a"), ("assistant", ""), tools=[{"function": {"name": "f", "is": {name: {"of": 1}}}}]
        )
        row["messages"][1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        rows.append(row)
    file = tmp_path / f"rows.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template, end = template_of("Qwen2.5"), "<|im_end|>"
    tokenizer = tokenizer_with("{{ tools | tojson }}" + template, end)
    dataset = SFTDataset(file, tokenizer, SFTDataConfig(), tokenizer.convert_tokens_to_ids(end))
    for item, arguments, name in zip(dataset, ('{"city": "Rome"}', '{"x": 1}'), ("city", "x"), strict=True):
        learnt, read = (
            "".join(tokenizer.convert_ids_to_tokens(ids))
            for ids in (item["sample"].token_ids, item["sample"].prompt_ids)
        )
        assert learnt == f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call><|im_end|>'
        assert read.startswith(f'[{{"function": {{"name": "f", "is": {{"{name}": {{"of": 1}}}}}}}}]')


@pytest.mark.parametrize("role", ["human", "developer", "User"])
def test_what_the_template_leaves_out_is_refused_however_the_row_is_split(tmp_path: Path, role: str):
    marked = FORMATS[MARKED][0].replace("{% else %}{{ m.content", "{% elif m.role in ('system', 'user') %}{{ m.content")
    FORMATS.update({"Qwen3": (template_of("Qwen3"), "<|im_end|>"), "marked": (marked, "<|im_end|>")})
    for name, settings in (("Qwen3", {}), ("Qwen3", {"roles_to_train": ["assistant", "user"]}), ("marked", {})):
        for said in (
            [(role, "1+2="), ("assistant", "3")],
            [("user", "a"), ("assistant", "b"), (role, "c"), ("assistant", "d")],
        ):
            with pytest.raises(
                ValueError, match=rf"row 0: the chat template .* leaves out the text .* role {role}: say"
            ):
                sample(tmp_path, name, conversation(*said), **settings)


def test_a_content_in_parts_is_read_and_learnt_as_its_text(tmp_path: Path):
    turns = conversation(*((role, [{"type": "text", "text": text} for text in "12"]) for role in ("user", "assistant")))
    text = shown(tmp_path, CHATML, turns, roles_to_train=["assistant", "user"])
    assert "⟦1\n2<|im_end|>⟧\n<|im_start|>assistant\n⟦1\n2<|im_end|>⟧" in text


REFUSED = [
    (CHATML, conversation(("user", "a")), {}, r"of the roles user hold none to learn: data\.roles_to_train"),
    (CHATML, conversation(("user", "a"), ("assistant", "b")) | {"messages": "text"}, {}, "must be a list of chat"),
    (MARKED, conversation(("user", "a"), ("assistant", "")), {}, None),
    (CHATML, {"messages": [{"role": "user", "content": "a", "weight": 0.5}]}, {}, r"weight 0\.5: it must be 1"),
    (PLAIN, conversation(("user", ""), ("assistant", "b")), {"roles_to_train": ["user"]}, "no token of it is learnt"),
]


@pytest.mark.parametrize(("name", "row", "settings", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_learnt_is_named(tmp_path: Path, name: str, row: dict, settings: dict, message: str | None):
    if message is None:  # an end alone is an answer
        assert shown(tmp_path, name, row).endswith("⟦<|im_end|>⟧")
        return
    with pytest.raises(ValueError, match=rf"rows\.jsonl, row 0: .*{message}"):
        sample(tmp_path, name, row, **settings)


def test_a_key_that_a_users_class_cannot_read_is_refused(tmp_path: Path):
    lines = "from torch.utils.data import Dataset", "class Mine(Dataset): __init__ = lambda self, data_files: None"
    (tmp_path / "mine.py").write_text("\n".join(lines))
    chosen = DatasetClassConfig(str(tmp_path / "mine.py"), "Mine", extras={"level": 2})
    check_sft(SFTConfig(data=SFTDataConfig(train_files="a.txt", val_files="b.txt", custom_cls=chosen)))  # of any ending
    with pytest.raises(ValueError, match=r"^data\.custom_cls\.level .*Mine.* takes no config"):
        create_sft_dataset("rows.jsonl", None, SFTDataConfig(custom_cls=chosen), 0)
