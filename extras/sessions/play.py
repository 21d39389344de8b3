"""Plays episodes by a program: a command, or a function, that asks the policy as a client of OpenAI's API.

It gets its row and a base_url, and returns its reward by a POST, its last line or its return value; without one, the
run's reward scores the last row.
"""

import asyncio
import os
import shlex
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from weakref import finalize

from configs.errors import ConfigError, notice_once
from configs.import_utils import bind, load_named
from configs.schema import AgentConfig, Config
from data.chat import ChatFormat, as_messages
from data.types import Row, Sample, check_reward
from extras.server.app import TEMPLATE_ERRORS
from extras.server.bodies import Json
from extras.sessions.host import Host, Running, host_of, last_lines, program_environment
from extras.sessions.session import Session, Speech, samples_of, teaches
from extras.sessions.settings import FUNCTION
from extras.tools.parsers import ToolParser, read_json
from extras.tools.shared_loop import Agent, SharedCall, UsersEpisode, slots
from training.environment import AGENT_KEY, PROGRAM
from training.episode_rows import LOOP_SCORE
from workers.agents.episode import EpisodeFailed, Limits, Policy, end_of, finish_samples, or_episode_error
from workers.agents.user_code import in_thread

KEY = f"{AGENT_KEY}.program"


class Program(Agent):
    """The program of a run: `cls` is a function, or the words of a command. Its episodes are of the kind `program`."""

    kind = "program"

    def __post_init__(self) -> None:
        self.blocks = False
        self.speech: Speech | None = None  # of the first episode, and so of all
        self.serving: Running | None = None
        self.starting = asyncio.Lock()
        self.started: list[Running] = []  # that serve, or have tasks from when they did
        finalize(self, end_all, self.started)

    async def play(self, host: Host, task: Json, session: Session) -> float | None:
        """Plays an episode in the loop of `host`; returns the program's reward, if any."""
        if callable(self.cls):
            call = bind(self.cls, {**task, "row": task}, key=KEY)
            if asyncio.iscoroutinefunction(self.cls):
                playing = SharedCall(self, call())
                session.lost = playing.lost_seconds
                return reward_in(await asyncio.wrap_future(playing.future), session)
        elif self.settings["serves"]:
            return await self._serve(host, task, session)
        with session.stopped_clock():
            await slots(KEY).acquire()  # each has a process, or a thread
        try:
            return reward_in(await (in_thread(call) if callable(self.cls) else self._run(host, task, session)), session)
        finally:
            slots(KEY).release()

    async def _run(self, host: Host, task: Json, session: Session) -> Any:
        running = await Running.start(host, self.cls, task, self.settings["fenced"])
        session.errors = running.errors
        try:
            running.tell(task)
            running.process.stdin.close()
            await running.ending
            running.check_status()
            line = read_json(text := running.last_line())
            if text.startswith("{") and not isinstance(line, dict):
                raise ValueError(f"its last line begins like JSON and is none: {text[:200]}")
            return line if isinstance(line, int | float) or (isinstance(line, dict) and "reward" in line) else None
        finally:
            running.end()

    async def _serve(self, host: Host, task: Json, session: Session) -> float | None:
        """Has the process that serves play an episode; where it takes too long, later ones get another process."""
        async with self.starting:
            if self.serving is None or self.serving.is_over:
                self.serving = await Running.start(host, self.cls, task, self.settings["fenced"])
                self.started.append(self.serving)
        running = self.serving
        session.errors = running.errors
        running.sessions.add(session)
        running.tell(task)
        try:
            await asyncio.wait([running.ending, session.reward], return_when=asyncio.FIRST_COMPLETED)
            if session.reward.done():
                return session.reward.result()
            running.check_status()
            raise RuntimeError(f"it ended without a reward; its last line: {last_lines(running.output, 1) or 'none'}")
        except asyncio.CancelledError:
            self.serving = None if self.serving is running else self.serving
            raise
        finally:
            running.sessions.remove(session)
            for waiting in running.sessions:  # for this one to end, as far as is known
                if not waiting.requests:
                    waiting.restart_clock()
            if running is not self.serving and not running.sessions:
                running.end()
                self.started.remove(running)


