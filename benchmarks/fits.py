"""Writes the table of docs/gpu.md, what fits which card, by the arithmetic of workers/memory_needs.py:

python -m benchmarks.fits [--write]

Without --write it is only printed. No GPU is needed, and no model: sizes are read off the shapes of Qwen2.5.
"""

import argparse
from pathlib import Path

from transformers import Qwen2Config

from benchmarks.models import QWEN2
from benchmarks.workload import VOCABULARY
from configs.loader import CONFIG_DIR, Arguments, load_config
from configs.schema import Config
from workers.memory_needs import GIB, ModelSize, memory_needs

PAGE = Path(__file__).resolve().parents[1] / "docs/gpu.md"
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
CHECKPOINTED = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
OFFLOADED = f"{ACTOR}.fsdp_config.optimizer_offload=true"
FEWER_ROWS = "actor_rollout_ref.rollout.max_num_seqs=128"
SETTINGS = {  # by the letter of their column, in the order in which one would try them: what costs least first
    "a": [],
    "b": [f"{ACTOR}.ppo_max_token_len_per_gpu=4096"],
    "c": [CHECKPOINTED],
    "d": [CHECKPOINTED, OFFLOADED],
    "e": [
        CHECKPOINTED,
        OFFLOADED,
        f"{ACTOR}.ppo_max_token_len_per_gpu=8192",
        "actor_rollout_ref.rollout.max_num_seqs=128",
    ],
}
REFERENCE = [f"{ACTOR}.use_kl_loss=true"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/gpu.md")
    if parser.parse_args().write:
        before, behind = parts_of_page()
        PAGE.write_text(before + table() + behind)
    else:
        print(table(), end="")


def parts_of_page() -> tuple[str, str]:
    """The page before its table, and behind it."""
    before, _, others = PAGE.read_text().partition(BEGIN)
    return before + BEGIN, END + others.partition(END)[2]


def table() -> str:
    """GiB of a GPU at most at once, by model and settings, and the first settings that fit each card."""
    lines = [
        f"| GiB at once | {' | '.join(SETTINGS)} | {' | '.join(f'{card} GB' for card in CARDS)} |",
        "|---" * (1 + len(SETTINGS) + len(CARDS)) + "|",
    ]
    for name in QWEN2:
        shape = {"vocab_size": VOCABULARY[name], "tie_word_embeddings": True} | QWEN2[name]
        size = ModelSize.of(Qwen2Config(**shape))
        for words, more in (("", []), (", and a reference", REFERENCE)):
            peaks = {letter: peak(size, [*settings, *more]) for letter, settings in SETTINGS.items()}
            fits = [first_that_fits(peaks, card) for card in CARDS]
            cells = [*(f"{bytes_ / GIB:.1f}" for bytes_ in peaks.values()), *fits]
            lines.append(f"| {name.removeprefix('qwen2-').upper()}{words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def peak(size: ModelSize, settings: list[str]) -> int:
    """Bytes of a run with the hf engine; the size of the card only counts with vLLM."""
    config = load_config(Arguments("ppo_trainer", CONFIG_DIR, RUN + settings, print_config=False), Config)
    return memory_needs(config, size, None, None, BFLOAT16, card=0).peak


def first_that_fits(peaks: dict[str, int], card: int) -> str:
    return next((letter for letter, size in peaks.items() if size + UNCOUNTED <= card * 10**9), "–")


if __name__ == "__main__":
    main()
