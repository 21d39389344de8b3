"""Each message is written into the prompt or refused, by templates laid out like those of 15 families."""

import pytest
from jinja2 import TemplateError

from configs.extras import has
from data.chat import ChatFormat, lost_mark
from data.types import Message
from tests.test_chat import tokenizer_with

CHATML = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OPENS = "{{ '<|im_start|>' + m.role + '\n' }}"
QWEN_TOOL = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
CALLS = "{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
ALTERNATE = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles alternate') }}{% endif %}"
# By family: how it writes each message m, what stands behind all, and the token that ends an answer.
FAMILIES = {
    "Qwen2.5": (
        "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        "{% if m.role in ('user', 'system') or m.role == 'assistant' and not m.tool_calls %}"
        f"{OPENS}{{{{ m.content + '<|im_end|>\n' }}}}{{% elif m.role == 'assistant' %}}{OPENS}"
        f"{{% if m.content %}}{{{{ m.content }}}}{{% endif %}}{CALLS}<|im_end|>\n"
        f"{{% elif m.role == 'tool' %}}{QWEN_TOOL}{{% endif %}}",
        CHATML,
        "<|im_end|>",
    ),
    "Qwen3": (
        "{% set text = m.content if m.content is string else '' %}"
        f"{{% if m.role in ('user', 'system') %}}{OPENS}{{{{ text + '<|im_end|>\n' }}}}"
        "{% elif m.role == 'assistant' %}"
        f"{OPENS}{{{{ text if loop.last else text.split('</think>')[-1].lstrip('\n') }}}}{CALLS}<|im_end|>\n"
        f"{{% elif m.role == 'tool' %}}{QWEN_TOOL}{{% endif %}}",
        CHATML,
        "<|im_end|>",
    ),
    "Llama 2": (
        "{% if m.role == 'user' %}<s>[INST] {% if loop.previtem and loop.previtem.role == 'system' %}<<SYS>>\n"
        "{{ loop.previtem.content }}\n<</SYS>>\n\n{% endif %}{{ m.content.strip() }} [/INST]"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content.strip() + ' </s>' }}{% elif m.role != 'system' %}"
        "{{ raise_exception('roles alternate') }}{% endif %}",
        "",
        "</s>",
    ),
    "Llama 3.1": (
        "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
        "<|start|>assistant<|stop|>\n\n{{ {'name': m.tool_calls[0].function.name, 'parameters': "
        "m.tool_calls[0].function.arguments} | tojson }}<|eot|>{% elif m.role == 'tool' %}"
        "<|start|>ipython<|stop|>\n\n{{ m.content }}<|eot|>{% else %}"
        "<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot|>{% endif %}",
        "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}",
        "<|eot|>",
    ),
    "Mistral v0.3": (
        "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids have 9 characters') }}{% endif %}{{ c.function | tojson }}{% endfor %}]</s>"
        "{% elif m.role == 'tool' %}{% if m.tool_call_id is not defined %}{{ raise_exception('no id') }}{% endif %}"
        "[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]{% elif m.role == 'user' %}[INST] {% if loop.first is false and "
        "loop.previtem.role == 'system' %}{{ loop.previtem.content + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
        "{% elif m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}{% elif m.role != 'system' %}"
        "{{ raise_exception('unknown role') }}{% endif %}",
        "",
        "</s>",
    ),
    "Gemma 2": (
        f"{{% if m.role == 'system' %}}{{{{ raise_exception('no system') }}}}{{% endif %}}{ALTERNATE}"
        "<|start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<|stop|>\n",
        "{% if add_generation_prompt %}<|start|>model\n{% endif %}",
        "<|stop|>",
    ),
    "Phi-3": (
        "{% if m.role in ('system', 'user', 'assistant') %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}"
        "{% endif %}",
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}",
        "<|end|>",
    ),
    "Phi-4": (
        "{% if m.role in ('system', 'user', 'assistant') %}{{ '<|im_start|>' + m.role + '<|stop|>' + m.content + "
        "'<|im_end|>' }}{% endif %}",
        "{% if add_generation_prompt %}<|im_start|>assistant<|stop|>{% endif %}",
        "<|im_end|>",
    ),
    "DeepSeek-R1": (
        "{% if m.role == 'system' and loop.first %}{{ m.content }}{% elif m.role == 'user' %}<|user|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content.split('</think>')[-1] }}{% for c in m.tool_calls or "
        "[] %}<|tool|>{{ c.function.name }}\n{{ c.function.arguments | tojson }}{% endfor %}</s>"
        "{% elif m.role == 'tool' %}<|tool|>{{ m.content }}<|end|>{% endif %}",
        "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
        "</s>",
    ),
    "DeepSeek-V3": (
        "{% if m.role == 'user' %}<|user|>{{ m.content }}{% elif m.role == 'assistant' and m['content'] is none %}"
        "<|assistant|>{% for c in m.tool_calls %}<|tool|>{{ c.function.name }}\n{{ c.function.arguments | tojson }}"
        "{% endfor %}</s>{% elif m.role == 'assistant' %}<|assistant|>{{ m.content.split('</think>')[-1] }}</s>"
        "{% elif m.role == 'tool' %}<|tool|>{{ m.content }}<|end|>{% else %}{{ m.content }}{% endif %}",
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "</s>",
    ),
    "SmolLM2": (f"{OPENS}{{{{ m.content + '<|im_end|>\n' }}}}", CHATML, "<|im_end|>"),
    "Zephyr": (
        "{% if m.role in ('system', 'user', 'assistant') %}{{ '<|' + m.role + '|>\n' + m.content + '</s>' }}\n"
        "{% endif %}",
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "</s>",
    ),
    "Granite 3": (
        "<|start|>{{ m.role }}<|stop|>{{ m.content }}{% if m.tool_calls %}<|tool|>{{ m.tool_calls | tojson }}"
        "{% endif %}<|end|>\n",
        "{% if add_generation_prompt %}<|start|>assistant<|stop|>{% endif %}",
        "<|end|>",
    ),
    "gpt-oss": (
        "{% if m.role in ('system', 'developer') and loop.first %}<|start|>developer<|stop|># Instructions\n\n"
        "{{ m.content }}<|end|>{% elif m.role == 'user' %}<|start|>user<|stop|>{{ m.content }}<|end|>"
        "{% elif m.tool_calls %}{% if m.content and messages[loop.index:] | selectattr('role', 'eq', 'assistant') | "
        "list | length == 0 %}<|start|>assistant analysis<|stop|>{{ m.content }}<|end|>{% endif %}"
        "<|start|>assistant to={{ m.tool_calls[0].function.name }}<|stop|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|eot|>{% elif m.role == 'assistant' %}"
        "<|start|>assistant final<|stop|>{{ m.content }}<|end|>{% elif m.role == 'tool' %}"
        "{% if not ns.name %}{{ raise_exception('no call before') }}{% endif %}"
        "<|start|>tool {{ ns.name }}<|stop|>{{ m.content | tojson }}<|end|>{% endif %}"
        "{% if m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}{% endif %}",
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        "<|end|>",
    ),
    "GLM-4.5": (
        "{% set text = m.content if m.content is string else m.content | map(attribute='text') | join %}"
        "{% if m.role == 'user' %}<|user|>\n{{ text }}{% elif m.role == 'assistant' %}<|assistant|>\n"
        "{{ text.split('</think>')[-1].strip() }}{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}"
        "{% for key, value in c.function.arguments.items() %}\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}"
        "</arg_value>{% endfor %}\n</tool_call>{% endfor %}{% elif m.role == 'tool' %}<|tool|>\n<tool_response>\n"
        "{{ text }}\n</tool_response>{% elif m.role == 'system' %}<|start|>\n{{ text }}{% endif %}",
        "{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "</s>",
    ),
    "Kimi K2": (
        "<|start|>{{ m.name or m.role }}<|stop|>{% if m.role == 'assistant' %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<|tool|>{{ c.id }}<|stop|>{{ c.function.arguments | tojson }}{% endfor %}"
        "{% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}{% else %}{{ m.content }}"
        "{% endif %}<|im_end|>",
        "{% if add_generation_prompt %}<|start|>assistant<|stop|>{% endif %}",
        "<|im_end|>",
    ),
}


