"""Answers the requests of one episode by the policy, and keeps the conversation as the rows that are trained on.

A request that begins with all messages up to an answer goes on from it: the policy reads the ids that it has sampled,
and the chat template's text behind them. One with another history begins from the history that it claims. When the
episode is over, its turns become rows: of those that go on from one answer the first stands in its row, and each other
in a row of its own, by their tokens and not by the clock. Only tokens of an answer, as the engine returned them, count
as the policy's, each in one row.
"""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, count
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from transformers import PreTrainedTokenizerBase

from configs.errors import notice_once
from data.chat import ChatFormat, encode_prompt
from data.seeding import derive_seed
from data.types import Completion, Message, Sample
from extras.server.app import TEMPLATE_ERRORS, chat_prompt, completion_prompts, events, while_awaited
from extras.server.bodies import ChatBody, CompletionBody, Part, ResponseBuilder, TokenText, read_piece, with_text
from extras.server.refusals import TooLong
from extras.tools.parsers import ToolParser, tool_kwargs
from extras.tools.shared_loop import Asked
from workers.agents.episode import EpisodeFailed, Limits, Policy
from workers.engine_pump import EngineError

OF_IDS = 0  # number of the turns that have no messages
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


@dataclass(eq=False)
class Turn:
    """Holds what the policy was told behind another turn, or first (`parent` None), and what it answered.

    Attributes:
        told: token ids; of those of a first turn, `start` are the prompt of its row.
        digest: of all that was told and answered so far.
        stopped: whether the answer ended by a stop id.
        round: of its request.
    """

    parent: "Turn | None"
    told: list[int]
    start: int
    part: Part
    version: int | list[int]
    is_trained: bool
    stopped: bool
    round: int

    def __post_init__(self) -> None:
        self.digest = derive_seed(self.parent.digest if self.parent else 0, *self.told, *self.part.token_ids)

    def chain(self) -> "list[Turn]":
        """Returns the turns of its conversation, up to this one."""
        turns = [self]
        while turns[-1].parent is not None:
            turns.append(turns[-1].parent)
        return turns[::-1]

    @property
    def ids(self) -> list[int]:
        return [token_id for turn in self.chain() for token_id in (*turn.told, *turn.part.token_ids)]


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
        turns: by all messages so far, as `_answer` numbers them.
        requests: so far; a round of them begins where none is under way.
        refusal: of a request that had no room for an answer, until one is answered; `is_full`: and that goes on.
        aborted: what the engine did not answer.
        errors: the end of the program's stderr.
        reward: what the program has posted.
        over: is done when the episode is.
    """

    def __init__(self, policy: Policy, limits: Limits, loop: asyncio.AbstractEventLoop, speech: Speech) -> None:
        self.policy, self.limits, self.loop, self.speech = policy, limits, loop, speech
        self.turns: defaultdict[int, list[Turn]] = defaultdict(list)
        self.claims: Counter[str] = Counter()  # what requests say that the policy has answered
        self.answers: set[str] = set()
        self.asked = Asked()
        self.under_way: set[asyncio.Task[Any]] = set()
        self.requests = self.rounds = self.waiting = 0
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
        sizes = {claim: times * len(claim) for claim, times in self.claims.items()}
        return sum(sizes[claim] for claim in sizes.keys() - self.answers) / max(1, sum(sizes.values()))

    def rows(self, last_is_scored: bool) -> list[list[Turn]]:
        """Returns the turns as rows, in an order that does not depend on which of several requests came first: by their
        tokens, a row before those that leave it. Those that teach nothing go before, and what the run scores to the
        end: the row that was answered last."""
        paths: dict[Turn, list[list[int]]] = {}
        for turn in chain.from_iterable(self.turns.values()):
            paths[turn] = [ids for each in turn.chain() for ids in (each.told, each.part.token_ids)]
        rows: list[list[Turn]] = []
        ends: defaultdict[int, list[list[Turn]]] = defaultdict(list)  # rows, by what they end with
        for turn in sorted(paths, key=lambda turn: (paths[turn], turn.is_trained)):
            of_parent = ends[turn.parent.digest] if turn.parent else []
            row = of_parent.pop() if of_parent else []
            rows += [] if row else [row]
            row.append(turn)
            ends[turn.digest].append(row)
        last = max(rows, key=lambda row: (teaches(row), row[-1].round, paths[row[-1]]), default=None)
        return sorted(rows, key=lambda row: (teaches(row), last_is_scored and row is last))

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
        self.claims.update(key for key, message in zip(keys, messages, strict=True) if message["role"] == "assistant")
        first = derive_seed(0, json.dumps(template, sort_keys=True, default=repr))
        numbers = [*accumulate(keys, derive_seed, initial=first)]  # of what begins with no message, with one, …
        size = next((size for size in range(len(keys) - 1, 0, -1) if numbers[size] in self.turns), 0)
        behind = max(self.turns[numbers[size]], key=lambda turn: turn.ids) if size else None
        prompt = await self._encode(template, messages, size, behind)
        goes_on = behind is not None and prompt[: len(behind.ids)] == behind.ids
        return await self._draw(prompt, behind if goes_on else None, numbers[-1], asking)

    async def _complete(self, asking: Asking) -> tuple[ResponseBuilder, Part]:
        """Answers a prompt without messages behind the turn of such prompts that it goes on from, id by id, or none."""
        body, tokenizer = asking.body, self.speech.tokenizer
        prompt, *more = completion_prompts(body) or [""]
        if more or body.echo or body.alternatives is not None:
            raise HTTPException(400, "prompt, echo, prompt_logprobs: a session answers one prompt, and scores none")
        ids = encode_prompt(prompt, tokenizer) if isinstance(prompt, str) else prompt
        if not ids or max(ids) >= len(tokenizer):
            raise HTTPException(400, f"prompt: it must have token ids, of those up to {len(tokenizer) - 1}")
        begins = (turn for turn in self.turns[OF_IDS] if turn.ids == ids[: len(turn.ids)] != ids)
        behind = max(begins, key=lambda turn: len(turn.ids), default=None)
        return await self._draw(ids, behind, OF_IDS, asking)

    def _template(self, body: ChatBody) -> dict[str, Any]:
        tools = tool_kwargs(body.tools or [], self.speech.parser, self.speech.tokenizer)
        return {**self.speech.template, **tools, **body.for_template}

    async def _encode(
        self, template: dict[str, Any], messages: list[Message], size: int, behind: Turn | None
    ) -> list[int]:
        """Returns the ids of a prompt: `behind` the turn of the first `size` messages, if the template appends what
        follows them, or of all `messages`."""

        def encode() -> list[int]:
            chat = ChatFormat(self.speech.tokenizer, template)
            with suppress(ValueError, *TEMPLATE_ERRORS):
                if behind is not None:
                    ids, calls = behind.ids, messages[size - 1].get("tool_calls", ())
                    return [*ids, *chat.increment(messages[size:], behind.stopped, ids[-1], calls)]
            return chat.prompt_ids(messages)

        try:
            return await asyncio.get_running_loop().run_in_executor(self.speech.encoder, encode)
        except (ValueError, *TEMPLATE_ERRORS) as error:
            raise HTTPException(400, f"messages: the chat template refuses them: {error}") from error

    async def _draw(
        self, prompt: list[int], behind: Turn | None, number: int, asking: Asking
    ) -> tuple[ResponseBuilder, Part]:
        """Lets the policy answer a prompt, and adds the turn to those of the messages `number` if the client is there.

        There is as much room for it as in the row that it goes on in, as others may go on from there too.
        """
        body, tokenizer = asking.body, self.speech.tokenizer
        start = behind.start if behind else min(len(prompt), self.speech.width)
        room = start + self.limits.response - len(prompt)
        if room < 1:
            self.refusal = (
                f"messages: they have {len(prompt)} tokens, and the maximum context length is {len(prompt) + room} "
                "with an answer (context_length_exceeded): raise data.max_prompt_length or data.max_response_length"
            )
            self.is_full |= behind is not None
            raise TooLong(400, self.refusal)
        self.requests += 1
        form = ResponseBuilder(body, [prompt], lambda token_id: tokenizer.decode([token_id]), self.speech.parser)
        asking.begun.set_result(form)
        sampling = self.policy.sampling
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *(body.stop_token_ids or ())))
        most = min(room, self.limits.answer, body.longest or room)
        draw = self.asked.number(prompt, most, body.train is not False, *body.stops, *sampling.stop_token_ids)
        work = self.policy.answer(prompt, most, draw, sampling)
        done, _ = await asyncio.gather(self._ask(work), asyncio.sleep(LEAVE_SECONDS if body.stream else 0))
        part = read_piece(TokenText(tokenizer, body.stops), done)
        if await asking.request.is_disconnected() or self.over.done():
            return form, part  # to nobody
        answer = key_of(with_text({"role": "assistant", "content": part.text, **form.calls(part)}))
        ends_turn = done.token_ids[-1] in self.policy.pump.engine.all_stop_ids(self.policy.sampling)
        stopped = done.finish_reason == "stop" and len(part.token_ids) == len(done.token_ids) and ends_turn
        context, version = prompt[len(behind.ids) if behind else 0 :], done.weight_version
        version = version if isinstance(version, int) else version[: len(part.token_ids)]
        turn = Turn(behind, context, start, part, version, body.train is not False, stopped, asking.round)
        self.turns[derive_seed(number, answer) if number else OF_IDS].append(turn)
        self.answers.add(answer)
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


def teaches(row: list[Turn]) -> bool:
    return any(turn.is_trained for turn in row)


def samples_of(rows: list[list[Turn]]) -> list[Sample]:
    """Returns rows as samples; what stands before the first turn of one is context, and turns are numbered through."""
    samples, numbers = [], count()
    for row in rows:
        first = row[0]
        opening = [*(first.parent.ids if first.parent else ()), *first.told]
        sample = Sample(opening[: first.start])
        for turn, number in zip(row, numbers):  # noqa: B905  (numbers never end)
            part, context = turn.part, opening[first.start :] if turn is first else turn.told
            sample.extend(context, None, policy=False, turn=sample.turns[-1] if sample.turns else number)
            log_probs = part.log_probs if turn.is_trained else None
            sample.extend(part.token_ids, log_probs, turn.is_trained, turn.version, number)
        samples.append(sample)
    return samples


def key_of(message: Message) -> str:
    """Returns the key of a message: an assistant's content and calls only, as clients add other fields."""
    if message["role"] != "assistant":
        return json.dumps(message, sort_keys=True, ensure_ascii=False)
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return json.dumps(["assistant", message.get("content") or "", calls], sort_keys=True, ensure_ascii=False)


async def alone(work: asyncio.Future[tuple[ResponseBuilder, Part]]) -> AsyncIterator[Part]:
    yield (await work)[1]
