"""Our side of benchmarks/vs_trl.py: RayPPOTrainer's step, its worker in this process."""

import configs.process  # noqa: F401  isort: skip  before torch

import json
from pathlib import Path

from benchmarks.workload import ADAMW, CLIP_NORM, CLIP_RATIO, Channel, Meter, Workload, read_arguments, save_update
from configs.checks import check_config
from configs.loader import CONFIG_DIR, Arguments, load_config
from configs.schema import Config
from training.preparation import prepare
from training.ray_trainer import RayPPOTrainer
from training.roles import Roles, SamplingParams
from workers.model_worker import ModelWorker
from workers.rollout import Completion, Rollout
from workers.worker_group import ActorRole, LocalWorkerGroup, RolloutRole, start_worker_group


def main() -> None:
    channel = Channel()
    workload, overrides = read_arguments()
    arm = OursArm(workload, overrides)
    channel.reply({"ready": True})
    for step in range(workload.steps):
        channel.wait()
        channel.reply(arm.step(step))


class OursArm:
    """A trainer as main.py makes it, stepped one by one; `overrides` are key=value of its config."""

    def __init__(self, workload: Workload, overrides: list[str]) -> None:
        self.workload = workload
        config = config_of(workload, overrides)
        parts = prepare(config)
        self.group = start_worker_group(config, parts.total_steps, with_ref=False, with_critic=False)
        assert isinstance(self.group, LocalWorkerGroup), "the benchmark measures the local executor"
        self.worker: ModelWorker = self.group.worker
        self.trainer = RayPPOTrainer(
            config,
            tokenizer=parts.tokenizer,
            roles=Roles(RolloutRole(self.group), ActorRole(self.group), ref=None, critic=None),
            reward=parts.reward,
            train_loader=parts.train_loader,
            validator=None,
            total_steps=parts.total_steps,
        )
        self.engine = self.worker.actor.engine
        self.rollout = self.worker.rollout
        self.recorded = RecordedRollout(config.actor_rollout_ref.rollout, parts.tokenizer, None)
        self.recorded.responses = workload.recorded()
        self.meter = Meter(self.engine.module)

    def step(self, step: int) -> dict[str, float]:
        self.worker.rollout = self.recorded if self.workload.is_recorded(step) else self.rollout
        self.trainer.global_step = step + 1
        self.meter.start()
        _, metrics = self.trainer.step()
        figures = self.meter.stop(metrics["timing_s/gen"], metrics["timing_s/update_actor"])
        if step == 0:
            file = Path(self.workload.folder) / "ours.pt"
            save_update(file, self.engine.module, self.engine.optimizer, metrics["actor/grad_norm"])
        return figures


class RecordedRollout(Rollout):
    """Gives out `responses`, in the order of the rows, whatever the prompts."""

    responses: list[list[int]]

    def generate(self, prompts: list[list[int]], sampling: SamplingParams, seed: int) -> list[Completion]:
        return [Completion(ids, [0.0] * len(ids), "length", self.weight_version) for ids in self.responses]


def config_of(workload: Workload, overrides: list[str]) -> Config:
    """The workload as a run's config: GRPO on a file of prompts, nothing logged or saved."""
    folder = Path(workload.folder)
    texts = workload.texts()
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "data_source": "vs_trl"}) + "\n" for text in texts))
    actor = "actor_rollout_ref.actor"
    settings = {
        "data.train_files": prompts,
        "data.train_batch_size": workload.prompts,
        "data.shuffle": "false",
        "data.max_prompt_length": max(len(text.split()) for text in texts),
        "data.max_response_length": workload.response_tokens,
        "actor_rollout_ref.model.path": workload.model,
        "actor_rollout_ref.rollout.n": workload.samples,
        f"{actor}.clip_ratio": CLIP_RATIO,
        f"{actor}.optim.lr": ADAMW["lr"],
        f"{actor}.optim.betas": list(ADAMW["betas"]),
        f"{actor}.optim.weight_decay": ADAMW["weight_decay"],
        f"{actor}.optim.clip_grad": CLIP_NORM,
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": "benchmarks/workload.py",
        "reward.custom_reward_function.name": "score",
        "trainer.seed": workload.seed,
        "trainer.default_local_dir": folder / "ours",
        "trainer.total_training_steps": workload.steps,
        "trainer.executor": "local",
        "trainer.n_gpus_per_node": 0,
        "trainer.val_before_train": "false",
        "trainer.resume_mode": "disable",
        "trainer.logger": "[]",
    }
    own = [f"{key}={value}" for key, value in settings.items()]
    config = load_config(Arguments("ppo_trainer", CONFIG_DIR, own + overrides, print_config=False), Config)
    check_config(config)
    return config


if __name__ == "__main__":
    main()