class ProgramEpisode(UsersEpisode):
    """An episode that a program plays whole."""

    def __init__(self, row: Row, agent: Program, config: Config, chat: ChatFormat) -> None:
        super().__init__(row, agent, config, chat)
        self.rollout = rollout = config.actor_rollout_ref.rollout
        if agent.speech is None:
            parser = ToolParser.get_tool_parser(rollout.multi_turn.format, chat.tokenizer)
            template, encoder = dict(config.data.apply_chat_template_kwargs), ThreadPoolExecutor(1, "encoder")
            agent.speech = Speech(chat.tokenizer, parser, template, rollout.prompt_length, encoder)
            try:
                with suppress(*TEMPLATE_ERRORS):
                    ChatFormat(chat.tokenizer, template).check_keeps_thoughts("user")
            except ValueError as error:  # of Qwen 3's template
                notice_once(f"{str(error).partition(': ')[0]}; in a session they stay in view, unlike on servers.")

    async def play(self, policy: Policy, chat: ChatFormat, limits: Limits) -> list[Sample]:
        host = host_of(os.getpid())
        playing = self._play(host, policy, limits, asyncio.get_running_loop())
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(playing, host.loop))

    async def _play(self, host: Host, policy: Policy, limits: Limits, loop: asyncio.AbstractEventLoop) -> list[Sample]:
        session, reward, failure = Session(policy, limits, loop, self.agent.speech), None, None
        try:
            with host.open(session) as address:
                work = asyncio.ensure_future(self.agent.play(host, self._task() | address, session))
                seconds = self.rollout.agent.program_timeout
                reward = await or_episode_error(session.in_time(work, seconds, f"{KEY}_timeout"))
        except EpisodeFailed as error:
            failure = error
            if error.end_reason == "env_error" and session.reward.done():
                notice_once(f"a program failed after it had posted a reward, which counts: {error}", "posted")
                reward, failure = session.reward.result(), None
        if failure is None and not any(map(teaches, session.turns.values())):
            nothing = "it ended without asking the policy at base_url for an answer to learn from"
            failure = EpisodeFailed("env_error", session.refusal or nothing)
        return self._rows(session, reward, failure)

    def _task(self) -> Json:
        """Returns the row in the form that a program gets."""
        row = {name: value for name, value in self.row.items() if not name.startswith("raw_prompt")}
        return {"messages": as_messages(self.row.get("raw_prompt")), **row}

    def _rows(self, session: Session, reward: float | None, failure: EpisodeFailed | None) -> list[Sample]:
        """Returns the rows of an episode that is over. If its program failed because the context was full, the reward
        is the posted one, or 0."""
        rows = session.rows(reward is None)
        samples = samples_of(rows) or [Sample(self.prompt_ids)]
        if session.aborted:
            failure = EpisodeFailed("aborted", session.aborted)
        if failure is not None and not (session.is_full and failure.end_reason == "env_error"):
            last = last_lines(session.errors, 3) if failure.end_reason == "timeout" else ""
            text = f"{KEY}={self.rollout.agent.program}: {failure}{last and f'; its last lines: {last}'}"
            return finish_samples(samples, failure.end_reason, {LOOP_SCORE: 0.0}, session.requests, text)
        end = end_of(rows[-1][-1].part.finish_reason, session.limits.response - len(samples[-1].token_ids))
        reason = "context_full" if session.is_full else end
        metrics = {"unproven": session.unproven_share, "rows": len(samples)}
        finish_samples(samples, reason, {"__agent_metrics__": metrics, LOOP_SCORE: 0.0}, session.requests)
        samples[-1].extras[LOOP_SCORE] = reward_in(0.0, session) if failure else reward
        return samples


def load_program(config: AgentConfig) -> Program:
    """Returns the program that agent.program names. Raises ConfigError, or ValueError, if there is none."""
    if FUNCTION.fullmatch(config.program):
        return Program(PROGRAM, load_named(config.program, KEY))
    words = shlex.split(config.program)
    if shutil.which(words[0], path=program_environment()["PATH"]) is None:
        raise ConfigError(f"{KEY}={config.program}: there is no command {words[0]}: give one, or file.py:function.")
    return Program(PROGRAM, words, {"serves": config.program_serves, "fenced": config.program_sandbox})


def end_all(started: list[Running]) -> None:
    for running in started:
        running.end()


def reward_in(output: Any, session: Session) -> float | None:
    """Returns the posted reward, or else `output`, a number or a dict with `reward`; None, and a text, is none.

    Raises:
        ValueError: it is not a finite number.
    """
    if session.reward.done():
        return session.reward.result()
    value = output["reward"] if isinstance(output, dict) and "reward" in output else output
    if value is None or isinstance(output, str):
        return None
    try:
        check_reward(reward := float(value))
    except (TypeError, ValueError) as error:
        raise ValueError(f"its reward is {value!r}, which is no finite number") from error
    return reward
