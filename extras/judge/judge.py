"""A reward by another model's judgement: an OpenAI-compatible API is asked how good a response is.

    reward.custom_reward_function={path: extras.judge.judge, name: judge, reward_kwargs: {base_url: "http://127.0.0.1:8000"}}

Any server will do: a service, vLLM's, SGLang's, or `python -m extras.server`, which serves any engine of ours.
An answer without a grade is not a score: the row counts as one that could not be scored (reward.on_failure).
"""

import hashlib
import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from aiohttp import ClientSession

from configs.process import read_key
from extras.http.http import Json, RequestRefused, api_root, ask, open_session

TEMPLATE = """You grade an answer.

The task:
{prompt}

The answer:
{response}
{reference}
Think briefly, then end with one line, Score: and a number from 0 (useless) to 10 (perfect)."""
REFERENCE = "\nWhat is right:\n{ground_truth}\n"
PLACEHOLDER = re.compile(r"\{(prompt|response|ground_truth|reference)\}")
GRADE = r"Score:\s*\**\s*(-?\d+(?:\.\d+)?)"
MAX_MESSAGE = 300  # characters of a server's answer that are passed on
REMEDIES = {  # by the status of a refusal
    401: "Name the variable with the key in reward_kwargs.api_key_env.",
    403: "Name the variable with the right key in reward_kwargs.api_key_env.",
    404: "Look at reward_kwargs.base_url and reward_kwargs.model.",
}

only_models: dict[str, str] = {}  # by address: the one model of a server


async def judge(
    prompt: str,
    response: str,
    ground_truth: str | None = None,
    *,
    base_url: str,
    model: str | None = None,
    api_key_env: str | None = None,
    template: str = TEMPLATE,
    pattern: str = GRADE,
    worst: float = 0.0,
    best: float = 10.0,
    temperature: float = 0.0,
    max_tokens: int = 512,
    retries: int = 5,
    cache: str | None = None,
) -> dict[str, Any]:
    """Returns the grade of a response as a score from 0 to 1, and the judge's answer.

    Args:
        base_url: the API's address, with or without /v1 at the end.
        model: its name on the server; None: the server's only one.
        api_key_env: the environment variable that holds the key; None: no key is sent.
        template: the question, or a file with it, in which {prompt}, {response} and {ground_truth} are filled in;
            {reference} is a paragraph with the ground truth where a row has one.
        pattern: a regular expression with one group, the grade; the last match counts.
        worst, best: the grades that are scored 0 and 1.
        retries: after a failure of the server or the network, each after twice the time.
        cache: a file that keeps the answers by the requests, for later runs too; None: no answer is kept.

    Raises:
        ValueError: the server refuses the question, or its answer has no grade between worst and best.
        ConnectionError: it cannot be reached, or fails each time.
    """
    url = f"{api_root(base_url)}/v1"
    question = fill_template(read_template(template), prompt, response, ground_truth)
    key = read_key({"api_key_env": api_key_env}, "reward_kwargs")
    async with await open_session(key) as session:  # reward.timeout limits it
        if model is None:
            model = await only_model(session, url, retries)
        messages = [{"role": "user", "content": question}]
        body = {"model": model, "messages": messages, "temperature": temperature, "max_tokens": max_tokens}
        digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        cached = recall(cache, digest)
        answer = cached or read_answer(await ask_judge(session, "POST", f"{url}/chat/completions", body, retries), url)
    score = (read_grade(answer, pattern, worst, best) - worst) / (best - worst)
    if cached is None:
        remember(cache, digest, answer)
    return {"score": score, "judge_said": answer}


def read_template(template: str) -> str:
    """Reads the template, from a file if it names one. Raises ValueError if it has no place for the response."""
    named = "\n" not in template and Path(template).suffix in (".txt", ".md", ".j2")
    text = Path(template).read_text() if named else template
    if "{response}" not in text:
        raise ValueError(f"reward_kwargs.template={template!r} has no {{response}}: the judge would not see it.")
    return text


def fill_template(template: str, prompt: str, response: str, ground_truth: str | None) -> str:
    """Fills in the template in one pass: placeholders in the inserted texts stay as they are."""
    texts = {"prompt": prompt, "response": response, "ground_truth": "", "reference": ""}
    if ground_truth is not None:
        texts["ground_truth"] = str(ground_truth)
        texts["reference"] = REFERENCE.replace("{ground_truth}", str(ground_truth))
    return PLACEHOLDER.sub(lambda match: texts[match[1]], template)


def read_grade(answer: str, pattern: str, worst: float, best: float) -> float:
    """Returns the last grade in an answer. Raises ValueError if it is missing, or not between worst and best."""
    grades = re.findall(pattern, answer)
    if not grades:
        raise ValueError(f"the judge's answer has no grade ({pattern!r} finds none): …{answer[-MAX_MESSAGE:]!r}")
    if not worst <= float(grades[-1]) <= best:
        raise ValueError(f"the judge's grade {grades[-1]} is not from {worst:g} to {best:g}")
    return float(grades[-1])


def read_answer(answer: Json, url: str) -> str:
    """Returns the text of an answer. Raises ValueError if there is none."""
    match answer:
        case {"choices": [{"message": {"content": str(text)}}, *_]}:
            return text
    raise ValueError(f"{url}/chat/completions gave no choices[0].message.content: {str(answer)[:MAX_MESSAGE]}")


async def only_model(session: ClientSession, url: str, retries: int) -> str:
    """Returns the name of the server's model. Raises ValueError if it has none, or several."""
    if url not in only_models:
        listed = (await ask_judge(session, "GET", f"{url}/models", None, retries)).get("data", [])
        names = [card["id"] for card in listed]
        if len(names) != 1:
            raise ValueError(f"{url} has the models {', '.join(names)}: choose one in reward_kwargs.model.")
        only_models[url] = names[0]
    return only_models[url]


async def ask_judge(session: ClientSession, method: str, url: str, body: Json | None, retries: int) -> Json:
    """Calls `ask`, and names a remedy where the judge refuses."""
    try:
        return await ask(session, method, url, body, retries=retries, setting="reward_kwargs.base_url")
    except RequestRefused as error:
        if error.status is None:
            raise
        raise ValueError(f"{error}. {REMEDIES.get(error.status, 'Look at reward_kwargs.')}") from error


def recall(cache: str | None, key: str) -> str | None:
    """Returns the answer that was kept under `key`, or None."""
    if cache is None or not Path(cache).exists():
        return None
    with closing(open_cache(cache)) as answers:
        row = answers.execute("select said from answers where question = ?", (key,)).fetchone()
    return row and row[0]


def remember(cache: str | None, key: str, answer: str) -> None:
    """Keeps an answer; several processes may do so at once."""
    if cache is not None:
        with closing(open_cache(cache)) as answers, answers:
            answers.execute("insert or replace into answers values (?, ?)", (key, answer))


def open_cache(cache: str) -> sqlite3.Connection:
    Path(cache).parent.mkdir(parents=True, exist_ok=True)
    answers = sqlite3.connect(cache, timeout=60)  # seconds to wait for another process that writes
    answers.execute("create table if not exists answers (question text primary key, said text)")
    return answers
