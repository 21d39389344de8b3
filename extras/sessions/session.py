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
from data.chat import ChatFormat, encode_prompt, tool_kwargs
from data.tool_parsers import ToolParser
from data.types import Completion, Message, Sample
from extras.server.app import TEMPLATE_ERRORS, chat_prompt, completion_prompts, events, while_awaited
from extras.server.bodies import ChatBody, CompletionBody, Part, ResponseBuilder, TokenText, read_piece, with_text
from extras.server.refusals import TooLong
from workers.agents.episode import Asked, EpisodeFailed, Limits, Policy
from workers.engine_pump import EngineError

OF_IDS = {"prompt": "as ids"}  # stands for the template of rows that have none
OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed")  # what draws depend on
LEAVE_SECONDS = 0.05  # between the first chunk of a stream and the next, for a client that leaves at the first


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
        busy: whether a request is being answered in it; `forks`: and another came that goes on from the same end.
        rounds: of its first and of its last answer.
    """

    template: dict[str, Any]
    sample: Sample
    keys: list[str] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    busy: bool = False
    forks: bool = False
    rounds: tuple[int, int] = (0, 0)

    @property
    def ids(self) -> list[int]:
        return [*self.sample.prompt_ids, *self.sample.token_ids]

    @property
    def teaches(self) -> bool:
        return any(self.sample.policy_mask)

    def last_end(self, keys: list[str]) -> End | None:
        """Finds the last answer up to which all messages agree with a request's; the request continues after it."""
        common = sum(takewhile(bool, map(eq, self.keys, keys)))
        return next((end for end in reversed(self.ends) if end.messages <= min(common, len(keys) - 1)), None)


@dataclass(eq=False)
class Asking:
    """A request under way; `begun` is done when the policy is asked, with what writes the answer."""

    body: ChatBody | CompletionBody
    request: Request
    round: int
    begun: asyncio.Future[ResponseBuilder] = field(default_factory=asyncio.Future)


