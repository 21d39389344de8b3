"""Writes the tables of docs/gpu.md and docs/sharding.md, what fits which cards, by the arithmetic of
workers/memory_needs.py:

python -m benchmarks.fits [--write]

Without --write they are only printed. No GPU is needed, and no model: sizes are read off the shapes of Qwen2.5.
"""

from configs.loader import CONFIG_DIR, Arguments, load_config  # isort: skip

import argparse
from pathlib import Path

from transformers import Qwen2Config

from benchmarks.models import QWEN2
from benchmarks.workload import VOCABULARY
from configs.schema import Config
from data.pretrained import ModelSize
from workers.memory_needs import GIB, Needs, memory_needs

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- python -m benchmarks.fits --write -->\n", "<!-- end -->\n"
CARDS = (24, 40, 80)  # GB, of 10⁹ bytes
UNCOUNTED = GIB  # of a card: CUDA's context, and what the allocator cannot use
BFLOAT16 = 2  # bytes
RUN = [
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=8",
    "data.train_batch_size=64",
    "data.max_prompt_length=512",
    "data.max_response_length=1024",
    "trainer.n_gpus_per_node=1",
]
ACTOR = "actor_rollout_ref.actor"
KEPT = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
OFFLOADED = f"{ACTOR}.fsdp_config.optimizer_offload=true"
SHORT = f"{ACTOR}.ppo_max_token_len_per_gpu=4096"
SETTINGS = {  # by the letter of their column, in the order in which one would try them: what costs least first
    "a": [KEPT],
    "b": [KEPT, SHORT],
    "c": [],
    "d": [OFFLOADED],
    "e": [OFFLOADED, f"{ACTOR}.ppo_max_token_len_per_gpu=8192", "actor_rollout_ref.rollout.max_num_seqs=128"],
}
REFERENCE = [f"{ACTOR}.use_kl_loss=true"]
ONE_CARD = ("qwen2-0.5b", "qwen2-1.5b", "qwen2-7b")
ENGINES = {"qwen2-0.5b": 1, "qwen2-7b": 1, "qwen2-32b": 2, "qwen2-72b": 4}  # GPUs that each of vLLM's is split over
NODE = "trainer.n_gpus_per_node=8"
GPUS = {1: [], 8: [NODE], 32: [NODE, "trainer.nnodes=4"]}
CACHED = 4 * GIB  # of keys and values, beside vLLM's weights
LARGE = ["actor_rollout_ref.rollout.name=vllm", "data.train_batch_size=256"]
SPREAD = {  # as SETTINGS, of the second table
    "a": [],
    "b": [SHORT],
    "c": [SHORT, f"{ACTOR}.optim.moments_dtype=bfloat16"],
    "d": [SHORT, OFFLOADED],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the pages")
    writes = parser.parse_args().write
    for page, lines in {"gpu.md": table(), "sharding.md": sharding_table()}.items():
        if writes:
            (DOCS / page).write_text(with_table(page, lines))
        else:
            print(lines)


def with_table(page: str, table: str) -> str:
    """The text of a page, with this table in the place of its own."""
    before, _, others = (DOCS / page).read_text().partition(BEGIN)
    return before + BEGIN + table + END + others.partition(END)[2]


def table() -> str:
    """GiB of a GPU at most at once, by model and settings, and the first settings that fit each card."""
    lines = [
        f"| GiB at once | {' | '.join(SETTINGS)} | {' | '.join(f'{card} GB' for card in CARDS)} |",
        "|---" * (1 + len(SETTINGS) + len(CARDS)) + "|",
    ]
    for name in ONE_CARD:
        size = size_of(name)
        for words, more in (("", []), (", and a reference", REFERENCE)):
            peaks = {letter: needs(size, [*settings, *more]).peak for letter, settings in SETTINGS.items()}
            fits = [first_that_fits(peaks, card) for card in CARDS]
            cells = [*(f"{bytes_ / GIB:.1f}" for bytes_ in peaks.values()), *fits]
            lines.append(f"| {title(name)}{words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def sharding_table() -> str:
    """GiB of each GPU by what they are for, by model and GPUs, and the first settings that fit 80 GB."""
    parts = ("weights", "gradients", "AdamW", "whole weights")
    columns = ("GiB", "GPUs", *parts, "activations and the rest", "updating", "vLLM's weights", "80 GB")
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, split in ENGINES.items():
        size = size_of(name)
        engine = BFLOAT16 * size.parameters
        for gpus, machines in GPUS.items():
            here = engine // min(split, gpus)
            by_settings = {letter: needs(size, [*LARGE, *machines, *settings]) for letter, settings in SPREAD.items()}
            peaks = {
                letter: max(found.peak, sum(found.held.values()) + here + CACHED)
                for letter, found in by_settings.items()
            }
            first = by_settings["a"]
            found = first.held | first.update
            others = sum(found.values()) - sum(found.get(part, 0) for part in parts)
            sizes = [*(found.get(part, 0) for part in parts), others, sum(found.values()), here]
            cells = " | ".join(f"{bytes_ / GIB:.1f}" if bytes_ else "–" for bytes_ in sizes)
            lines.append(f"| {title(name)} | {gpus} | {cells} | {first_that_fits(peaks, 80)} |")
    return "\n".join(lines) + "\n"


def title(name: str) -> str:
    return name.removeprefix("qwen2-").upper()


def size_of(name: str) -> ModelSize:
    shape = {"vocab_size": VOCABULARY[name], "tie_word_embeddings": True} | QWEN2[name]
    return ModelSize.of(Qwen2Config(**shape))


def needs(size: ModelSize, settings: list[str]) -> Needs:
    """Counts a run, with the hf engine unless the settings name vLLM; the size of the card only counts with it."""
    config = load_config(Arguments("ppo_trainer", CONFIG_DIR, RUN + settings, print_config=False), Config)
    return memory_needs(config, size, None, None, BFLOAT16, card=0)


def first_that_fits(peaks: dict[str, int], card: int) -> str:
    return next((letter for letter, size in peaks.items() if size + UNCOUNTED <= card * 10**9), "–")


if __name__ == "__main__":
    main()
