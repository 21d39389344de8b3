"""What tests of rollout engines share."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from data.protocol import DataProto
from training.game import Game
from training.roles import SamplingParams
from workers.agent_loop import AgentLoop
from workers.rollout import Completion, Request, Rollout


def drain(engine: Rollout) -> dict[int, Completion]:
    """Steps until nothing is left; every request may come out once."""
    found: dict[int, Completion] = {}
    while engine.has_unfinished_requests():
        for done in engine.step():
            assert done.id not in found
            found[done.id] = done
    return found


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

    def __init__(self, config: Config, engine: Scripted, game: Game | None) -> None:
        self.loop = AgentLoop(config, engine.tokenizer, engine, game)

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        return self.loop.generate_sequences(prompts, sampling, seed, 0)
