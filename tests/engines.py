"""Shared by the tests of rollout engines: a scripted engine, and episodes that are played on any engine."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.import_utils import asked_for
from configs.schema import Config
from data.protocol import DataProto
from data.seeding import derive_seed
from data.types import Completion, Request, SamplingParams
from training.environment import EnvSetup
from training.ray_trainer import RayPPOTrainer
from workers.agent_loop import AgentLoop
from workers.engine import TrainEngine
from workers.rollout import Rollout
from workers.weight_sync import draw_probe, largest_distance, score_probe


def probe_distance(engine: Rollout, policy: TrainEngine) -> float:
    """The largest |Δ log-prob| between the two, of a few tokens that the engine draws."""
    drawn = draw_probe(engine, policy.module.config.get_text_config().vocab_size)
    return largest_distance(*score_probe(policy, drawn))


def drain(engine: Rollout) -> dict[int, Completion]:
    """Steps until nothing is left; every request may come out once."""
    found: dict[int, Completion] = {}
    while engine.has_unfinished_requests():
        for done in engine.step():
            assert done.id not in found
            found[done.id] = done
    return found


def answer(request: Request, version: int) -> Completion:
    """Answers with as many of 70, 71, 72 as the prompt has ids; ends by "stop" if those are fewer than three."""
    count = len(request.prompt_ids)
    reason = "stop" if count < 3 else "length"
    return Completion(request.id, [70, 71, 72][:count], [-0.5, -0.25, -0.125][:count], reason, version)


class Generating(Rollout):
    """Defines `generate` alone."""

    def generate(self, requests: list[Request]) -> list[Completion]:
        return [answer(request, self.weight_version) for request in requests]


class Stepping(Rollout):
    """Defines `step` alone: answers one waiting request a step, the last first."""

    def step(self) -> list[Completion]:
        return [answer(self.waiting.popitem()[1], self.weight_version)] if self.waiting else []


class CopyOf:
    """Gives an engine that samples from the trainer's own module a copy of its own, `module`.

    Args:
        leads: whether this rank asks the engine, and not another for it.
        held: what the engine says of the weights that it holds, of a module.
    """

    own_weights = True

    def __init__(
        self,
        engine: Rollout,
        module: PreTrainedModel,
        leads: bool = True,
        held: Callable[[PreTrainedModel], Any] = lambda module: None,
    ) -> None:
        self.engine, self.leads, self.held, engine.module = engine, leads, held, module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.engine.module.load_state_dict(dict(weights), strict=False)
        self.engine.load_weights([], version)

    def held_weights(self) -> Any:
        return self.held(self.engine.module)

    @contextmanager
    def together(self) -> Iterator[bool]:
        yield self.leads


class Scripted(Rollout):
    """An engine that answers by a function of the prompt's text (without special tokens) and of how often it was asked
    that before."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, answer: Callable[[str, int], str]) -> None:
        super().__init__(config.actor_rollout_ref.rollout, tokenizer, None)
        self.tokenizer, self.answer = tokenizer, answer
        self.asked: list[str] = []
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return [self.completion(request) for request in requests]

    def completion(self, request: Request) -> Completion:
        text = self.tokenizer.decode(request.prompt_ids, skip_special_tokens=True)
        ids = [*self.tokenizer.encode(self.answer(text, self.asked.count(text))), self.tokenizer.eos_token_id]
        self.asked.append(text)
        self.requests.append(request)
        said, most = ids[: request.sampling.max_tokens], request.sampling.max_tokens
        return Completion(request.id, said, [-1.0] * len(said), "length" if len(ids) > most else "stop", 0)


class Playing:
    """A rollout role whose episodes are played by an agent loop over `engine`, in this process."""

    def __init__(self, config: Config, engine: Scripted, game: EnvSetup | None) -> None:
        self.loop = AgentLoop(config, engine.tokenizer, engine, game)

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        return self.loop.generate_sequences(prompts, sampling, seed, 0)


def trainer_on(
    config: Config, tokenizer: PreTrainedTokenizerBase, rollout: Any, reward: Any, **parts: Any
) -> RayPPOTrainer:
    """Makes a trainer before its first step that draws, scores and validates by `rollout`; nobody learns."""
    rollout.spec, rollout.group = SimpleNamespace(update=None, columns=()), SimpleNamespace(size=1)
    parts = {"train_loader": None, "total_steps": 1} | parts
    roles = {"rollout": rollout, "actor": rollout}
    made = reduce(lambda made, make: make(made, config), asked_for("trainer", config), RayPPOTrainer)
    trainer = made(config, tokenizer=tokenizer, roles=roles, reward=reward, **parts)
    trainer.global_step = 1
    return trainer


@dataclass(frozen=True)
class Plan:
    """An episode: its first prompt; how each turn is sampled, what it is told after each, and how many steps of the
    engine later, if any run, its next turn comes. `changed`: the turn before which a token of the past changes."""

    prompt: list[int]
    samplings: list[SamplingParams]
    told: list[list[int]]
    pauses: list[int]
    changed: int | None = None


def plans(seed: int, samplings: Sequence[SamplingParams], vocabulary: int) -> list[Plan]:
    """Two ragged episodes for each of 1 to 5 turns, of at most 48 tokens, two with equal first prompts."""
    rng = np.random.default_rng(seed)
    found = []
    for place in range(10):
        turns = 1 + place % 5
        sampled = [samplings[int(rng.integers(len(samplings)))] for _ in range(turns)]
        told = [rng.integers(6, vocabulary, int(size)).tolist() for size in rng.integers(1, 5, turns)]
        prompt = found[3].prompt if place == 4 else rng.integers(6, vocabulary, int(rng.integers(1, 12))).tolist()
        found.append(Plan(prompt, sampled, told, rng.integers(0, 6, turns).tolist(), 3 if place == 9 else None))
    return found


def play(engine: Rollout, plans: Sequence[Plan], keeps: bool) -> dict[tuple[int, int], tuple[list[int], Completion]]:
    """Plays all episodes at once: (episode, turn) → prompt and answer; `keeps`: the engine hears which is whose."""
    due = {(place, 0): list(plan.prompt) for place, plan in enumerate(plans)}
    wait, found = {(place, 0): plan.pauses[-1] for place, plan in enumerate(plans)}, {}
    while due:
        for key in [key for key, left in wait.items() if left <= 0]:
            (place, turn), own = key, plans[key[0]]
            seed, episode = derive_seed(3, *key), 100 + place if keeps else None
            engine.add(Request(10 * place + turn, due[key], own.samplings[turn], seed, episode=episode))
            del wait[key]
        wait = {key: left - 1 for key, left in wait.items()}
        for done in engine.step():
            place, turn = key = divmod(done.id, 10)
            prompt, plan = due.pop(key), plans[place]
            found[key] = prompt, done
            if turn + 1 == len(plan.samplings):
                engine.forget([100 + place])
                continue
            past = [5, *prompt[1:]] if plan.changed == turn + 1 else prompt
            due[place, turn + 1] = [*past, *done.token_ids, *plan.told[turn]]
            wait[place, turn + 1] = plan.pauses[turn]
    return found
