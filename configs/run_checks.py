"""What settings must agree on in every run that trains, by reinforcement or by examples."""

import tempfile
from pathlib import Path

from configs.errors import ConfigError
from configs.loader import workers_asked_for
from configs.schema import CheckpointConfig, RunConfig
from configs.threads import worker_threads


def check_workers(trainer: RunConfig) -> None:
    asked = workers_asked_for(trainer)
    if asked > 1 and trainer.executor == "local":
        raise ConfigError(
            f"trainer.nnodes={trainer.nnodes}, n_gpus_per_node={trainer.n_gpus_per_node}, n_workers_per_node="
            f"{trainer.n_workers_per_node} ask for {asked} workers, and trainer.executor=local has one: leave executor "
            "null (Ray then hosts them), or set each of the three to 1."
        )
    worker_threads(trainer.n_threads)


def check_resume(trainer: RunConfig) -> None:
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path=…/global_step_N.")
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path:
        raise ConfigError(
            f"trainer.resume_from_path={trainer.resume_from_path} is only read with trainer.resume_mode=resume_path."
        )


def check_save_contents(key: str, checkpoint: CheckpointConfig) -> None:
    if unknown := set(checkpoint.save_contents) - {"model", "optimizer", "extra", "hf_model"}:
        raise ConfigError(
            f"{key} holds {sorted(unknown)}: it can hold model, optimizer, extra and hf_model; resuming needs the "
            "first three."
        )


def check_output_folder(path: str, key: str = "trainer.default_local_dir") -> None:
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"a full disk takes a file, but nothing into it")
    except OSError as error:
        raise ConfigError(f"{key}={path} cannot be written to ({error.strerror}): name another folder.") from error
