"""Tokens a second of workers/hf: python -m benchmarks.rollout [--size S] [--prompts Q --samples G …] [--repeats K]

Llamas with random weights of the sizes of benchmarks/vs_trl.py, which generate until the last token they may. Also
prints where the time goes: prompts, weights laid out for the CPU's products, one-token steps, and sampling.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.models import SHAPES, numbers_tokenizer
from benchmarks.workload import VOCABULARY
from configs.schema import ModelConfig, RolloutConfig
from data.seeding import derive_seed
from training.roles import SamplingParams
from workers.hf import rollout as rollout_module
from workers.hf.batch import RunningBatch, SharedPrompts
from workers.hf.rollout import HFRollout
from workers.kernels import start_process
from workers.rollout import Request
from workers.scoring_model import scoring_model

SMOLLM2 = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


def main() -> None:
    arguments = read_arguments()
    start_process(arguments.threads)
    tokenizer = numbers_tokenizer(VOCABULARY[arguments.size])
    config = RolloutConfig(prompt_length=arguments.prompt_tokens, response_length=arguments.response_tokens)
    rollout = HFRollout(config, tokenizer, random_llama(arguments.size, tokenizer, arguments.seed))
    prompts, sampling = make_prompts(arguments), SamplingParams(True, 1.0, -1, 1.0, arguments.response_tokens)
    seconds = time_phases()
    totals = []
    for seed in range(arguments.repeats + 1):  # the first warms up
        if seed == 1:
            seconds.clear()
        requests = [Request(row, ids, sampling, derive_seed(seed, row)) for row, ids in enumerate(prompts)]
        start = perf_counter()
        completions = rollout.generate(requests)
        totals.append(perf_counter() - start)
    tokens = sum(len(done.token_ids) for done in completions)
    print(f"{tokens / median(totals[1:]):.0f} tokens/s: {tokens} in {median(totals[1:]):.2f} s")
    for phase, spent in seconds.items():
        print(f"{phase:<8}{spent / arguments.repeats:8.3f} s{spent / sum(totals[1:]):7.1%}")


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=VOCABULARY, default="1m")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=40)
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--ragged", action="store_true", help="prompts of half that length and more")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def random_llama(size: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = SHAPES.get(size, SMOLLM2)
    stop = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = LlamaConfig(**shape, **stop, vocab_size=VOCABULARY[size], tie_word_embeddings=True)
    longest = 1  # whatever the run's: a Llama attends to all that is before
    return scoring_model(LlamaForCausalLM(config), ModelConfig(), torch.device("cpu"), torch.float32, longest)


def make_prompts(arguments: argparse.Namespace) -> list[list[int]]:
    rng, vocabulary, longest = random.Random(arguments.seed), VOCABULARY[arguments.size], arguments.prompt_tokens
    lengths = [rng.randint(longest // 2, longest) if arguments.ragged else longest for _ in range(arguments.prompts)]
    distinct = [[rng.randrange(1, vocabulary) for _ in range(length)] for length in lengths]
    return [prompt for prompt in distinct for _ in range(arguments.samples)]


def time_phases() -> dict[str, float]:
    """Seconds by phase, counted from now on. The functions are wrapped where they are looked up."""
    seconds: dict[str, float] = defaultdict(float)
    phases = {
        "prompts": (SharedPrompts, "_prefill"),
        "steps": (SharedPrompts, "_forward"),
        "sampling": (RunningBatch, "_draw"),
    }
    for phase, (holder, name) in phases.items():
        setattr(holder, name, timed(getattr(holder, name), phase, seconds))
    rollout_module.decoding = timed_entry(rollout_module.decoding, "weights", seconds)
    return seconds


def timed(function: Callable, phase: str, seconds: dict[str, float]) -> Callable:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[phase] += perf_counter() - start

    return wrapper


def timed_entry(manager: Callable[..., AbstractContextManager], phase: str, seconds: dict[str, float]) -> Callable:
    """The context manager, with the time that it takes to enter."""

    @contextmanager
    def wrapper(*args: Any) -> Iterator[Any]:
        with ExitStack() as stack:
            yield timed(stack.enter_context, phase, seconds)(manager(*args))

    return wrapper


if __name__ == "__main__":
    main()