class Session:
    """The policy as one episode's program asks it, from the event loop of the server.

    Attributes:
        rows: in the order of their last answers.
        requests: so far; a round of them begins where none is under way.
        refusal: of a request that had no room for an answer, until one is answered; `is_full`: and whose row goes on.
        aborted: what the engine did not answer.
        errors: the end of the program's stderr.
        reward: what the program has posted.
        over: is done when the episode is.
    """

    def __init__(self, policy: Policy, limits: Limits, loop: asyncio.AbstractEventLoop, speech: Speech) -> None:
        self.policy, self.limits, self.loop, self.speech = policy, limits, loop, speech
        self.rows: list[Branch] = []
        self.answers: set[str] = set()
        self.asked = Asked()
        self.under_way: set[asyncio.Task[Any]] = set()
        self.requests = self.rounds = self.waiting = self.claimed = self.unproven = 0
        self.refusal = self.aborted = ""
        self.is_full = False
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

    def in_order(self, last_is_scored: bool) -> list[Branch]:
        """Lists the rows by the rounds in which they began, and by ids, so that the order does not depend on which of
        several requests came first; those that teach nothing go before, and what the run scores to the end."""
        last = max(self.rows, key=lambda row: (row.teaches, row.rounds[::-1], row.ids), default=None)
        rows = sorted(self.rows, key=lambda row: (row.teaches, last_is_scored and row is last, row.rounds[0], row.ids))
        numbers: dict[int, int] = {}
        for row in rows:
            row.sample.turns = [numbers.setdefault(turn, len(numbers)) for turn in row.sample.turns]
        return rows

    async def respond(self, body: ChatBody | CompletionBody, request: Request) -> Response:
        """Answers a request, whole or as a stream, by the next turn of a row."""
        if (body.n or 1) > 1 or body.ignore_eos:
            name = f"n={body.n}" if (body.n or 1) > 1 else "ignore_eos=true"
            raise HTTPException(400, f"{name}: a session gives one answer a request, which ends as the policy ends it")
        if changed := [name for name in OF_THE_RUN if vars(body)[name] is not None]:
            notice_once(f"a program sets {', '.join(changed)}: sessions sample as the run does, so that it learns.")
        self.rounds += not self.under_way
        asking = Asking(body, request, self.rounds)
        work = asyncio.ensure_future(self._answer(asking) if isinstance(body, ChatBody) else self._complete(asking))
        self.under_way.add(work)
        work.add_done_callback(self.under_way.discard)
        if body.stream:
            await asyncio.wait([work, asking.begun], return_when=asyncio.FIRST_COMPLETED)
            if asking.begun.done():  # a stream begins before its answer, so that a client can leave it meanwhile
                return StreamingResponse(events(asking.begun.result(), [alone(work)]), media_type="text/event-stream")
        form, part = await while_awaited(request, work)
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

    async def _answer(self, asking: Asking) -> tuple[ResponseBuilder, Part]:
        messages = chat_prompt(asking.body)
        keys, template = [key_of(message) for message in messages], self._template(asking.body)
        claims = [key for key, message in zip(keys, messages, strict=True) if message["role"] == "assistant"]
        self.claimed += sum(map(len, claims))
        self.unproven += sum(len(key) for key in claims if key not in self.answers)
        row, end = max(
            ((row, end) for row in self.rows if row.template == template and (end := row.last_end(keys))),
            key=lambda pair: (pair[1].messages, not pair[0].busy and pair[1] is pair[0].ends[-1]),
            default=(None, None),
        )
        is_end = row is not None and end is row.ends[-1]
        if is_end:
            row.forks = row.busy
        goes_on = is_end and not row.busy
        branch = row if goes_on else Branch(template, Sample([]))
        branch.busy = True
        try:
            prompt = await self._encode(template, messages, (row.ids[: end.tokens], end) if row else None)
            if not goes_on or prompt[: end.tokens] != row.ids:
                branch.busy, branch = False, Branch(template, Sample(prompt[: self.speech.width]))
            return await self._draw(branch, prompt[len(branch.ids) :], keys, asking)
        finally:
            branch.busy = False

    async def _complete(self, asking: Asking) -> tuple[ResponseBuilder, Part]:
        """Answers a prompt without messages in the row of such prompts that it goes on from, id by id, or a new one."""
        body, tokenizer = asking.body, self.speech.tokenizer
        prompt, *more = completion_prompts(body) or [""]
        if more or body.echo or body.alternatives is not None:
            raise HTTPException(400, "prompt, echo, prompt_logprobs: a session answers one prompt, and scores none")
        ids = encode_prompt(prompt, tokenizer) if isinstance(prompt, str) else prompt
        if not ids or max(ids) >= len(tokenizer):
            raise HTTPException(400, f"prompt: it must have token ids, of those up to {len(tokenizer) - 1}")
        rows = [row for row in self.rows if row.template == OF_IDS and row.ids == ids[: len(row.ids)]]
        row = max(rows, key=lambda row: len(row.ids), default=None)
        if row is not None:
            row.forks = row.busy
        branch = Branch(OF_IDS, Sample(ids[: self.speech.width])) if row is None or row.busy else row
        branch.busy = True
        try:
            return await self._draw(branch, ids[len(branch.ids) :], [], asking)
        finally:
            branch.busy = False

    def _template(self, body: ChatBody) -> dict[str, Any]:
        tools = tool_kwargs(body.tools or [], self.speech.parser, self.speech.tokenizer)
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
                    calls = messages[end.messages - 1].get("tool_calls", ())
                    return [*ids, *chat.increment(messages[end.messages :], end.stopped, ids[-1], calls)]
            return chat.prompt_ids(messages)

        try:
            return await asyncio.get_running_loop().run_in_executor(self.speech.encoder, encode)
        except (ValueError, *TEMPLATE_ERRORS) as error:
            raise HTTPException(400, f"messages: the chat template refuses them: {error}") from error

    async def _draw(
        self, branch: Branch, context: list[int], keys: list[str], asking: Asking
    ) -> tuple[ResponseBuilder, Part]:
        """Lets the policy read `context` in a row and answer it, and adds both to the row if the client is there."""
        body, tokenizer = asking.body, self.speech.tokenizer
        room = self.limits.response - len(branch.sample.token_ids) - len(context)
        prompt = [*branch.ids, *context]
        if room < 1:
            longest = len(branch.sample.prompt_ids) + self.limits.response
            self.refusal = (
                f"messages: they have {len(prompt)} tokens, and the maximum context length is {longest} with an answer "
                "(context_length_exceeded): raise data.max_prompt_length or data.max_response_length"
            )
            self.is_full |= bool(branch.ends)
            raise TooLong(400, self.refusal)
        turn, self.requests = self.requests, self.requests + 1
        form = ResponseBuilder(body, [prompt], lambda token_id: tokenizer.decode([token_id]), self.speech.parser)
        asking.begun.set_result(form)
        sampling = self.policy.sampling
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *(body.stop_token_ids or ())))
        most = min(room, self.limits.answer, body.longest or room)
        work = self.policy.answer(prompt, most, self.asked.number(prompt), sampling)
        done, _ = await asyncio.gather(self._ask(work), asyncio.sleep(LEAVE_SECONDS if body.stream else 0))
        part = read_piece(TokenText(tokenizer, body.stops), done)
        if await asking.request.is_disconnected() or self.over.done():
            return form, part  # to nobody
        if branch.forks:  # each of those that go on from one end at once has a row, whichever came first
            branch, context = Branch(branch.template, Sample(prompt[: self.speech.width])), prompt[self.speech.width :]
        answer = key_of(with_text({"role": "assistant", "content": part.text, **form.calls(part)}))
        ends_turn = done.token_ids[-1] in self.policy.pump.engine.all_stop_ids(self.policy.sampling)
        stopped = done.finish_reason == "stop" and len(part.token_ids) == len(done.token_ids) and ends_turn
        sample, version, is_trained = branch.sample, done.weight_version, body.train is not False
        sample.extend(context, None, policy=False, turn=sample.turns[-1] if sample.turns else turn)
        version = version if isinstance(version, int) else version[: len(part.token_ids)]
        sample.extend(part.token_ids, part.log_probs if is_trained else None, is_trained, version, turn)
        branch.keys, branch.rounds = [*keys, answer], (branch.rounds[0] or asking.round, asking.round)
        branch.ends.append(End(len(branch.keys), len(branch.ids), stopped, part.finish_reason))
        self.answers.add(answer)
        self.rows = [*(row for row in self.rows if row is not branch), branch]
        self.refusal, self.is_full = "", False
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


async def alone(work: asyncio.Future[tuple[ResponseBuilder, Part]]) -> AsyncIterator[Part]:
    yield (await work)[1]
