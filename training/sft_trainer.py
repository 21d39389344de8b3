"""Supervised training on prompts with responses and on conversations: python -m training.sft_trainer key=value …

It gives a warm start to reinforcement learning, or is all there is. The loss is the mean negative log-likelihood of
what is learnt, a response or the answers of a conversation; everything else is read.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module

from configs.checks import check_sft
from configs.errors import late_refusals, refusals, users_line_noted
from configs.loader import load_config, parse_arguments
from configs.process import end_on_interrupt, set_environment
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
from data.files import sole_run

if TYPE_CHECKING:
    from training.supervised import SFTParts

# torch, transformers and ray are imported inside functions: --help and config errors answer at once.


def main(argv: list[str] | None = None) -> None:
    set_environment()
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv, "sft", __doc__)
    with refusals():
        config = load_config(arguments, SFTConfig)
        check_sft(config)
        from training.supervised import prepare
        from workers.worker_group import check_machine, start_command

        check_machine(worker_config(config))
    with late_refusals(), sole_run(config.trainer.default_local_dir):
        with refusals():
            parts = prepare(config)
        start_command(worker_config(config))
        train(config, parts)


def run(config: SFTConfig) -> Path:
    """Trains as `config` says; returns the Hugging Face directory of the result."""
    from training.supervised import prepare

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
def train(config: SFTConfig, parts: "SFTParts") -> Path:
    """Starts the workers and runs the loop, in a folder that this run holds."""
    from training.supervised import SFTTrainer, files_to_come
    from workers.remote_roles import RemoteActor
    from workers.worker_group import start_pools, worker_summary

    print(worker_summary(config.trainer), files_to_come(config.trainer, parts.total_steps), sep="\n")
    pools = start_pools(worker_config(config), parts.total_steps, ["actor"])
    try:
        trainer = SFTTrainer(config, parts, RemoteActor(pools["actor"], "actor"))
        trainer.fit()
        return trainer.folder / f"global_step_{trainer.global_step}" / "huggingface"
    finally:
        pools["actor"].close()


if __name__ == "__main__":
    end_on_interrupt()
    main()
