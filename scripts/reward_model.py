"""A learned reward model on FrozenLake: trained on pairs of moves, it then teaches a policy that sees no other reward.

    python -m scripts.reward_model [--seed N] [key=value …]

1. The tiny model of the quickstart, which imitates a careful wanderer.
2. Preference pairs: in one state, a move on a shortest way to the goal, and one that is not, or no move at all.
3. The reward model, from the tiny model's weights: it learns to score the first above the second (Bradley and Terry's
   loss, as in Ouyang et al., arXiv:2203.02155).
4. GRPO on its scores alone (configs/frozenlake_rm.yaml; key=value overrides go there).
True success on 200 held-out maps, which the policy is never told, is measured before and after 4.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import prepare_process

    prepare_process()  # before torch is loaded

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

import main as rl
from configs.errors import late_refusals, refusals
from configs.schema import Config
from custom.env_dataset import CustomEnvDataset
from data.files import sole_run
from data.pretrained import load_tokenizer
from data.seeding import derive_seed, numpy_generator
from scripts.quickstart import SUCCESS, new_run, print_outcome, script_parser, warm_start, write_summary
from training.environment import build_environment
from workers.engine import scheduled_multiplier
from workers.ray_group import start_command

PAIRS, HELD_OUT = 16000, 500
NO_MOVE = 0.1  # of the worse answers: the model's score of what it never saw is noise, which a policy finds and learns
BATCH = 16  # pairs a step
LEARNING_RATE, WARMUP = 3e-4, 40  # steps


@dataclass(frozen=True)
class Pair:
    """Token ids of a prompt with the better of two answers, and with the worse."""

    chosen: list[int]
    rejected: list[int]


def main() -> None:
    parser = script_parser(__doc__, "weights, maps, pairs, sampling")
    arguments = parser.parse_intermixed_args()
    with refusals():
        config = new_run("frozenlake_rm", arguments.seed, [], arguments.overrides)
    start_command(config)
    with late_refusals():
        summary = learn(config)
    print_outcome("true success on 200 held-out maps", summary, config)


def learn(config: Config) -> dict[str, Any]:
    """Runs all stages anew; returns the summary, and writes it to summary.json in the run's folder."""
    folder = Path(config.trainer.default_local_dir)
    started = time.monotonic()
    with sole_run(folder):
        print("stage 1 of 3: a tiny model learns to imitate a careful wanderer, who does not know the goal")
        warm_start(config, folder)
        print("stage 2 of 3: a reward model learns which of two moves is better")
        pairs = preference_pairs(config, PAIRS + HELD_OUT)
        model = reward_model(config, pairs[HELD_OUT:])
        print(f"it tells {accuracy(model, pairs[:HELD_OUT]):.3f} of {HELD_OUT} held-out pairs apart")
        save(model, config)
        print(f"stage 3 of 3: reinforcement learning ({config.algorithm.adv_estimator}) on its scores")
        rl.build(config).fit()
    return write_summary(config, SUCCESS, time.monotonic() - started)


def preference_pairs(config: Config, count: int) -> list[Pair]:
    """Moves on a shortest way to the goal, against others and against tokens that are none, in states of all maps."""
    seed, tokenizer = config.trainer.seed, load_tokenizer(config.actor_rollout_ref.model)
    rng = numpy_generator(seed, "preferences")
    environment = replace(build_environment(config), seed=derive_seed(seed, "compared_states"))
    dataset = CustomEnvDataset(environment, tokenizer, config.data, size=count)
    no_moves = [
        token for token in range(len(tokenizer)) if environment.extract_action(tokenizer.decode([token])) is None
    ]
    pairs = []
    for index in track(range(count), "comparing moves"):
        state = environment.get_state(index)
        best = environment.optimal_actions(state)
        worse = sorted(set(environment.actions) - set(best))
        if not worse:
            continue
        prompt = dataset.encode_state(state)
        chosen, rejected = (
            answer_ids(environment.action_to_text(int(rng.choice(moves))), tokenizer, config) for moves in (best, worse)
        )
        if rng.random() < NO_MOVE:
            rejected = [int(rng.choice(no_moves)), *rejected[1:]]
        pairs.append(Pair([*prompt, *chosen], [*prompt, *rejected]))
    return pairs


def answer_ids(text: str, tokenizer: PreTrainedTokenizerBase, config: Config) -> list[int]:
    """The token ids of an answer as the policy produces it: with its end, unless that is cut off."""
    ids = tokenizer(text, add_special_tokens=False).input_ids
    return [*ids, tokenizer.eos_token_id][: config.data.max_response_length]


def reward_model(config: Config, pairs: list[Pair]) -> PreTrainedModel:
    """The policy's weights with a head of one output, after a pass over `pairs`."""
    rng = numpy_generator(config.trainer.seed, "preference_batches")
    transformers_logging.set_verbosity_error()  # that the head is new
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.trainer.seed, "reward_head"))
        model = AutoModelForSequenceClassification.from_pretrained(
            config.actor_rollout_ref.model.path, num_labels=1, dtype=torch.float32
        )
    batches = np.array_split(rng.permutation(len(pairs)), len(pairs) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    for step, batch in enumerate(track(batches, "learning from pairs")):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * scheduled_multiplier(step, "cosine", WARMUP, len(batches), min_lr_ratio=0.05)
        preference_loss(*scores(model, [pairs[index] for index in batch])).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def preference_loss(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Mean −log of the probability that the better answer is preferred, σ(chosen − rejected); scores are [B]."""
    return -torch.nn.functional.logsigmoid(chosen - rejected).mean()


def scores(model: PreTrainedModel, pairs: list[Pair]) -> tuple[Tensor, Tensor]:
    """The model's scores of the better and of the worse answers, [B] each."""
    rows = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[model.config.pad_token_id] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    chosen, rejected = model(input_ids=ids, attention_mask=mask).logits[:, 0].chunk(2)
    return chosen, rejected


@torch.no_grad()
def accuracy(model: PreTrainedModel, pairs: list[Pair]) -> float:
    """The share of `pairs` whose better answer scores higher."""
    chosen, rejected = scores(model, pairs)
    return (chosen > rejected).float().mean().item()


def save(model: PreTrainedModel, config: Config) -> None:
    """Writes the reward model, with its tokenizer, where the config expects it."""
    target = config.reward.reward_model.model.path
    model.save_pretrained(target)
    load_tokenizer(config.actor_rollout_ref.model).save_pretrained(target)


if __name__ == "__main__":
    main()
