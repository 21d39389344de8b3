"""Makes a folder for from_pretrained of a checkpoint's shards:

    python -m extras.merge merge --backend fsdp --local_dir outputs/NAME/global_step_N/actor --target_dir MODEL

Reads the shards of any number of workers, ours or verl's FSDP2. Weights keep the precision that they were trained in.
"""

from configs.errors import refusals  # isort: skip

import argparse
import shutil
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from training.checkpoint import FILE_ERRORS, unreadable
from training.model_shards import MODEL, check_names, check_shape, once, rank_files, read_weights, write_pretrained

HUGGINGFACE = "huggingface"
NO_MEGATRON = (
    "--backend megatron: Megatron-LM's checkpoints have a format of their own, which megatron-core reads on a GPU. "
    "Merge them with verl: python -m verl.model_merger merge --backend megatron …"
)


def merge(local_dir: Path, target_dir: Path) -> None:
    """Writes the model whose checkpoint is in `local_dir`, an actor's or critic's folder, into `target_dir`.

    Raises:
        ValueError: a folder is not as it has to be, or a file cannot be read; names it and the remedy.
    """
    source = local_dir / HUGGINGFACE
    if not (local_dir / MODEL).is_dir() and not rank_files(local_dir, MODEL):
        within = [path.name for path in sorted(local_dir.glob("*")) if (path / HUGGINGFACE).is_dir()]
        remedy = (
            f"Name one of its folders: {', '.join(within)}" if within else "Name the folder actor of a global_step_N"
        )
        raise ValueError(
            f"--local_dir {local_dir} has no weights, neither {MODEL}/ nor model_world_size_N_rank_0.pt. {remedy}."
        )
    if not (source / "config.json").is_file():
        raise ValueError(
            f"--local_dir {local_dir} lacks {HUGGINGFACE}/config.json, which says what the weights are of."
        )
    if any(target_dir.glob("*.safetensors")):
        raise ValueError(f"--target_dir {target_dir} holds weights already: name another folder.")
    path, weights = read_weights(local_dir)
    if any(".lora_" in name for name in weights):
        raise ValueError(
            f"{path} holds LoRA's matrices alone: peft loads {local_dir}/lora_adapter beside the model that was "
            "trained, and checkpoint.save_contents with hf_model writes both as one."
        )
    config = AutoConfig.from_pretrained(source)
    kind = (config.architectures or ["none"])[0]
    if kind not in dir(transformers):
        raise ValueError(f"{source}/config.json names the architecture {kind}, which transformers does not have.")
    try:
        with torch.device("meta"):
            model = getattr(transformers, kind)(config)
        wanted = once(model)
        check_names(weights, wanted, model.state_dict())
        for name, weight in wanted.items():
            check_shape(name, weights[name].shape, weight.shape)
    except FILE_ERRORS as error:
        raise unreadable(path, error) from error
    shutil.copytree(source, target_dir, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    plain = revert_weight_conversion(model, {name: weights[name] for name in wanted})
    write_pretrained(target_dir, iter(plain.items()))


def main(argv: list[str] | None = None) -> None:
    """Merges by a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=["merge"])
    parser.add_argument("--backend", choices=["fsdp", "megatron"], required=True)
    parser.add_argument("--local_dir", type=Path, required=True, help="actor/ or critic/ of a checkpoint")
    parser.add_argument("--target_dir", type=Path, required=True, help="where the model goes")
    arguments = parser.parse_args(argv)
    if arguments.backend == "megatron":
        parser.error(NO_MEGATRON)
    with refusals():
        merge(arguments.local_dir, arguments.target_dir)
    print(f"from_pretrained loads {arguments.target_dir}.")


if __name__ == "__main__":
    main()
