"""Supervised training on prompts with responses and on conversations: python -m training.sft_trainer key=value …

The result is a warm start for reinforcement learning, or used as it is. The loss is the mean negative log-likelihood
of a response, or of the answers in a conversation; all other tokens are only read.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module

from configs.checks import check_sft
from configs.loader import command
from configs.schema import (
    ActorConfig,
    ActorRolloutRefConfig,
    Config,
    DataConfig,
    PolicyLossConfig,
    RolloutConfig,
    SFTConfig,
    TrainerConfig,
)

main = command("sft", SFTConfig, check_sft, __doc__, "training.sft_trainer.start")
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds

from configs.errors import refusals, users_line_noted
from data.files import sole_run
from training.supervised import SFTParts, SFTTrainer, files_to_come, prepare
from workers.remote_roles import RemoteActor
from workers.worker_group import check_machine, start_command, start_pools, worker_summary


def start(config: SFTConfig) -> None:
    """Trains from a command line: checks all that does not need workers first, and refuses in one line."""
    with refusals():
        check_machine(worker_config(config))
    with sole_run(config.trainer.default_local_dir):
        with refusals():
            parts = prepare(config)
        start_command(worker_config(config))
        train(config, parts)


def run(config: SFTConfig) -> Path:
    """Trains by `config`, and returns the Hugging Face directory of the result."""
    with sole_run(config.trainer.default_local_dir):
        return train(config, prepare(config))


def worker_config(config: SFTConfig) -> Config:
    """The settings by which an ordinary worker plays the actor: the loss is the plain policy gradient."""
    rows, tokens = config.data.micro_batch_size_per_gpu, config.data.max_token_len_per_gpu
    actor = ActorConfig(
        ppo_micro_batch_size_per_gpu=rows,
        ppo_max_token_len_per_gpu=tokens,
        policy_loss=PolicyLossConfig(loss_mode="gpg"),
        optim=config.optim,
        fsdp_config=config.fsdp_config,
        checkpoint=config.checkpoint,
    )
    rollout = RolloutConfig(
        response_length=0, log_prob_micro_batch_size_per_gpu=rows, log_prob_max_token_len_per_gpu=tokens
    )
    return Config(
        data=DataConfig(max_prompt_length=config.data.max_length),  # of the whole row: nothing is generated
        actor_rollout_ref=ActorRolloutRefConfig(model=config.model, actor=actor, rollout=rollout),
        trainer=TrainerConfig(**vars(config.trainer)),
    )


@users_line_noted()
def train(config: SFTConfig, parts: SFTParts) -> Path:
    """Starts the workers and runs the training loop, in a folder that this run has locked."""
    print(worker_summary(config.trainer), files_to_come(config.trainer, parts.total_steps), sep="\n")
    pools = start_pools(worker_config(config), parts.total_steps, ["actor"])
    try:
        trainer = SFTTrainer(config, parts, RemoteActor(pools["actor"], "actor"))
        trainer.fit()
        return trainer.folder / f"global_step_{trainer.global_step}" / "huggingface"
    finally:
        pools["actor"].close()