def template_of(family: str) -> str:
    each, behind, _ = FAMILIES[family]
    return f"{{% set ns = namespace(name='') %}}{{% for m in messages %}}{each}{{% endfor %}}{behind}"


def call(arguments: object = None, call_id: str = "functions.add:0") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


USER, ANSWER = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "told"}
RESULT = {"role": "tool", "content": "nine", "tool_call_id": "a1b2c3d4e"}
PARTS = [{"type": "text", "text": "first", "image": None}, {"type": "text", "text": "then"}]


def calling(*calls: dict, content: str | None = None) -> list[Message]:
    return [USER, {"role": "assistant", "content": content, "tool_calls": list(calls)}, RESULT]


# By case: the messages, and what of them the prompt has to say.
CASES = {
    "system": ([{"role": "system", "content": "rule"}, USER], ["rule", "ask"]),
    "user": ([USER], ["ask"]),
    "user in parts": ([{"role": "user", "content": PARTS}], ["first\nthen"]),
    "system in parts": ([{"role": "system", "content": PARTS}, USER], ["first\nthen", "ask"]),
    "answer": ([USER, ANSWER, USER], ["told", "ask"]),
    "answer in parts": ([USER, {"role": "assistant", "content": PARTS}, USER], ["first\nthen"]),
    "answer behind a thought": ([USER, {"role": "assistant", "content": "<think>hm</think>told"}, USER], ["told"]),
    "answer before a thought": (
        [USER, {"role": "assistant", "content": "told<think>hm</think>so"}, USER],
        ["told", "so"],
    ),
    "calls": (calling(call('{"key": 31}')), ["add", "key", "31", "nine"]),
    "a call without arguments": (calling(call()), ["add", "nine"]),
    "a call with another id": (calling(call({"key": 31}, "a1b2c3d4e")), ["add", "key", "31", "nine"]),
    "text beside calls": (calling(call({"key": 31}, "a1b2c3d4e"), content="look"), ["look", "add", "key", "nine"]),
    "text beside calls, and an answer": (
        [*calling(call({"key": 31}, "a1b2c3d4e"), content="look"), ANSWER, USER],
        ["key", "31", "told"],
    ),
    "a tool's result": ([USER, ANSWER, {"role": "tool", "content": "nine"}], ["nine"]),
    "a tool's result in parts": ([USER, ANSWER, {"role": "tool", "content": PARTS}], ["first\nthen"]),
    "developer": ([{"role": "developer", "content": "rule"}, USER], ["rule", "ask"]),
    "human": ([{"role": "human", "content": "ask"}], ["ask"]),
    "User": ([{"role": "User", "content": "ask"}], ["ask"]),
    "second system": (
        [{"role": "system", "content": "rule"}, USER, {"role": "system", "content": "late"}],
        ["rule", "late"],
    ),
}


