"""Turns of episodes in workers/hf: python -m benchmarks.multi_turn [--size S | --model FOLDER] [--turns T]

Seconds of processor time that episodes take from their first prompt to their last answer, with their keys and values
kept between turns, and with every turn's prompt computed anew; and the tokens prefilled. After a turn an episode is
told some tokens, and its next turn comes at once, or some steps later, another number for each: then rows
join one by one. The two ways take turns, in the other order each round; a ratio is that of one round, and the table
has medians. On one thread, processor time is what an idle host takes, and tells the two apart on a busy one.
"""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import argparse
import os
import random
from collections import defaultdict
from pathlib import Path
from statistics import median
from time import process_time

from transformers import AutoTokenizer

from benchmarks.models import numbers_tokenizer
from benchmarks.rollout import prepared, random_llama
from benchmarks.workload import PAD, VOCABULARY
from configs.schema import ModelConfig, RolloutConfig
from data.seeding import derive_seed
from data.types import Request, SamplingParams
from extras.kernels.memory import start_process
from workers.hf.rollout import HFRollout
from workers.models import load_causal_lm

LONGEST_PAUSE = 16  # steps of the engine


def main() -> None:
    arguments = read_arguments()
    start_process(arguments.threads)
    engine = start_engine(arguments)
    print("| next turns come | turns | answer + told | anew, s | kept, s | ratio | tokens prefilled, anew | kept |")
    print("|---" * 8 + "|")
    for comes, pauses in (("at once", 1), ("at different times", LONGEST_PAUSE)):
        seconds, prefilled = measure(engine, arguments, pauses)
        ratios = [anew / kept for kept, anew in zip(seconds[True], seconds[False], strict=True)]
        cells = [comes, arguments.turns, f"{arguments.answer} + {arguments.told}"]
        cells += [f"{median(seconds[False]):.2f}", f"{median(seconds[True]):.2f}", f"{median(ratios):.2f}"]
        cells += [f"{prefilled[False]:,}", f"{prefilled[True]:,}"]
        print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    print(f"load average {os.getloadavg()[0]:.1f}")


def measure(
    engine: HFRollout, arguments: argparse.Namespace, pauses: int
) -> tuple[dict[bool, list[float]], dict[bool, int]]:
    """Seconds of each round, and tokens prefilled in one, by whether anything is kept."""
    seconds, prefilled = defaultdict(list), {}
    for seed in range(arguments.repeats + 1):
        for keeps in (True, False) if seed % 2 else (False, True):
            before, start = engine.prefilled_tokens, process_time()
            play(engine, arguments, pauses, keeps, seed)
            if seed:  # the first warms up
                seconds[keeps].append(process_time() - start)
            prefilled[keeps] = engine.prefilled_tokens - before
    return seconds, prefilled


def read_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=[*VOCABULARY], default="1m", help="of a Llama with random weights (1m)")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model in its place")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of the first turn (64)")
    parser.add_argument("--answer", type=int, default=8, help="tokens of each turn's answer (8)")
    parser.add_argument("--told", type=int, default=32, help="tokens that follow each answer (32)")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that are counted (3)")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args(argv)


def start_engine(arguments: argparse.Namespace) -> HFRollout:
    longest = arguments.turns * (arguments.answer + arguments.told)
    config = RolloutConfig(prompt_length=arguments.prompt_tokens, response_length=longest)
    if arguments.model:
        tokenizer = AutoTokenizer.from_pretrained(arguments.model)
        return HFRollout(config, tokenizer, load_causal_lm(ModelConfig(path=str(arguments.model))))
    tokenizer = numbers_tokenizer(VOCABULARY[arguments.size])
    return HFRollout(config, tokenizer, prepared(random_llama(arguments.size, tokenizer, seed=0)))


def play(engine: HFRollout, arguments: argparse.Namespace, pauses: int, keeps: bool, seed: int) -> None:
    """All episodes, side by side, whose turns come up to `pauses` steps later; `keeps`: the engine is told of them."""
    rng = random.Random(seed)
    vocabulary = min(engine.vocab_size, 500)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(PAD + 1, vocabulary) for _ in range(count)]

    sampling = SamplingParams(True, 1.0, -1, 1.0, arguments.answer)
    engine.stop_ids = set()  # answers are as long as they may be
    texts = {episode: tokens(arguments.prompt_tokens) for episode in range(arguments.episodes)}
    due, turns = {episode: rng.randrange(pauses) for episode in texts}, dict.fromkeys(texts, 0)
    while texts:
        for episode in [episode for episode, left in due.items() if left == 0]:
            own = derive_seed(seed, episode, turns[episode])
            engine.add(Request(episode, texts[episode], sampling, own, episode=episode if keeps else None))
        due = {episode: left - 1 for episode, left in due.items() if left}
        for done in engine.step():
            turns[done.id] += 1
            if turns[done.id] == arguments.turns:
                engine.forget([done.id])
                del texts[done.id]
                continue
            texts[done.id] = [*texts[done.id], *done.token_ids, *tokens(arguments.told)]
            due[done.id] = rng.randrange(pauses)


if __name__ == "__main__":
    main()
