"""Answers the requests of one episode by the policy, and keeps the conversation as the rows that are trained on.

A request that begins with all messages of a row continues that row: the policy reads the ids that it has sampled, and
the chat template's text behind them. A request that leaves a row at an earlier answer begins a row of its own from the
ids up to there, and one with another history begins from the history that it claims; neither beginning is trained on.
Only the tokens that `_draw` appends, as the engine returned them, count as the policy's.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import eq
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import PreTrainedTokenizerBase

from configs.errors import notice_once
from data.chat import ChatFormat, tool_kwargs
from data.tool_parsers import ToolParser
from data.types import Completion, Message, Sample
from extras.server.app import TEMPLATE_ERRORS, chat_prompt, events, while_awaited
from extras.server.bodies import ChatBody, Part, ResponseBuilder, TokenText, read_piece, with_text
from workers.agents.episode import EpisodeFailed, Limits, Policy
from workers.engine_pump import EngineError

OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed")  # what draws depend on


@dataclass(frozen=True)
class Speech:
    """The policy's ways to read and write, whatever the session.

    Attributes:
        template: arguments of the chat template.
        width: most tokens of a row's prompt.
        encoder: the thread in which prompts are encoded.
    """

    tokenizer: PreTrainedTokenizerBase
    parser: ToolParser
    template: dict[str, Any]
    width: int
    encoder: Executor


@dataclass(frozen=True)
class End:
    """The end of an answer in a row: after so many messages and tokens; `stopped`: by a stop id."""

    messages: int
    tokens: int
    stopped: bool
    finish_reason: str


@dataclass(eq=False)
class Branch:
    """A row that grows: what was said in it, by `key_of`, and its tokens.

    Attributes:
        template: arguments of its chat template, tools among them.
        busy: whether a request is being answered in it.
    """

    template: dict[str, Any]
    sample: Sample
    keys: list[str] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    busy: bool = False

    @property
    def ids(self) -> list[int]:
        return [*self.sample.prompt_ids, *self.sample.token_ids]

    def last_end(self, keys: list[str]) -> End | None:
        """Finds the last answer up to which all messages agree with a request's; the request continues after it."""
        common = sum(takewhile(bool, map(eq, self.keys, keys)))
        return next((end for end in reversed(self.ends) if end.messages <= min(common, len(keys) - 1)), None)


