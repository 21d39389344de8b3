"""Rollouts by each engine: python -m benchmarks.rollout [--size S] [--rows B …] [--samples G …] [--responses R …]

Tokens of responses a second: by vLLM where it is installed, by the hf engine, and by transformers' `generate`, which
returns no log-probs. All have the same random weights (a Llama of a size of benchmarks/vs_trl.py; 135m is SmolLM2's
shape) and the same prompts, and answer until the last token they may. They take turns, in another order each round; a
ratio is that of one round, and the table has medians. Below it stands where the hf engine's time goes: prompts, weights
laid out for the CPU's products, one-token steps, and sampling.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import copy
import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.models import SHAPES, numbers_tokenizer
from benchmarks.workload import PAD, VOCABULARY
from configs.schema import ModelConfig, RolloutConfig
from configs.threads import worker_threads
from data.seeding import derive_seed
from data.types import Request, SamplingParams
from extras.kernels.generation import SharedPrompts
from extras.kernels.memory import start_process
from workers.hf import rollout as rollout_module
from workers.hf.batch import RunningBatch, pad_left
from workers.hf.rollout import HFRollout
from workers.rollout import Rollout
from workers.scoring_model import scoring_model
from workers.vllm_rollout_spmd import vLLMRollout
from workers.vllm_setup import BLOCK, head_size

SMOLLM2 = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}
ENGINES = ("vllm", "hf", "compiled", "generate")  # compiled: hf with enforce_eager=false

# Distinct prompts, responses to each, tokens of a response, seed → tokens generated.
Arm = Callable[[list[list[int]], int, int, int], int]


def main() -> None:
    arguments = read_arguments()
    start_process(arguments.threads)
    figures = measure(arguments)
    print(table(figures))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


def read_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [name for name in ENGINES if name != "vllm" or find_spec("vllm")]
    usual = [name for name in here if name != "compiled"]
    parser.add_argument("--size", choices=[*SHAPES, "135m"], default="1m", help="parameters of the model (1m)")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128], metavar="B", help="responses (32 128)")
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 8], metavar="G", help="of each prompt (1 8)")
    parser.add_argument("--responses", type=int, nargs="+", default=[32, 256], metavar="R", help="tokens (32 256)")
    parser.add_argument("--prompt-tokens", type=int, default=64, metavar="P", help="tokens of a prompt (64)")
    parser.add_argument("--ragged", action="store_true", help="prompts of half that length and more")
    parser.add_argument(
        "--engines", nargs="+", choices=here, default=usual, help=f"of {' '.join(here)} ({' '.join(usual)})"
    )
    parser.add_argument("--repeats", type=int, default=3, metavar="K", help="rounds that are counted (3)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (0)")
    parser.add_argument("--threads", type=int, default=worker_threads(None).number)
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything goes here, too")
    arguments = parser.parse_args(argv)
    if uneven := [(rows, samples) for rows, samples in product(arguments.rows, arguments.samples) if rows % samples]:
        parser.error("--rows {} does not divide into --samples {} of a prompt".format(*uneven[0]))
    return arguments


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every round by engine, for each case; and what follows from them."""
    cases = []
    with ExitStack() as running:
        arms = start_arms(arguments, running)
        spent = running.enter_context(phases_timed())
        for rows, samples, tokens in product(arguments.rows, arguments.samples, arguments.responses):
            prompts = make_prompts(arguments, rows // samples)
            seconds = take_turns(arms, prompts, samples, tokens, arguments.repeats, spent)
            case = {"rows": rows, "samples": samples, "response_tokens": tokens}
            cases.append(case | summary(rows * tokens, seconds) | {"hf_phases": dict(spent)})
            took = ", ".join(f"{name} {median(each):.2f} s" for name, each in seconds.items())
            print(f"{rows} rows, {samples} a prompt, {tokens} tokens: {took}", flush=True)
    own = {name: value for name, value in vars(arguments).items() if name != "json"}
    return {"arguments": own, "versions": {name: version(name) for name in ("torch", "transformers")}, "cases": cases}


def take_turns(
    arms: dict[str, Arm], prompts: list[list[int]], samples: int, tokens: int, repeats: int, spent: dict[str, float]
) -> dict[str, list[float]]:
    """Seconds by engine of `repeats` rounds, after one that warms up; `spent` then holds those of them alone."""
    seconds, names = {name: [] for name in arms}, list(arms)
    for seed in range(repeats + 1):
        if seed == 1:
            spent.clear()
        for name in names[seed % len(names) :] + names[: seed % len(names)]:
            start = perf_counter()
            generated = arms[name](prompts, samples, tokens, seed)
            taken = perf_counter() - start
            wanted = len(prompts) * samples * tokens
            assert generated == wanted, f"{name} generated {generated} tokens of {wanted}: a response ended early"
            if seed:
                seconds[name].append(taken)
    return seconds


def summary(tokens: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of tokens a second, and of each round's ratio of the hf engine to another."""
    others = [name for name in seconds if name != "hf" and "hf" in seconds]
    ratios = {name: [their / our for their, our in zip(seconds[name], seconds["hf"], strict=True)] for name in others}
    return {
        "tokens_per_second": {name: median(tokens / taken for taken in each) for name, each in seconds.items()},
        "hf_to": {name: median(each) for name, each in ratios.items()},
        "seconds": seconds,
    }


def table(figures: dict[str, Any]) -> str:
    """As markdown; a line for each case."""
    cases = figures["cases"]
    names, others = list(cases[0]["tokens_per_second"]), list(cases[0]["hf_to"])
    heads = ["rows", "samples", "response", *(f"{name}, tokens/s" for name in names)]
    heads += [f"hf : {name}" for name in others]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for case in cases:
        cells = [str(case[name]) for name in ("rows", "samples", "response_tokens")]
        cells += [f"{case['tokens_per_second'][name]:.0f}" for name in names]
        cells += [f"{case['hf_to'][name]:.2f}" for name in others]
        lines.append("| " + " | ".join(cells) + " |")
    total = sum(sum(case["seconds"].get("hf", [])) for case in cases)
    spent: dict[str, float] = defaultdict(float)
    for phase, seconds in (item for case in cases for item in case["hf_phases"].items()):
        spent[phase] += seconds
    shares = ", ".join(f"{phase} {seconds / total:.0%}" for phase, seconds in spent.items())
    return "\n".join([*lines, f"of the hf engine's {total:.1f} s: {shares}"] if total else lines)


def start_arms(arguments: argparse.Namespace, running: ExitStack) -> dict[str, Arm]:
    """All engines, with weights of their own; `running` will end vLLM's."""
    tokenizer = numbers_tokenizer(VOCABULARY[arguments.size])
    model = random_llama(arguments.size, tokenizer, arguments.seed)
    lengths = {"prompt_length": arguments.prompt_tokens, "response_length": max(arguments.responses)}
    arms: dict[str, Arm] = {}
    for name in arguments.engines:
        if name == "generate":
            arms[name] = partial(by_generate, copy.deepcopy(model).eval())
        elif name in ("hf", "compiled"):
            config = RolloutConfig(**lengths, enforce_eager=name == "hf")
            engine = HFRollout(config, tokenizer, prepared(copy.deepcopy(model)))
            arms[name] = partial(by_engine, engine)
        else:
            cache = cache_bytes(model.config, max(arguments.rows), sum(lengths.values()))
            own = {"vllm": {"kv_cache_memory_bytes": cache}}  # a place for every row, as the others have
            engine = vLLMRollout(RolloutConfig(name="vllm", **lengths, engine_kwargs=own), tokenizer, model)
            running.callback(engine.close)
            engine.load_weights(model.state_dict().items(), version=0)
            arms[name] = partial(by_engine, engine)
    return arms


def by_engine(engine: Rollout, prompts: list[list[int]], samples: int, tokens: int, seed: int) -> int:
    sampling = SamplingParams(True, 1.0, -1, 1.0, tokens)
    each = [ids for ids in prompts for _ in range(samples)]
    requests = [Request(row, ids, sampling, derive_seed(seed, row)) for row, ids in enumerate(each)]
    return sum(len(done.token_ids) for done in engine.generate(requests))


def by_generate(model: PreTrainedModel, prompts: list[list[int]], samples: int, tokens: int, seed: int) -> int:
    torch.manual_seed(seed)
    ids, mask = pad_left(prompts, PAD, model.device)
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": samples}
    found = model.generate(ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=PAD, **drawn)
    return found[:, ids.shape[1] :].numel()


def cache_bytes(config: LlamaConfig, rows: int, longest: int) -> int:
    """Of float32 keys and values of so many sequences, in whole blocks, and of two to spare."""
    block = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size(config) * 4 * BLOCK
    return block * (rows * -(-longest // BLOCK) + 2)


def random_llama(size: str, tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    shape = SHAPES.get(size, SMOLLM2)
    stop = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**shape, **stop, vocab_size=VOCABULARY[size], tie_word_embeddings=True))


def prepared(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """As a worker has it."""
    longest = 1  # whatever the run's: a Llama attends to all that is before
    return scoring_model(model, ModelConfig(), torch.device("cpu"), torch.float32, longest)


def make_prompts(arguments: argparse.Namespace, count: int) -> list[list[int]]:
    rng, vocabulary, longest = random.Random(arguments.seed), VOCABULARY[arguments.size], arguments.prompt_tokens
    lengths = [rng.randint(longest // 2, longest) if arguments.ragged else longest for _ in range(count)]
    return [[rng.randrange(PAD + 1, vocabulary) for _ in range(length)] for length in lengths]


@contextmanager
def phases_timed() -> Iterator[dict[str, float]]:
    """Seconds of the hf engine by phase. The functions are wrapped where they are looked up, until the block ends."""
    spent: dict[str, float] = defaultdict(float)
    phases = {
        "prompts": (SharedPrompts, "_prefill"),
        "steps": (SharedPrompts, "_forward"),
        "sampling": (RunningBatch, "_draw"),
        "weights": (rollout_module, "lay_out_weights"),
    }
    with ExitStack() as stack:
        for phase, (holder, name) in phases.items():
            stack.enter_context(patch.object(holder, name, timed(vars(holder)[name], phase, spent)))
        yield spent


def timed(function: Callable, phase: str, spent: dict[str, float]) -> Callable:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        start = perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[phase] += perf_counter() - start

    return wrapper


if __name__ == "__main__":
    main()
