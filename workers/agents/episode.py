"""Plays episodes: the policy and another side take turns, and every token is kept as it was sampled.

`Episode.play` is the whole of it, for training and validation. An episode is of an environment
(workers/agents/environment.py), of tools and a simulated user (extras/tools), or of a class of the user's.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from configs.errors import printable, users_line
from data.chat import ChatFormat
from data.padding import PromptIds, media_of
from data.seeding import derive_seed
from data.types import END_REASON_OF, Completion, Reply, Row, Sample, SamplingParams
from workers.engine_pump import AsyncEngine


class EpisodeFailed(Exception):
    """An episode cannot go on; `end_reason` says how: env_error, timeout or aborted."""

    def __init__(self, end_reason: str, text: str) -> None:
        super().__init__(text)
        self.end_reason = end_reason


@dataclass(frozen=True)
class Limits:
    """Most tokens of a response, of which a transcript is one, and of an answer in it."""

    response: int
    answer: int


@dataclass(frozen=True)
class Policy:
    """The policy as the episode of row `row` asks it, with draws of its own; the engine knows it as `episode`.

    `goes_on`: whether the prompt of a turn begins with the turn before, so that its keys and values are worth keeping.
    """

    pump: AsyncEngine
    sampling: SamplingParams
    seed: int
    row: int
    goes_on: bool
    episode: Hashable

    async def answer(
        self, prompt_ids: list[int], max_tokens: int, turn: int, sampling: SamplingParams | None = None
    ) -> Completion:
        """Answers a prompt by at most `max_tokens` tokens; no other request of the episode has the number `turn`."""
        sampling = replace(sampling or self.sampling, max_tokens=max_tokens)
        seed = derive_seed(self.seed, "row", self.row, "turn", turn)
        return await self.pump.complete(prompt_ids, sampling, seed, self.episode, self.goes_on)


class Episode(ABC):
    """The other side of the policy: an environment, tools, a simulated user.

    Attributes:
        prompt_ids: what the policy is shown first; known after `start`.
        columns: of its rows, before any answer; a reply's go over them.
    """

    prompt_ids: list[int]
    columns: Row

    def __init__(self, row: Row) -> None:
        self.prompt_ids, self.columns = row["raw_prompt_ids"], {}

    async def start(self) -> None:  # noqa: B027  (most have nothing to do)
        """Prepares the first prompt. May raise, as `step`."""

    @abstractmethod
    async def step(self, answer: str) -> Reply:
        """Replies to an answer, a text without special tokens (`Answer`, in data/chat.py, knows its tokens).
        May raise: the user's code is behind it."""

    async def finish(self) -> Reply:
        """Returns what the whole episode earns at its end, however it ended. May raise, as `step`."""
        return Reply()

    async def close(self) -> None:  # noqa: B027  (most hold nothing)
        """Gives back what the episode holds."""

    async def play(self, policy: Policy, chat: ChatFormat, limits: Limits) -> list[Sample]:
        """Plays the episode to its end, and returns its rows.

        If the other side raises, or hangs, it ends there for env_error or timeout, and as aborted if the engine gives a
        request up; nothing is learnt from its rows.

        Args:
            chat: encodes what is said to the policy, and decodes what it says.
        """
        samples, columns, turn, end_reason = [Sample(self.prompt_ids)], dict(self.columns), 0, None
        try:
            await or_episode_error(self.start())
            samples, columns = [Sample(self.prompt_ids)], dict(self.columns)
            while end_reason is None:
                sample = samples[-1]
                room = limits.response - len(sample.token_ids)
                so_far = PromptIds([*sample.prompt_ids, *sample.token_ids], media_of(sample.prompt_ids))
                completion = await policy.answer(so_far, min(room, limits.answer), turn)
                sample.extend(completion.token_ids, completion.log_probs, True, completion.weight_version, turn)
                reason = completion.finish_reason
                if reason == "aborted" or not completion.token_ids:  # no token, nothing that could earn a reward
                    outcome = "aborted" if reason == "aborted" else "answered without a token"
                    raise EpisodeFailed("aborted", f"the engine {outcome} the request of turn {turn}")
                reply = await or_episode_error(self.step(chat.text(completion.token_ids, reason == "stop")))
                sample.rewards[-1] += reply.reward
                columns |= reply.columns
                end_reason = reply.end_reason
                if end_reason is None and reply.prompt_ids is not None:
                    samples.append(Sample(reply.prompt_ids))
                elif end_reason is None and not reply.messages:
                    end_reason = end_of(reason, limits.response - len(sample.token_ids))
                elif end_reason is None:
                    observation = chat.increment(reply.messages, reason == "stop", completion.token_ids[-1])
                    end_reason = append_observation(sample, observation, limits, turn)
                turn += 1
            reply = await or_episode_error(self.finish())
            sample.rewards[-1] += reply.reward
            columns |= reply.columns
        except EpisodeFailed as failure:
            return finish_samples(samples, failure.end_reason, columns, turn, str(failure))
        return finish_samples(samples, end_reason, columns, turn)


class SingleAnswer(Episode):
    """A prompt that is answered once, among others that begin episodes."""

    async def step(self, answer: str) -> Reply:
        return Reply()


def end_of(finish_reason: str, room: int) -> str:
    """Returns the end reason of an episode by that of its last answer, behind which there is `room` for tokens."""
    return "answer_cut" if finish_reason == "length" and room > 0 else END_REASON_OF[finish_reason]


def append_observation(sample: Sample, token_ids: list[int], limits: Limits, turn: int) -> str | None:
    """Appends what the policy is told; if there is no room for that and an answer, returns the end reason instead."""
    if len(sample.token_ids) == limits.response:
        return "max_tokens"
    if len(sample.token_ids) + len(token_ids) >= limits.response:
        return "context_full"
    sample.extend(token_ids, None, policy=False, turn=turn)
    return None


async def or_episode_error(awaitable: Awaitable[Any]) -> Any:
    """Returns what an episode awaits; raises EpisodeFailed for whatever it raises."""
    try:
        return await awaitable
    except EpisodeFailed:
        raise
    except TimeoutError as error:
        raise EpisodeFailed("timeout", str(error)) from error
    except Exception as error:  # the boundary to the user's code: counted, shown, and never a reward of 0
        text, line = printable(f"{type(error).__name__}: {error}"), users_line(error)
        suffix = f" (at {line})" if line and "(at " not in text else ""
        raise EpisodeFailed("env_error", text + suffix) from error


def finish_samples(
    samples: list[Sample], end_reason: str, columns: Row, turns: int, failure: str | None = None
) -> list[Sample]:
    """Gives the rows of an episode that is over its end reason and its columns, and returns them."""
    for sample in samples:
        sample.end_reason = end_reason
        if failure is not None:
            sample.fail()
    total = float(sum(sum(sample.rewards) for sample in samples))
    for sample in samples:
        sample.extras = {**columns, "episode_return": total, "__num_turns__": turns, "failure": failure}
    return samples