class Session:
    """The policy as one episode's program asks it, from the event loop of the server.

    Attributes:
        rows: in the order of their last answers.
        requests: so far.
        refusal: of a request that had no room for an answer; `aborted`: what the engine did not answer.
        errors: the end of the program's stderr.
        reward: what the program has posted.
        over: is done when the episode is.
    """

    def __init__(self, policy: Policy, limits: Limits, loop: asyncio.AbstractEventLoop, speech: Speech) -> None:
        self.policy, self.limits, self.loop, self.speech = policy, limits, loop, speech
        self.rows: list[Branch] = []
        self.answers: set[str] = set()
        self.requests = self.waiting = self.claimed = self.unproven = 0
        self.refusal = self.aborted = ""
        self.errors = bytearray()
        self.reward: asyncio.Future[float | None] = asyncio.Future()
        self.over: asyncio.Future[None] = asyncio.Future()
        self.own_seconds = 0.0  # that the program had taken at `own_since`
        self.lost: Callable[[], float] = float  # seconds, so far, for which other programs have kept it from running
        self.restart_clock()

    @property
    def unproven_share(self) -> float:
        """Returns the share, in characters, of the requests' assistant messages that this session never answered."""
        return self.unproven / max(1, self.claimed)

    async def respond(self, body: ChatBody, request: Request) -> Response:
        """Answers a request, whole or as a stream, by the next turn of a row."""
        if (body.n or 1) > 1 or body.ignore_eos:
            raise HTTPException(400, f"n={body.n}, ignore_eos={body.ignore_eos}: a session has one answer a request")
        if changed := [name for name in OF_THE_RUN if vars(body)[name] is not None]:
            notice_once(f"a program sets {', '.join(changed)}: sessions sample as the run does, so that it learns.")
        form, part = await while_awaited(request, self._answer(body, chat_prompt(body)))
        if body.stream:
            return StreamingResponse(events(form, [alone(part)]), media_type="text/event-stream")
        return JSONResponse(form.whole([part]))

    async def in_time(self, work: asyncio.Future[Any], seconds: float, key: str) -> Any:
        """Returns the result of `work`, which may take `seconds` in which the policy answers nothing.

        Raises:
            EpisodeFailed: it took longer; `key` is the setting.
        """
        try:
            while not (await asyncio.wait([work], timeout=max(0.05, seconds - self._spent())))[0]:
                if self._spent() >= seconds:
                    raise EpisodeFailed("timeout", f"the program took more than {key}={seconds:g} seconds of its own")
        finally:
            work.cancel()
            await asyncio.wait([work], timeout=seconds)  # for its processes to be gone
        return work.result()

    @contextmanager
    def stopped_clock(self) -> Iterator[None]:
        """Leaves the seconds of the block out of the program's time."""
        self.own_seconds, self.waiting = self._spent(), self.waiting + 1
        try:
            yield
        finally:
            self.waiting -= 1
            self.restart_clock()

    def restart_clock(self) -> None:
        self.own_since = self._now()

    def _spent(self) -> float:
        """Returns the seconds that the program itself has taken."""
        return self.own_seconds + (0 if self.waiting else self._now() - self.own_since)

    def _now(self) -> float:
        return asyncio.get_running_loop().time() - self.lost()

    async def _answer(self, body: ChatBody, messages: list[Message]) -> tuple[ResponseBuilder, Part]:
        keys, template = [key_of(message) for message in messages], self._template(body)
        claims = [key for key, message in zip(keys, messages, strict=True) if message["role"] == "assistant"]
        self.claimed += sum(map(len, claims))
        self.unproven += sum(len(key) for key in claims if key not in self.answers)
        row, end = max(
            ((row, end) for row in self.rows if row.template == template and (end := row.last_end(keys))),
            key=lambda pair: (pair[1].messages, not pair[0].busy and pair[1] is pair[0].ends[-1]),
            default=(None, None),
        )
        goes_on = row is not None and not row.busy and end is row.ends[-1]
        branch = row if goes_on else Branch(template, Sample([]))
        branch.busy = True
        try:
            prompt = await self._encode(template, messages, (row.ids[: end.tokens], end) if row else None)
            if not goes_on or prompt[: end.tokens] != row.ids:
                branch.busy, branch = False, Branch(template, Sample(prompt[: self.speech.width]))
            return await self._draw(branch, prompt[len(branch.ids) :], keys, body)
        finally:
            branch.busy = False

    def _template(self, body: ChatBody) -> dict[str, Any]:
        tools = tool_kwargs(body.schemas, self.speech.parser, self.speech.tokenizer)
        return {**self.speech.template, **tools, **body.for_template}

    async def _encode(
        self, template: dict[str, Any], messages: list[Message], behind: tuple[list[int], End] | None
    ) -> list[int]:
        """Returns the ids of a prompt: `behind` the ids until an answer, if the template appends what follows it, or of
        all `messages`."""

        def encode() -> list[int]:
            chat = ChatFormat(self.speech.tokenizer, template)
            with suppress(ValueError, *TEMPLATE_ERRORS):
                if behind is not None:
                    ids, end = behind
                    return [*ids, *chat.increment(messages[end.messages :], end.stopped)]
            return chat.prompt_ids(messages)

        try:
            return await asyncio.get_running_loop().run_in_executor(self.speech.encoder, encode)
        except (ValueError, *TEMPLATE_ERRORS) as error:
            raise HTTPException(400, f"messages: the chat template refuses them: {error}") from error

    async def _draw(
        self, branch: Branch, context: list[int], keys: list[str], body: ChatBody
    ) -> tuple[ResponseBuilder, Part]:
        """Lets the policy read `context` in a row and answer it, and adds both to the row."""
        sample, tokenizer = branch.sample, self.speech.tokenizer
        room = self.limits.response - len(sample.token_ids) - len(context)
        prompt = [*branch.ids, *context]
        if room < 1:
            longest = len(sample.prompt_ids) + self.limits.response
            self.refusal = (
                f"messages: they have {len(prompt)} tokens, and the maximum context length is {longest} with an answer "
                "(context_length_exceeded): raise data.max_prompt_length or data.max_response_length"
            )
            raise HTTPException(400, self.refusal)
        turn, self.requests = self.requests, self.requests + 1
        sampling = self.policy.sampling
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *(body.stop_token_ids or ())))
        most = min(room, self.limits.answer, body.longest or room)
        done = await self._ask(self.policy.answer(prompt, most, turn, sampling))
        text = TokenText(tokenizer, body.stops)
        part = read_piece(text, done)
        length, version = len(part.token_ids), done.weight_version
        form = ResponseBuilder(body, [prompt], lambda token_id: tokenizer.decode([token_id]), self.speech.parser)
        answer = key_of(with_text({"role": "assistant", "content": part.text, **form.calls(part)}))
        before = sample.turns[-1] if sample.turns else turn
        sample.extend(context, None, policy=False, turn=before)
        version = version if isinstance(version, int) else version[:length]
        sample.extend(part.token_ids, part.log_probs, True, version, turn)
        stopped = done.finish_reason == "stop" and length == len(done.token_ids)
        branch.keys = [*keys, answer]
        branch.ends.append(End(len(branch.keys), len(branch.ids), stopped, part.finish_reason))
        self.answers.add(answer)
        self.rows = [*(row for row in self.rows if row is not branch), branch]
        return form, part

    async def _ask(self, work: Coroutine[Any, Any, Completion]) -> Completion:
        """Returns the result of `work` in the policy's event loop; raises EngineError if it is not an answer."""
        reply = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
        try:
            with self.stopped_clock():
                await asyncio.wait([reply, self.over], return_when=asyncio.FIRST_COMPLETED)
        finally:
            reply.cancel()
        if self.over.done():
            raise EngineError("the episode of this session is over")
        done = reply.result()
        if done.finish_reason == "aborted" or not done.token_ids:
            self.aborted = "the engine aborted a request" if done.token_ids else "the engine answered without a token"
            raise EngineError(self.aborted)
        return done


def key_of(message: Message) -> str:
    """Returns the key of a message: an assistant's content and calls only, as clients add other fields."""
    if message["role"] != "assistant":
        return json.dumps(message, sort_keys=True, ensure_ascii=False)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return json.dumps(["assistant", message.get("content") or "", calls], sort_keys=True, ensure_ascii=False)


async def alone(part: Part) -> AsyncIterator[Part]:
    yield part
