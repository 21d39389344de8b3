"""Plays many episodes at once, each at its own pace, over one engine.

Episodes live in an event loop in a thread of its own, and their environments in further threads; the engine is stepped
in the thread that asks, where its precision and its random state are set. A turn joins while others are generated, and
its draws depend on its row and number alone.

Batches of single answers alone stay with `Rollout.generate_sequences`, which takes 10 to 27 % less processor time.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain

from transformers import PreTrainedTokenizerBase

from configs.errors import warns_of_close
from configs.import_utils import find
from configs.schema import Config
from data.chat import ChatFormat
from data.concurrency import loop_in_thread, run_in_background
from data.padding import collate, collate_turns
from data.protocol import DataProto, object_array
from data.types import Row, Sample, SamplingParams
from training.environment import (
    AGENT_COLUMN,
    AGENT_KEY,
    ENVIRONMENT,
    SINGLE_TURN,
    TOOL_AGENT,
    EnvSetup,
    load_agents,
    load_conversations,
)
from workers.agents.environment import EnvEpisode, EnvSlot
from workers.agents.episode import Episode, Limits, Policy, SingleAnswer
from workers.agents.user_code import MOST_STUCK, stuck
from workers.engine_pump import AsyncEngine, CallingThread
from workers.rollout import Rollout

logger = logging.getLogger(__name__)
ATTEMPTS = 2  # at an episode whose other side raises


class AgentLoop:
    """Plays the episodes that rows begin, over one engine.

    Args:
        config: the whole run's.
        engine: answers nobody else meanwhile.
        env_setup: the environment, its prompts and its action parser; None: there is no environment.
    """

    def __init__(
        self, config: Config, tokenizer: PreTrainedTokenizerBase, engine: Rollout, env_setup: EnvSetup | None
    ) -> None:
        self.config, self.engine = config, engine
        rollout = config.actor_rollout_ref.rollout
        self.env_setup, self.free_environments = env_setup, list[EnvSlot]()
        self.turns_apart = env_setup is not None and (config.env.mode == "step" or config.env.history == "turns")
        self.conversations, data = load_conversations(config, tokenizer)
        self.chat = chat = ChatFormat(tokenizer, data.apply_chat_template_kwargs)
        self.limits = Limits(rollout.response_length, rollout.multi_turn.max_tokens_per_turn or rollout.response_length)
        self.episodes: dict[str, Callable[[Row], Episode]] = {  # by what rows begin
            name: partial(find("episode", agent.kind, AGENT_KEY), agent=agent, config=config, chat=chat)
            for name, agent in load_agents(rollout.agent).items()
        }
        self.episodes |= {SINGLE_TURN: SingleAnswer, ENVIRONMENT: self.environment_episode}
        if self.conversations is not None:
            self.episodes[TOOL_AGENT] = lambda row: self.conversations(row, chat, rollout.prompt_length)

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int, first_row: int) -> DataProto:
        """Plays the episodes that `prompts` begin: rows with the columns of a rollout and of episodes beside their own.

        An episode is one row, or one for each turn, which are neighbours. Row i draws by `seed` and by `first_row` + i,
        its place in the whole of which these prompts may be one worker's share.
        """
        thread, stuck_before = CallingThread(), len(stuck)
        pump = AsyncEngine(self.engine, nullcontext, thread)
        numbers = range(first_row, first_row + len(prompts))
        policies = [Policy(pump, sampling, seed, number, not self.turns_apart, number) for number in numbers]
        with loop_in_thread() as loop:
            try:
                episodes = thread.run_until(asyncio.run_coroutine_threadsafe(self.play_all(prompts, policies), loop))
            finally:
                self.engine.abort(range(next(pump.numbers)))  # every request so far
        report_stuck(stuck_before)
        return self.columns(prompts, episodes, [f"{seed}-{number}" for number in numbers])

    async def play_all(self, prompts: DataProto, policies: Sequence[Policy]) -> list[list[Sample]]:
        rows = (row.non_tensor_batch for row in prompts)
        return await asyncio.gather(*map(self.play_row, rows, policies))

    async def play_row(self, row: Row, policy: Policy) -> list[Sample]:
        """Plays an episode, again if the other side raised; returns its rows."""
        for _ in range(ATTEMPTS):
            episode = self.episodes[row[AGENT_COLUMN]](row)
            try:
                samples = await episode.play(policy, self.chat, self.limits)
            finally:
                policy.pump.forget(policy.episode)
                with warns_of_close("an episode"):
                    await episode.close()
            if samples[0].end_reason != "env_error":
                break
        return samples

    def environment_episode(self, row: Row) -> Episode:
        """Opens an episode of the environment, beside which there may be tools."""
        timeout = None if self.config.env.in_processes else self.config.env.timeout  # processes keep it themselves
        episode = EnvEpisode(row, self.env_setup, self.free_environments, self.turns_apart, timeout)
        return episode if self.conversations is None else self.conversations.beside(episode, row)

    def close(self) -> None:
        """Gives back what environments hold."""
        while self.free_environments:
            run_in_background(self.free_environments.pop().leave(self.config.env.timeout))
        if self.env_setup is not None:
            with warns_of_close("the environment that others are copies of"):
                self.env_setup.environment.close()

    def columns(self, prompts: DataProto, episodes: Sequence[Sequence[Sample]], names: Sequence[str]) -> DataProto:
        """Returns the episodes as a batch; the episode that row i of `prompts` began is called `names[i]`."""
        samples = [*chain.from_iterable(episodes)]
        extras = dict.fromkeys(name for sample in samples for name in sample.extras)
        for sample in samples:  # of several kinds of episodes
            sample.extras = {name: sample.extras.get(name) for name in extras}
        positions = [position for position, episode in enumerate(episodes) for _ in episode]
        rollout = self.config.actor_rollout_ref.rollout
        batch = collate(samples, rollout.prompt_length, rollout.response_length, self.engine.pad_token_id)
        batch.batch.update(collate_turns(samples, rollout.response_length))
        if self.env_setup is None:  # the reward function scores conversations
            batch.batch.pop("token_level_scores")
        batch.non_tensor_batch["episode"] = object_array([names[position] for position in positions])
        prompts = prompts.select_idxs(positions)
        prompts.non_tensor_batch["raw_prompt_ids"] = object_array([sample.prompt_ids for sample in samples])
        return batch.union(prompts)


def report_stuck(previous: int) -> None:
    """Warns of user code that was given up and goes on, if there is more of it than `previous`."""
    remedy = "Play environments in processes, which can be killed: env.processes=4."
    text = f"calls of environments or tools that hang, each in a thread: {len(stuck)}"
    if len(stuck) > MOST_STUCK:
        raise RuntimeError(f"{text}, more than {MOST_STUCK}. {remedy}")
    if len(stuck) > previous:
        logger.warning("%s. %s", text, remedy)
