"""A teacher behind a server that answers /v1/completions with log-probs of the prompt: vLLM's, or extras/server."""

import asyncio
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from configs.errors import ConfigError
from configs.schema import Config
from data.concurrency import run_in_background
from data.protocol import DataProto
from extras.distillation.settings import ONE_TOKEN, TOP_COLUMNS, Teacher
from extras.http.http import api_root, ask, ask_once, open_session

AT_ONCE = 64  # rows that a worker asks about
PROBE = "What is 7 times 6? It is 42."

Scored = dict[str, dict[str, Any]] | None  # of a token of the prompt: by id, logprob, rank and decoded_token


class ServerTeacher:
    """Scores by a server; `topk`: tokens of each place, the likeliest; None: the sampled one."""

    def __init__(self, settings: Teacher, topk: int | None) -> None:
        self.settings, self.topk = settings, topk
        self.url, self.model = api_root(settings.base_url), settings.model

    def score(self, batch: DataProto) -> DataProto:
        scored = run_in_background(self.ask_all(batch)) if len(batch) else []
        shape = batch.batch["responses"].shape
        if self.topk is None:
            columns = {ONE_TOKEN[0]: torch.zeros(shape)}
        else:
            shape = (*shape, self.topk)
            columns = dict(zip(TOP_COLUMNS, (torch.zeros(shape), torch.zeros(shape, dtype=torch.long)), strict=True))
        for row, tokens in enumerate(scored):
            self.lay_out(tokens, batch, row, columns)
        return DataProto.from_dict(columns)

    def lay_out(self, tokens: list[Scored], batch: DataProto, row: int, columns: dict[str, Tensor]) -> None:
        """Writes what the server says of a row's `tokens` to the places that the policy filled."""
        attended = batch.batch["attention_mask"][row].bool()
        first = batch.batch["input_ids"].shape[1] - batch.batch["responses"].shape[1]
        places = attended.cumsum(0) - 1  # of columns, among the tokens
        for column in batch.batch["response_mask"][row].nonzero()[:, 0].tolist():
            entry = tokens[places[first + column]]
            if self.topk is None:
                token = str(batch.batch["responses"][row, column].item())
                columns[ONE_TOKEN[0]][row, column] = entry[token]["logprob"]
                continue
            likeliest = sorted(entry.items(), key=lambda item: -item[1]["logprob"])[: self.topk]
            columns[TOP_COLUMNS[0]][row, column] = torch.tensor([candidate["logprob"] for _, candidate in likeliest])
            columns[TOP_COLUMNS[1]][row, column] = torch.tensor([int(token) for token, _ in likeliest])

    async def ask_all(self, batch: DataProto) -> list[list[Scored]]:
        ids, masks = batch.batch["input_ids"], batch.batch["attention_mask"].bool()
        async with await open_session(self.settings.api_key, self.settings.timeout, AT_ONCE) as session:
            if self.model is None:
                self.model = (await ask(session, "GET", f"{self.url}/v1/models"))["data"][0]["id"]
            bodies = [self.body(self.model, row[mask].tolist()) for row, mask in zip(ids, masks, strict=True)]
            answers = (ask(session, "POST", f"{self.url}/v1/completions", body) for body in bodies)
            return [answer["choices"][0]["prompt_logprobs"] for answer in await asyncio.gather(*answers)]

    def body(self, model: str, prompt: list[int]) -> dict[str, Any]:
        return {"model": model, "prompt": prompt, "max_tokens": 1, "prompt_logprobs": self.topk or 0}


def check_server(teacher: Teacher, key: str, tokenizer: PreTrainedTokenizerBase, config: Config) -> None:
    """Raises ConfigError if the server at `key`.base_url has no such model, takes too short sequences, gives no
    log-probs of a prompt, or reads token ids as other texts than the policy."""
    url, longest = api_root(teacher.base_url), config.data.max_prompt_length + config.data.max_response_length

    def get(method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        named = {"setting": f"{key}.base_url", "retries": 1}
        return run_in_background(ask_once(method, url + path, body, teacher.api_key, teacher.timeout, **named))

    cards = {card["id"]: card for card in get("GET", "/v1/models").get("data", [])}
    name = teacher.model or (next(iter(cards)) if len(cards) == 1 else None)
    if name not in cards:
        raise ConfigError(f"{key}.model={name}: {url} has the models {', '.join(cards)}. Choose one of them.")
    room = cards[name].get("max_model_len")
    if room is not None and room < longest + 1:
        raise ConfigError(
            f"{key}: {url} takes sequences of {room} tokens; prompt, response and one token more are {longest + 1}: "
            "start it with a larger --max-model-len, or lower data.max_response_length."
        )
    scorer = ServerTeacher(teacher, config.distillation.distillation_loss.scored_topk)
    ids = tokenizer.encode(PROBE, add_special_tokens=False)
    match get("POST", "/v1/completions", scorer.body(name, ids)):
        case {"choices": [{"prompt_logprobs": [None, *scored]}]} if len(scored) == len(ids) - 1:
            pass
        case _:
            raise ConfigError(f"{key}: {url} answers /v1/completions without prompt_logprobs of each token: use vLLM.")
    for token, entry in zip(ids[1:], scored, strict=True):
        text = entry.get(str(token), {}).get("decoded_token")
        if text != tokenizer.decode([token]):
            raise ConfigError(
                f"{key}: token {token} is {tokenizer.decode([token])!r} to the policy and {text!r} to {url}: a teacher "
                "has the policy's tokenizer."
            )
        if scorer.topk and len(entry) < scorer.topk:
            raise ConfigError(
                f"{key}: {url} gives {len(entry)} tokens a place, and topk={scorer.topk}: start it with "
                f"--max-logprobs {scorer.topk}."
            )
