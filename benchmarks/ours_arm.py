"""Our side of benchmarks/vs_trl.py: RayPPOTrainer's step, its worker in this process, or several of them behind Ray."""

from configs.process import set_environment  # isort: skip

if __name__ == "__main__":
    set_environment()  # before torch is loaded

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.workload import (
    ADAMW,
    CLIP_NORM,
    CLIP_RATIO,
    Channel,
    Meter,
    Workload,
    cpu_seconds,
    read_arguments,
    save_update,
    settle,
)
from configs.checks import check_config
from configs.loader import CONFIG_DIR, Arguments, load_config
from configs.schema import Config
from data.protocol import DataProto, object_array
from data.types import Completion, Request
from training.plan import make_plan
from training.preparation import build_datasets, build_reward, prepare
from training.ray_trainer import RayPPOTrainer
from workers.collectives import rank
from workers.group import Group, LocalGroup, roles_of
from workers.model_worker import ModelWorker
from workers.ray_group import start_command, start_workers
from workers.rollout import Rollout
from workers.weight_sync import sync_class


def main() -> None:
    channel = Channel()
    workload, overrides = read_arguments()
    arm = OursArm(workload, overrides)
    channel.reply({"ready": True})
    try:
        for step in range(workload.steps):
            channel.wait()
            channel.reply(arm.step(step))
    finally:
        arm.group.close()


class OursArm:
    """A trainer as main.py makes it, stepped one by one; `overrides` are key=value of its config."""

    def __init__(self, workload: Workload, overrides: list[str]) -> None:
        self.workload = workload
        config = config_of(workload, overrides)
        plan = make_plan(config)
        parts = prepare(plan, build_datasets(plan, None)[0], build_reward(plan, None), None, None)
        self.group = start_group(config, parts.total_steps)
        roles = roles_of(dict.fromkeys(["actor", "rollout"], self.group), config)
        self.trainer = RayPPOTrainer(
            config,
            tokenizer=plan.tokenizer,
            roles=roles,
            reward=parts.reward,
            train_loader=parts.train_loader,
            total_steps=parts.total_steps,
        )
        responses = DataProto.from_dict(None, {"responses": object_array(workload.recorded())})
        self.of_meters("record", [(share,) for share in responses.chunk_uneven(self.group.size)])

    def step(self, step: int) -> dict[str, float]:
        start = self.workload.is_recorded(step), self.workload.is_watched(step)
        self.of_meters("start", [start] * self.group.size)
        self.trainer.global_step = step + 1
        started, used = time.perf_counter(), cpu_seconds()
        _, metrics = self.trainer.step()
        settle()
        seconds, used = time.perf_counter() - started, cpu_seconds() - used
        rollout, update = metrics["timing_s/gen"], metrics["timing_s/update_actor"]
        by_rank = self.of_meters("stop", [(rollout, update)] * self.group.size)
        figures = {name: sum(figures[name] for figures in by_rank) for name in by_rank[0]}
        if not isinstance(self.group, LocalGroup):  # then this process is none of the workers'
            figures["cpu_seconds"] += used
        if step == 0 and self.workload.device == "cpu":
            file = Path(self.workload.folder) / "ours.pt"
            self.of_meters("save_update", [(file, metrics["actor/grad_norm"])] * self.group.size)
        times = {"step": seconds, "rollout": rollout, "update": update, "other": seconds - rollout - update}
        times["sync"] = metrics.get("timing_s/update_weights", 0.0)
        return figures | times

    def of_meters(self, method: str, shares: list[tuple]) -> list[Any]:
        """Asks the workers' meters, and returns their answers by rank."""
        return self.group.submit("meter", method, shares).result()


def start_group(config: Config, total_steps: int) -> Group:
    start_command(config)
    return start_workers(config, MeteredWorker, config, total_steps, ["actor", "rollout"])


class MeteredWorker(ModelWorker):
    """A worker with a role more: a meter, which can also put the recorded batch in the rollout's place."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.roles["meter"] = WorkerMeter(self)


class WorkerMeter:
    def __init__(self, worker: ModelWorker) -> None:
        self.policy, self.rollout = worker.policy, worker.roles["rollout"]
        self.meter = Meter(worker.policy.module)
        self.sampled = self.rollout.engine
        self.recorded = RecordedRollout(worker.config.actor_rollout_ref.rollout, worker.tokenizer, None)

    def record(self, responses: DataProto) -> None:
        """Takes this worker's share of the recorded batch."""
        self.recorded.responses = list(responses.non_tensor_batch["responses"])

    def start(self, is_recorded: bool, is_watched: bool) -> None:
        """Begins a step by the recorded batch or by the engine, which sleeps meanwhile and then has new weights."""
        engine = self.recorded if is_recorded else self.sampled
        if engine is not self.rollout.engine:
            self.rollout.engine.sleep()
            self.rollout.engine, self.rollout.sync = engine, sync_class()(engine, self.policy)
            if engine.own_weights:
                self.rollout.update_weights(self.recorded.weight_version)
        self.meter.start(is_watched)

    def stop(self, rollout: float, update: float) -> dict[str, float]:
        return self.meter.stop(rollout, update)

    def save_update(self, file: Path, grad_norm: float) -> None:
        if rank() == 0:
            save_update(file, self.policy.module, self.policy.optimizer, grad_norm)


class RecordedRollout(Rollout):
    """Gives out `responses`, in the order of the rows, whatever the prompts."""

    responses: list[list[int]]

    def generate(self, requests: list[Request]) -> list[Completion]:
        return [
            Completion(request.id, ids, [0.0] * len(ids), "length", self.weight_version)
            for request, ids in zip(requests, self.responses, strict=True)
        ]


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
        "actor_rollout_ref.model.enable_gradient_checkpointing": "false",  # as TRL's arm
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
        "trainer.n_gpus_per_node": int(workload.device == "cuda"),
        "trainer.val_before_train": "false",
        "trainer.resume_mode": "disable",
        "trainer.logger": "[]",
    }
    defaults = [f"{key}={value}" for key, value in settings.items()]
    config = load_config(Arguments("ppo_trainer", CONFIG_DIR, defaults + overrides, print_config=False), Config)
    check_config(config)
    return config


if __name__ == "__main__":
    main()
