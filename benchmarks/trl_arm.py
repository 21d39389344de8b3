"""TRL's side of benchmarks/vs_trl.py: its GRPOTrainer with Hugging Face generation, run by TRL's own python.

Tuned: float32 (on a GPU under bfloat16 autocast), no gradient checkpointing, nothing logged or saved, the response as
long as the other arm's, and the micro-batch that is fastest in a small sweep (or the one given on the command line).
TRL leaves out the old log-probs by itself, as one update follows each generation; loss_type "dapo" divides by the
tokens of the whole batch.
"""

import time
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.workload import (
    ADAMW,
    CLIP_NORM,
    CLIP_RATIO,
    PAD,
    Channel,
    Meter,
    Workload,
    read_arguments,
    save_update,
    score,
    settle,
)

SWEEP = 4  # micro-batches tried: the whole batch, half of it, …


def main() -> None:
    channel = Channel()
    workload, words = read_arguments()
    sweep = {} if words else sweep_micro_batches(workload)
    micro_batch = int(words[0]) if words else min(sweep, key=sweep.get)
    trainer = build_trainer(workload, micro_batch)
    trainer.add_callback(Stepwise(channel, workload, trainer))
    channel.reply({"version": trl.__version__, "micro_batch": micro_batch, "sweep_seconds_per_batch": sweep})
    trainer.train()


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer with a clock around generation, and around all that comes before the update."""

    generating = preparing = 0.0
    grad_norm = 0.0

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        generated = super()._generate_single_turn(*args, **kwargs)
        settle()
        self.generating += time.perf_counter() - start
        return generated

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        start = time.perf_counter()
        prepared = super()._prepare_inputs(generation_batch)
        self.preparing += time.perf_counter() - start
        return prepared

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        norm = super()._clip_grad_norm(model)
        self.grad_norm = norm.item()
        return norm


class Stepwise(TrainerCallback):
    """Begins a step when the parent asks for it, and answers the time that it took."""

    def __init__(self, channel: Channel, workload: Workload, trainer: TimedTrainer) -> None:
        self.channel = channel
        self.workload = workload
        self.trainer = trainer
        self.meter = Meter(trainer.model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        recorded = self.workload.is_recorded(state.global_step)
        self.trainer.rollout_func = self.recorded if recorded else None
        self.channel.wait()
        self.trainer.generating = self.trainer.preparing = 0.0
        self.meter.start(self.workload.is_watched(state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        settle()
        trainer, update = self.trainer, time.perf_counter() - self.meter.started - self.trainer.preparing
        figures = self.meter.stop(trainer.generating, update)
        if state.global_step == 1 and self.workload.device == "cpu":  # steps that are done
            file = Path(self.workload.folder) / "trl.pt"
            save_update(file, trainer.model, trainer.optimizer.optimizer, trainer.grad_norm)
        self.channel.reply(figures)

    def recorded(self, prompts: list[str], _: GRPOTrainer) -> dict[str, Any]:
        prompt_ids = [[int(token) for token in prompt.split()] for prompt in prompts]
        return {"prompt_ids": prompt_ids, "completion_ids": self.workload.recorded(), "logprobs": None}


def build_trainer(workload: Workload, micro_batch: int) -> TimedTrainer:
    model = AutoModelForCausalLM.from_pretrained(workload.model, dtype=torch.float32)
    config = GRPOConfig(
        output_dir=str(Path(workload.folder) / "trl"),
        use_cpu=workload.device == "cpu",
        bf16=workload.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False),
        gradient_checkpointing=False,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=workload.rows // micro_batch,
        num_generations=workload.samples,
        max_completion_length=workload.response_tokens,
        temperature=1.0,
        loss_type="dapo",
        scale_rewards="group",
        epsilon=CLIP_RATIO,
        beta=0.0,
        max_grad_norm=CLIP_NORM,
        learning_rate=ADAMW["lr"],
        lr_scheduler_type="constant",
        max_steps=workload.steps + 1,  # the last is not asked for: what it does at its end would disturb the other arm
        seed=workload.seed,
        shuffle_dataset=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # Our own AdamW: the Trainer's would leave norms out of the weight decay.
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)
    return TimedTrainer(
        model=model,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": workload.texts()}),
        processing_class=AutoTokenizer.from_pretrained(workload.model, padding_side="left"),
        optimizers=(optimizer, None),
    )


def reward(completions: list[str], **_: Any) -> list[float]:
    return [score(completion) for completion in completions]


def sweep_micro_batches(workload: Workload) -> dict[int, float]:
    """Micro-batch → seconds that forward and backward of a whole batch would take in such pieces."""
    trainer = build_trainer(workload, workload.rows)
    trainer.current_gradient_accumulation_steps = 1
    sizes = [workload.rows >> halvings for halvings in range(SWEEP) if workload.rows % (1 << halvings) == 0]
    seconds_of_micro_batch(trainer, workload, 1)  # warm-up
    return {size: seconds_of_micro_batch(trainer, workload, size) * workload.rows / size for size in sizes}


def seconds_of_micro_batch(trainer: TimedTrainer, workload: Workload, size: int, least: float = 1.0) -> float:
    """The shortest of as many runs as `least` seconds hold, one at the least."""
    inputs = {
        "prompt_ids": torch.randint(PAD + 1, 500, (size, workload.prompt_tokens)),
        "prompt_mask": torch.ones(size, workload.prompt_tokens, dtype=torch.long),
        "completion_ids": torch.randint(PAD + 1, 500, (size, workload.response_tokens)),
        "completion_mask": torch.ones(size, workload.response_tokens, dtype=torch.long),
        "advantages": torch.randn(size),
        "num_items_in_batch": torch.tensor(size * workload.response_tokens),
    }
    seconds: list[float] = []
    while sum(seconds) < least:
        start = time.perf_counter()
        trainer.compute_loss(trainer.model, inputs).backward()
        seconds.append(time.perf_counter() - start)
        trainer.model.zero_grad()
    return min(seconds)


if __name__ == "__main__":
    main()