ODD = {"developer", "human", "User"}
RESULTS = {"a tool's result", "a tool's result in parts"}
BESIDE = {"text beside calls", "text beside calls, and an answer"}
WITH_CALLS = {"calls", "a call without arguments", "a call with another id", *BESIDE}
# What each family leaves out or refuses; it writes the other cases.
REFUSED = {
    "Qwen2.5": ODD,
    "Qwen3": {"answer before a thought", *ODD},
    "Llama 2": {"second system", *WITH_CALLS, *RESULTS, *ODD},
    "Llama 3.1": BESIDE,
    "Mistral v0.3": {"calls", "a call without arguments", "second system", *BESIDE, *RESULTS, *ODD},
    "Gemma 2": {"system", "system in parts", "second system", *WITH_CALLS, *RESULTS, *ODD},
    "Phi-3": {*WITH_CALLS, *RESULTS, *ODD},
    "Phi-4": {*WITH_CALLS, *RESULTS, *ODD},
    "DeepSeek-R1": {"answer before a thought", "second system", *ODD},
    "DeepSeek-V3": {"answer before a thought", *BESIDE},
    "SmolLM2": WITH_CALLS,
    "Zephyr": {*WITH_CALLS, *RESULTS, *ODD},
    "Granite 3": set(),
    "gpt-oss": {"second system", *RESULTS, "human", "User"},
    "GLM-4.5": {"answer before a thought", *ODD},
    "Kimi K2": {"a call with another id", *BESIDE},  # ids hold the names
}
HAS_TOOLS = has("optional", "behind_calls")
needs_tools = pytest.mark.skipif(not HAS_TOOLS, reason="extras/tools was removed")
BEHIND_CALLS = {"Mistral v0.3", "gpt-oss"}  # in a prompt they refuse a result behind a text: an answer's text may call


