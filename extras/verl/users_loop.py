"""Agent loops of the user's, in verl's form: an episode that asks the policy by itself.

A subclass of `AgentLoopBase` has a coroutine `run(sampling_params, **row)`, which awaits `server_manager.generate` as
often as it likes and returns an `AgentLoopOutput`, or a list of them, rows of one episode of which the last is scored.
It may take as long between two answers as a tool may for a call. Log-probs and weight versions are those of the tokens
that were sampled.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from configs.import_utils import bind, required_arguments
from configs.schema import Config
from data.chat import ChatFormat, as_messages, encode_prompt
from data.rl_dataset import get_dataset_class
from data.rows import RUN_COLUMNS, beside, kwargs_in
from data.types import Completion, Row, Sample, SamplingParams, check_reward
from extras.tools.shared_loop import Agent, Asked, UsersEpisode
from training.episode_rows import LOOP_SCORE
from workers.agents.episode import EpisodeFailed, Limits, Policy, end_of, finish_samples, or_episode_error

# What user code may ask of a request beside what SamplingParams has, and the values that change nothing here.
WITHOUT_EFFECT = {
    "logprobs": None, "prompt_logprobs": (None, 0, False), "repetition_penalty": (1,), "presence_penalty": (0,),
    "frequency_penalty": (0,), "min_tokens": (0,), "n": (1,), "stop": (None, [], ()), "seed": (None,),
    "ignore_eos": (False,), "skip_special_tokens": None, "detokenize": None, "include_stop_str_in_output": None,
}  # fmt: skip
TOLERANCE = 1e-3  # between a token's log-prob as the engine gave it, and as an agent loop returns it
OF_EPISODES = {"turn_scores", "tool_rewards", "tool_call_counts", "tool_failures", "invalid_actions", "success"}


class AgentLoopMetrics(SimpleNamespace):
    """Seconds of an episode; each number is logged as agent_loop/NAME/{mean,max,min}."""

    def __init__(self, **metrics: Any) -> None:
        super().__init__(**{"generate_sequences": 0.0, "tool_calls": 0.0} | metrics)


class AgentLoopOutput(SimpleNamespace):
    """A row of an episode: prompt_ids, response_ids, and response_mask, 1 where the policy spoke.

    Optional are response_logprobs, one a token of the response (None: those that were sampled), reward_score (None: the
    run's reward scores it), num_turns, metrics, and extra_fields, further columns of the row.
    """

    def __init__(self, *, prompt_ids: Any, response_ids: Any, response_mask: Any, **fields: Any) -> None:
        optional = {"response_logprobs": None, "reward_score": None, "num_turns": 0, "metrics": {}, "extra_fields": {}}
        needed = {"prompt_ids": prompt_ids, "response_ids": response_ids, "response_mask": response_mask}
        super().__init__(**needed | optional | fields)
        if isinstance(self.metrics, Mapping):
            self.metrics = AgentLoopMetrics(**self.metrics)

    def as_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class TokenOutput(list):
    """The policy's answer: a list of its token ids, with what is known of them."""

    def __init__(
        self, token_ids: Sequence[int], log_probs: list[float] | None = None, stop_reason: str | None = None,
        extra_fields: dict[str, Any] | None = None, stopped: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(token_ids)
        self.stopped = stopped  # by a stop id, and not for its length
        self.token_ids, self.log_probs, self.stop_reason = list(token_ids), log_probs, stop_reason
        self.routed_experts, self.num_preempted, self.extra_fields = None, None, extra_fields or {}


class LLMServerClient:
    """The policy as one episode of an agent loop asks it, from whatever event loop.

    `answers` has each prompt and its answer, in the order of the requests.
    """

    def __init__(self, policy: Policy, limits: Limits, longest: int) -> None:
        self.policy, self.limits, self.longest, self.loop = policy, limits, longest, asyncio.get_running_loop()
        self.answers: dict[int, tuple[list[int], Completion]] = {}
        self.requests = self.waiting = 0
        self.asked, self.went_on = Asked(), False

    async def generate(
        self, request_id: Any = None, *, prompt_ids: Any, sampling_params: Mapping[str, Any] | None = None, **other: Any
    ) -> TokenOutput:
        """Answers a prompt, by at most data.max_response_length tokens, or as many as max_tokens_per_turn allows.

        Raises:
            ValueError: images, settings that the engines do not know, or a prompt that leaves no room for an answer.
        """
        if media := [name for name, value in other.items() if name.endswith("_data") and value is not None]:
            raise ValueError(f"generate was given {', '.join(media)}: the policy reads text here.")
        prompt = ids_of(prompt_ids)
        sampling = sampling_of(sampling_params or {}, self.policy.sampling)
        most = min(sampling.max_tokens, self.limits.answer, self.longest - len(prompt))
        if most <= 0:
            raise ValueError(
                f"generate was given {len(prompt)} tokens: raise data.max_prompt_length + max_response_length "
                f"({self.longest})."
            )
        turn, self.requests, self.waiting = self.requests, self.requests + 1, self.waiting + 1
        try:
            work = self.policy.answer(prompt, most, self.asked.number(prompt), sampling)
            done = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
        finally:
            self.waiting, self.went_on = self.waiting - 1, True
        self.answers[turn] = (prompt, done)
        reason = "aborted" if done.finish_reason == "aborted" else "completed"
        versions, stopped = {"global_steps": done.weight_version}, done.finish_reason == "stop"
        return TokenOutput(done.token_ids, list(done.log_probs), reason, versions, stopped)

    def begins_anew(self) -> bool:
        """Says whether the policy is answering, or has answered since the last call: then the deadline begins anew."""
        went_on, self.went_on = self.went_on, False
        return went_on or self.waiting > 0


class AgentLoopBase:
    """One episode; verl's constructor of any version, of which a subclass may name what it needs.

    `config` is the whole run's; `loop` the event loop it runs in.
    """

    blocks = False  # whether it computes or waits without `await`
    _class_initialized = False  # for an init_class of verl's, which is called each time there

    def __init__(
        self, trainer_config: Any, server_manager: LLMServerClient, tokenizer: PreTrainedTokenizerBase,
        processor: Any = None, dataset_cls: type | None = None, data_config: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        self.config: Config = trainer_config if isinstance(trainer_config, Config) else trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer, self.processor = server_manager, tokenizer, processor
        self.dataset_cls, self.data_config = dataset_cls, self.config.data
        self.apply_chat_template_kwargs = dict(self.config.data.apply_chat_template_kwargs)
        self.loop = asyncio.get_running_loop()

    @classmethod
    def init_class(cls, *args: Any, **kwargs: Any) -> None:
        """Prepares what all episodes share; called once a worker."""

    @property
    def system_prompt(self) -> list[int]:
        """Token ids that the chat template begins every prompt with."""
        user = {"role": "user", "content": ""}
        try:
            single, pair = (self._encode([user] * count, add_generation_prompt=False) for count in (1, 2))
        except (TemplateError, ValueError):  # it takes no two users in a row, or there is none
            return []
        return single[: 2 * len(single) - len(pair)]

    def _encode(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        kwargs = self.apply_chat_template_kwargs | kwargs
        return self.tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kwargs)

    async def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: Any = None, *media: Any, remove_system_prompt: bool = False,
        **_: Any,
    ) -> list[int]:  # fmt: skip
        """Token ids of messages, with the generation prompt; of `after_answer`, if that is asked."""
        if remove_system_prompt:
            return await self.after_answer(messages, tools=tools)
        return encode_prompt(messages, self.tokenizer, **self._template_kwargs(tools))

    async def after_answer(self, messages: list[dict[str, Any]], stopped: bool = True, tools: Any = None) -> list[int]:
        """Token ids of what the template writes from an answer to the next when `messages` follow it; of one that has
        not `stopped` by itself also the end. Raises ValueError where the template does not only append."""
        last_ids = [done.token_ids[-1] for _, done in self.server_manager.answers.values() if done.token_ids]
        return ChatFormat(self.tokenizer, self._template_kwargs(tools)).increment(messages, stopped, *last_ids[-1:])

    def _template_kwargs(self, tools: Any) -> dict[str, Any]:
        return self.apply_chat_template_kwargs | ({"tools": tools} if tools else {})

    async def process_vision_info(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Returns no images or videos: the policy reads text here."""
        return {}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Plays the episode of a row, whose columns are `kwargs`."""
        raise NotImplementedError(f"{type(self).__name__} defines no run(self, sampling_params, **kwargs)")


AsyncLLMServerManager = LLMServerClient


class LoopEpisode(UsersEpisode):
    """An episode that an agent loop plays whole, between two answers by the deadline of a tool's call."""

    def __init__(self, row: Row, agent: Agent, config: Config, chat: ChatFormat) -> None:
        super().__init__(row, agent, config, chat)
        self.shared = {"tokenizer": chat.tokenizer, "processor": None}
        if not agent.is_ready and "init_class" in dir(agent.cls):
            bind(agent.cls.init_class, {"config": config, **self.shared, **agent.settings}, key=agent.name)()
        agent.is_ready = True

    async def play(self, policy: Policy, chat: ChatFormat, limits: Limits) -> list[Sample]:
        rollout = self.config.actor_rollout_ref.rollout
        server = LLMServerClient(policy, limits, rollout.prompt_length + limits.response)
        try:
            returned = await or_episode_error(self._in_time(self._run(server), server.begins_anew))
            return await or_episode_error(self._rows(returned, server, limits))
        except EpisodeFailed as failure:
            return finish_samples([Sample(self.prompt_ids)], failure.end_reason, {}, server.requests, str(failure))

    async def _run(self, server: LLMServerClient) -> Any:
        loop, sampling = self._loop(server), server.policy.sampling
        row = self.row | {name: kwargs_in(self.row, name) for name in ("tools_kwargs", "interaction_kwargs")}
        row["raw_prompt"] = as_messages(row.get("raw_prompt"))
        if "messages" in required_arguments(loop.run):  # of verl 0.5
            row["messages"] = row["raw_prompt"]
        row["sampling_params"] = {
            "temperature": sampling.temperature if sampling.do_sample else 0.0, "top_p": sampling.top_p,
            "top_k": sampling.top_k, "repetition_penalty": 1.0, "logprobs": True,
        }  # fmt: skip
        return await bind(loop.run, row, key=self.agent.name)()

    def _loop(self, server: LLMServerClient) -> Any:
        """Makes the agent loop of this episode, of what its constructor names."""
        section = SimpleNamespace(config=self.config.data)
        offered = {
            "trainer_config": SimpleNamespace(config=self.config), "server_manager": server, **self.shared,
            "data_config": section, "dataset_config": section, "dataset_cls": get_dataset_class(self.config.data),
            "hf_model_type": None, "tools": None,
        }  # fmt: skip
        if "config" in required_arguments(self.agent.cls):  # of verl 0.5
            offered["config"] = self.config
        return bind(self.agent.cls, offered, self.agent.settings, self.agent.name)()

    async def _rows(self, returned: Any, server: LLMServerClient, limits: Limits) -> list[Sample]:
        outputs = returned if isinstance(returned, list | tuple) else [returned]
        if not outputs or not all(isinstance(output, AgentLoopOutput) for output in outputs):
            raise TypeError(f"{self.agent.name} returned {returned!r}; run must return an AgentLoopOutput, or several.")
        samples, width = [], self.config.actor_rollout_ref.rollout.prompt_length
        names = (self.row.keys() | RUN_COLUMNS) - OF_EPISODES
        for output in outputs:
            trusted = self.config.actor_rollout_ref.rollout.agent.trust_logprobs
            sample, reason = sample_of(output, [*server.answers.values()], limits, width, trusted)
            passed_on = {name for name, it in output.extra_fields.items() if name in self.row and self.row[name] is it}
            extra = {name: it for name, it in output.extra_fields.items() if name not in passed_on}
            score = output.reward_score if output is outputs[-1] else output.reward_score or 0.0
            if score is not None:
                check_reward(score := float(score))
            columns = beside(extra, names, "extra") | {LOOP_SCORE: score, "__agent_metrics__": {**vars(output.metrics)}}
            finish_samples([sample], reason, columns, output.num_turns or server.requests)
            samples.append(sample)
        if reason == "aborted":
            raise EpisodeFailed("aborted", "the engine aborted the last request")
        return samples


def ids_of(tokens: Any) -> list[int]:
    """Returns token ids as a list of numbers, of whatever holds them."""
    return [int(token_id) for token_id in (tokens["input_ids"] if isinstance(tokens, Mapping) else tokens)]


def sampling_of(requested: Mapping[str, Any], base: SamplingParams) -> SamplingParams:
    """Returns `base` with what user code requests; raises ValueError for what the engines do not know."""
    changed: dict[str, Any] = {}
    for name, value in requested.items():
        if name in ("max_tokens", "max_new_tokens"):
            changed["max_tokens"] = base.max_tokens if value is None else int(value)
        elif name in ("temperature", "top_p", "top_k", "min_p"):
            changed[name] = value
        elif name == "stop_token_ids":
            changed[name] = tuple(value or ())
        elif name not in WITHOUT_EFFECT or (WITHOUT_EFFECT[name] is not None and value not in WITHOUT_EFFECT[name]):
            raise ValueError(
                f"sampling_params has {name}={value!r}, which the engines do not know; they know max_tokens, "
                "temperature, top_p, top_k, min_p, stop_token_ids."
            )
    is_warm = changed.get("temperature", base.temperature) > 0
    return replace(base, **changed, do_sample=is_warm and (base.do_sample or "temperature" in changed))


def sample_of(
    output: AgentLoopOutput,
    answers: Sequence[tuple[list[int], Completion]],
    limits: Limits,
    width: int,
    trusted: bool = True,
) -> tuple[Sample, str]:
    """Turns an agent loop's output into a row, cut to `limits.response` tokens; also returns its end reason.

    If it is `trusted`, its response_logprobs are used; otherwise they must equal those of the sampled tokens.

    Raises:
        ValueError: uneven lists, a prompt longer than `width`, or tokens marked as the policy's that it did not sample.
    """
    prompt, ids, mask = map(ids_of, (output.prompt_ids, output.response_ids, output.response_mask))
    claims = output.response_logprobs
    if len(mask) != len(ids) or len(claims if claims is not None else ids) != len(ids) or set(mask) - {0, 1}:
        raise ValueError(
            f"an AgentLoopOutput has {len(ids)} response_ids, {len(mask)} in response_mask and "
            f"{0 if claims is None else len(claims)} response_logprobs: give one a token, and a mask of 1 or 0."
        )
    if len(prompt) > width:
        raise ValueError(f"an AgentLoopOutput has {len(prompt)} prompt_ids, and data.max_prompt_length is {width}.")
    is_cut, ids, mask = len(ids) > limits.response, ids[: limits.response], mask[: limits.response]
    log_probs, versions, turns = [None if policys else 0.0 for policys in mask], [0] * len(ids), [0] * len(ids)
    reason = "terminated"
    for turn, (start, length, done) in enumerate(answers_in(prompt, ids, answers)):
        for at in range(start, start + length):
            if mask[at]:
                version = done.weight_version
                versions[at] = version if isinstance(version, int) else version[at - start]
                log_probs[at] = done.log_probs[at - start]
        turns[start:] = [turn] * (len(ids) - start)
        is_last = start + length == len(ids)
        reason = end_of(done.finish_reason, limits.response - len(ids)) if is_last else "terminated"
    if claims is not None and trusted:
        log_probs = [float(value) if policys else 0.0 for value, policys in zip(claims, mask, strict=False)]
    if strangers := log_probs.count(None):
        raise ValueError(
            f"response_mask is 1 of {strangers} tokens that the policy did not sample: return its token_ids as "
            f"they came, a mask of 0{', or response_logprobs' if trusted else ''}."
        )
    tokens = zip(claims or (), log_probs, mask, strict=False)
    if not trusted and not all(abs(claim - drawn) <= TOLERANCE for claim, drawn, policys in tokens if policys):
        raise ValueError("response_logprobs are not the engine's, which agent.trust_logprobs=false asks for.")
    rewards = [0.0] * len(ids)
    return Sample(prompt, ids, mask, log_probs, versions, rewards, turns), "max_tokens" if is_cut else reason


def answers_in(
    prompt: list[int], ids: list[int], answers: Sequence[tuple[list[int], Completion]]
) -> list[tuple[int, int, Completion]]:
    """Finds in a response, `ids`, those of the `answers` that stand behind just what they answer.

    Returns:
        (where it begins, how many of its tokens are there, the answer); of several at one place the longest.
    """
    full_ids, by_start = prompt + ids, {}
    for request, done in answers:
        start = len(request) - len(prompt)
        if 0 <= start < len(ids) and full_ids[: len(request)] == request:
            pairs = zip(ids[start:], done.token_ids, strict=False)
            length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            if length > by_start.get(start, (start, 0))[1]:
                by_start[start] = (start, length, done)
    return [by_start[start] for start in sorted(by_start)]
