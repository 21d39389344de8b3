"""Makes a folder for from_pretrained of a checkpoint's shards, ours or those that verl's FSDP2 wrote.

    python -m extras.merge merge --backend fsdp --local_dir outputs/NAME/global_step_N/actor --target_dir MODEL

Any number of workers may have written them. Weights keep the precision that they were trained in. The folder gets a
README.md, the model's card. --push_to_hub USER/NAME uploads it, to a private repository unless --no-private is given.
"""

from configs.errors import refusals  # isort: skip

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from huggingface_hub.utils import validate_repo_id
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoConfig

from extras.merge.card import push, write_card
from training.checkpoint import FILE_ERRORS, read_part, unreadable
from training.model_shards import MODEL, Shards, check_names, distinct_tensors

HUGGINGFACE = "huggingface"
NO_MEGATRON = "--backend megatron: verl reads those shards: python -m verl.model_merger merge --backend megatron …"


def merge(local_dir: Path, target_dir: Path) -> None:
    """Writes the model whose checkpoint is in `local_dir`, an actor's or critic's folder, into `target_dir`."""
    source = local_dir / HUGGINGFACE
    if not (source / "config.json").is_file():
        raise ValueError(f"--local_dir {local_dir} lacks {HUGGINGFACE}/config.json: name actor/ of a global_step_N.")
    check_links(local_dir)
    if any(target_dir.glob("*.safetensors")):
        raise ValueError(f"--target_dir {target_dir} holds weights already: name another folder.")
    weights = Shards(local_dir / MODEL).read_all() if (local_dir / MODEL).is_dir() else read_ranks(local_dir)
    if any(".lora_" in name for name in weights):
        raise ValueError(f"{local_dir} holds LoRA's matrices alone, for peft: its weights are in {HUGGINGFACE}/.")
    config = AutoConfig.from_pretrained(source)
    kind = (config.architectures or ["none"])[0]
    if kind not in dir(transformers):
        raise ValueError(f"{source}/config.json names the architecture {kind}, which transformers does not have.")
    try:
        with torch.device("meta"):
            model = getattr(transformers, kind)(config)
        check_names(weights, distinct_tensors(model), model.state_dict())
        model.load_state_dict(weights, strict=False, assign=True)
        model.tie_weights()
    except FILE_ERRORS as error:
        raise unreadable(local_dir, error) from error
    model.save_pretrained(target_dir)
    shutil.copytree(source, target_dir, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)


def check_links(local_dir: Path) -> None:
    """Raises ValueError for a link among the files to copy that names more than a file of the checkpoint: whoever made
    it may have meant a file of yours to be published."""
    source = local_dir / HUGGINGFACE
    for link in filter(Path.is_symlink, (source, *source.rglob("*"))):
        target = link.resolve()
        if not target.is_file() or not target.is_relative_to(local_dir.resolve()):
            rule = f"only links to files in {local_dir} are followed"
            raise ValueError(f"{link} is a link to {target}: {rule}. Delete it, or put what it names in its place.")


def read_ranks(folder: Path) -> dict[str, Tensor]:
    """Reads the weights that the ranks of a verl run wrote: model_world_size_N_rank_i.pt."""
    files = [*folder.glob("model_world_size_*_rank_*.pt")]
    size = max((int(path.stem.split("_")[3]) for path in files), default=1)
    states: list[dict[str, Tensor]] = []
    for rank in range(size):
        path = folder / f"model_world_size_{size}_rank_{rank}.pt"
        read_part(path, states.append, mapped=True)
    try:
        return {name: join([state[name] for state in states]) for name in states[0]}
    except FILE_ERRORS as error:
        raise unreadable(path, error) from error


@torch.no_grad()
def join(parts: Sequence[Tensor]) -> Tensor:
    """Joins a tensor from its parts on each rank, in order of ranks; neighbours have neighbouring parts."""
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    cuts = [placement for placement in first.placements if not placement.is_replicate()]
    if not cuts:
        return first.to_local()
    if len(cuts) > 1 or type(cuts[0]) is not Shard:
        raise ValueError(f"a tensor is cut as {first.placements}: only those of one cut can be put together")
    pieces, left, dim = [], first.shape[cuts[0].dim], cuts[0].dim
    for part in parts:
        if left > 0:  # else the ranks of another replica are left
            pieces.append(part.to_local())
            left -= pieces[-1].shape[dim]
    if left:
        raise ValueError(f"the parts of a tensor of shape {tuple(first.shape)} do not make it up")
    return torch.cat(pieces, dim)


def main(argv: list[str] | None = None) -> None:
    """Merges as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=["merge"])
    parser.add_argument("--backend", choices=["fsdp", "megatron"], required=True)
    parser.add_argument("--local_dir", type=Path, required=True, help="actor/ or critic/ of a checkpoint")
    parser.add_argument("--target_dir", type=Path, required=True, help="where the model goes")
    parser.add_argument("--push_to_hub", "--hf_upload_path", metavar="USER/NAME", help="where to upload the folder")
    parser.add_argument("--private", action=argparse.BooleanOptionalAction, default=True, help="for you alone")
    arguments = parser.parse_args(argv)
    if arguments.backend == "megatron":
        parser.error(NO_MEGATRON)
    with refusals():
        if name := arguments.push_to_hub:
            validate_repo_id(name)
        merge(arguments.local_dir, arguments.target_dir)
        write_card(arguments.local_dir, arguments.target_dir, name)
        print(f"from_pretrained loads {arguments.target_dir}; its card is README.md.")
        if name:
            print(f"uploaded to {push(arguments.target_dir, name, arguments.private)}")


if __name__ == "__main__":
    main()