def chat_of(family: str) -> ChatFormat:
    return ChatFormat(tokenizer_with(template_of(family), FAMILIES[family][2]), {})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_message_says_is_written_or_refused(family: str, case: str):
    chat, (messages, says) = chat_of(family), CASES[case]
    ways = [lambda: chat.prompt_ids(messages)]
    if messages[:2] == [USER, ANSWER]:
        ways.append(lambda: chat.increment(messages[2:], stopped=True))
        says = says if len(messages) == 3 and messages[2] != USER else ["ask"]
    for encode in ways:
        is_taken = encode is not ways[0] and case in RESULTS and family in BEHIND_CALLS and HAS_TOOLS
        if case in REFUSED[family] and not is_taken:
            with pytest.raises((ValueError, TemplateError)):
                encode()
        else:
            text = "".join(chat.tokenizer.convert_ids_to_tokens(encode()))
            assert all(each in text or each.replace("\n", r"\n") in text for each in says)


def test_the_refusal_names_role_kind_and_remedy_in_one_line():
    chat = chat_of("Llama 3.1")
    chat.tokenizer.name_or_path = "llamas/8b"
    with pytest.raises(ValueError, match=r"of llamas/8b leaves out the text .*role assistant with tool calls: set mod"):
        chat.prompt_ids(CASES["text beside calls"][0])
    chat = chat_of("Qwen3")
    with pytest.raises(
        ValueError, match=r"text of .*role human: say it as system or user, or set model.custom_chat_te"
    ):
        chat.prompt_ids(CASES["human"][0])


def test_a_template_is_tried_once_for_conversations_of_one_kind():
    chat = chat_of("Qwen3")
    before = lost_mark.cache_info().misses
    for number in range(20):
        asked = call({f"key{number}": number}, f"call_{number + 100}")
        said = f"<think>{number}</think>told {number}"
        messages = calling(asked) + [{"role": "assistant", "content": said, "reasoning_content": f"{number:020}"}, USER]
        chat.prompt_ids(messages)
    assert lost_mark.cache_info().misses == before + 1


# By family: an answer that calls, as it is sampled, and what stands behind it when the tool has answered.
ANSWERS = {
    "Qwen2.5": (
        '<tool_call>\n{"name": "add", "arguments": {"key": 31}}\n</tool_call><|im_end|>',
        "\n<|im_start|>user\n<tool_response>\nnine\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "Llama 3.1": (
        '{"name": "add", "parameters": {"key": 31}}<|eot|>',
        "<|start|>ipython<|stop|>\n\nnine<|eot|><|start|>assistant<|stop|>\n\n",
    ),
    "Mistral v0.3": (
        '[TOOL_CALLS] [{"name": "add", "arguments": {"key": 31}}]</s>',
        "[TOOL_RESULTS] nine[/TOOL_RESULTS]",
    ),
    "gpt-oss": (
        ' to=add<|stop|>{"key": 31}<|eot|>',
        '<|start|>tool add<|stop|>"nine"<|end|><|start|>assistant',
    ),
    "GLM-4.5": (
        "\n<tool_call>add<arg_key>key</arg_key>\n<arg_value>31</arg_value></tool_call>",
        "<|tool|>\n<tool_response>\nnine\n</tool_response><|assistant|>",
    ),
}


@needs_tools
@pytest.mark.parametrize("family", ANSWERS)
def test_behind_a_call_stands_what_the_template_writes_of_the_whole_conversation(family: str):
    """All tokens are equal, whether the answer ended by itself, by any stop id, or was cut before its end."""
    chat, (answer, told) = chat_of(family), ANSWERS[family]
    asked = call({"key": 31}, "a1b2c3d4e")
    whole = chat.prompt_ids(calling(asked))
    ids = chat.tokenizer.encode(answer, add_special_tokens=False)
    begun = [*chat.prompt_ids([USER]), *ids]
    for result, calls in ((RESULT, [asked]), ({"role": "tool", "content": "nine", "name": "add"}, [])):
        told_ids = chat.increment([result], True, ids[-1], calls)
        assert "".join(chat.tokenizer.convert_ids_to_tokens(told_ids)) == told and [*begun, *told_ids] == whole
        assert chat.increment([result], True, None, calls) == told_ids
        end = [] if family == "GLM-4.5" else ids[-1:]
        assert chat.increment([result], False, ids[-1], calls) == [*end, *told_ids]


@needs_tools
def test_each_of_several_results_stands_behind_calls_if_the_template_takes_more_than_one():
    """gpt-oss's template writes one call of a message, and the results behind it by its name."""
    results = [{"role": "tool", "content": text, "tool_call_id": f"id_of_{text}"} for text in ("nine", "</s>", "six")]
    calls = [call({}, each["tool_call_id"]) for each in results[1:]]
    calls[0]["function"] = {"name": "sub", "arguments": {}}
    results[0]["name"] = "mul"
    texts = [chat_of(family).increment_text([*results, USER], calls) for family in sorted(BEHIND_CALLS)]
    told = [("mul", "nine"), ("sub", "</s>"), ("add", "six")]
    assert texts == [
        "</s>" + "".join(f"[TOOL_RESULTS] {text}[/TOOL_RESULTS]" for _, text in told) + "[INST] ask[/INST]",
        "<|eot|>"
        + "".join(f'<|start|>tool {name}<|stop|>"{text}"<|end|>' for name, text in told)
        + "<|start|>user<|stop|>ask<|end|><|start|>assistant",
    ]


# By the token that ended an answer (none: it was cut), what stands behind it in layouts whose turns have no end.
HEADERS = {"<|user|>": "\nask<|assistant|>", "</s>": "<|user|>\nask<|assistant|>", None: "<|user|>\nask<|assistant|>"}


@pytest.mark.parametrize("last", HEADERS)
@pytest.mark.parametrize("end", ["", "<|end|>", " <|end|>\n"])
def test_a_stop_id_that_is_the_next_turns_header_stands_once(last: str | None, end: str):
    each = "{{ '<|' + m.role + '|>\n' + m.content }}{% if m.role == 'assistant' %}" + f"{{{{ {end!r} }}}}{{% endif %}}"
    template = f"{{% for m in messages %}}{each}{{% endfor %}}<|assistant|>"
    chat = ChatFormat(tokenizer_with(template, "</s>"), {})
    last_id = chat.tokenizer.convert_tokens_to_ids(last) if last else None
    ids = chat.increment([USER], last is not None, last_id)
    left = end if last is None else end.partition("<|end|>")[2] if last == "</s>" else ""
    assert "".join(chat.tokenizer.convert_ids_to_tokens(ids)) == left + HEADERS[last]


def test_an_end_that_stands_for_another_in_mid_conversation_stands_once():
    """Only the last message of gpt-oss's template ends by the token that a model ends its answers by."""
    ends = "<|end|>", "{% if loop.last and not add_generation_prompt %}<|eot|>{% else %}<|end|>{% endif %}"
    each = (
        f"<|start|>{{{{ m.role }}}}<|stop|>{{{{ m.content }}}}{{% if m.role == 'user' %}}{ends[0]}{{% else %}}{ends[1]}"
    )
    template = f"{{% for m in messages %}}{each}{{% endif %}}{{% endfor %}}" + "<|start|>assistant<|stop|>"
    chat = ChatFormat(tokenizer_with(template, "<|eot|>"), {})
    told = "<|start|>user<|stop|>ask<|end|><|start|>assistant<|stop|>"
    ids = [chat.increment([USER], stopped) for stopped in (True, False)]
    assert ["".join(chat.tokenizer.convert_ids_to_tokens(each)) for each in ids] == [told, f"<|end|>{told}"]
