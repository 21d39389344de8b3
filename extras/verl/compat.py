"""Functions that code written for verl imports and that this project itself does not call.

extras/verl/names.yaml says which module of verl has each; extras/verl/imports.py finds them where a file imports verl.
`python -m extras.verl.compat FILE ARGUMENTS` runs a script that does so. Once this module is imported, `DataProto` has
further methods of verl's.
"""

import configs.process  # noqa: F401, isort: skip

import os
import runpy
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from configs import schema
from configs.extras import present
from configs.import_utils import find
from data.pretrained import as_users_read
from data.protocol import AUTO_PADDING, DataProto, DataProtoItem, object_array
from extras.tools.tool_classes import BaseTool, ToolSchema
from extras.verl.imports import StandIns
from extras.verl.keys import judge
from training import core_algos
from training.core_algos import (
    agg_loss,
    clip_bounds,
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
)
from training.losses import zero_masked
from training.metric_utils import timer
from training.roles import needed_roles

OpenAIFunctionToolSchema = OpenAIFunctionSchema = ToolSchema
OpenAIFunctionParametersSchema = OpenAIFunctionPropertySchema = ToolSchema
ACTOR = "actor_rollout_ref.actor"
__version__ = "0.9.1"  # the version of verl whose names and keys are meant where versions differ


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """Appends rows, cyclically from the first, until `size_divisor` divides the length; also returns how many."""
    pad_size = -len(data) % size_divisor
    return (data[np.arange(len(data) + pad_size) % len(data)] if pad_size else data), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """Drops the last `pad_size` rows."""
    return data[:-pad_size] if pad_size else data


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Joins rows into a batch: tensors are stacked, anything else becomes an object array."""
    tensors = {name: torch.stack([row.batch[name] for row in x]) for name in x[0].tensors}
    arrays = {name: object_array([row.non_tensor_batch[name] for row in x]) for name in x[0].non_tensor_batch}
    return DataProto.from_dict(tensors, arrays)


def serialize_single_tensor(tensor: Tensor) -> tuple[str, tuple[int, ...], np.ndarray]:
    """Returns (dtype, shape, bytes as uint8) of a tensor."""
    flat = tensor.cpu().contiguous().view(-1)
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy()


def deserialize_single_tensor(state: tuple[str, tuple[int, ...], np.ndarray]) -> Tensor:
    """Makes a CPU tensor of what `serialize_single_tensor` returned."""
    dtype, shape, data = state
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    tensor.view(-1).view(torch.uint8).numpy()[:] = data  # copied, as it may be read-only
    return tensor


def reorder(self: DataProto, indices: Sequence[int] | Tensor) -> None:
    """Puts the rows into the order `indices`, in place."""
    ordered = self.select_idxs(indices)
    self.batch, self.non_tensor_batch = ordered.batch, ordered.non_tensor_batch


def make_iterator(
    self: DataProto, mini_batch_size: int, epochs: int, seed: int | None = None, dataloader_kwargs: dict | None = None,
) -> Iterator[DataProto]:  # fmt: skip
    """Cuts mini-batches, `epochs` times; `dataloader_kwargs={"shuffle": True}` shuffles, `seed` fixes the order."""
    rows, options = range(len(self)), dataloader_kwargs or {}
    assert len(rows) % mini_batch_size == 0, f"{len(rows)} rows do not divide into batches of {mini_batch_size}"
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    loader = DataLoader(rows, mini_batch_size, generator=generator, collate_fn=self.select_idxs, **options)
    return (mini_batch for _ in range(epochs) for mini_batch in loader)


def sample_level_repeat(self: DataProto, repeat_times: Sequence[int] | Tensor) -> DataProto:
    """Returns row i `repeat_times[i]` times, in the order of the rows."""
    assert len(repeat_times) == len(self), f"{len(repeat_times)} numbers of repeats for {len(self)} rows"
    return self[np.repeat(np.arange(len(self)), torch.as_tensor(repeat_times).numpy())]


def unfold_column_chunks(self: DataProto, n_split: int, split_keys: Sequence[str] | None = None) -> DataProto:
    """Cuts each row of `split_keys`, [B, C, …], into n_split, [B · n_split, C / n_split, …]; other columns repeat."""

    def unfold(name: str, column: Any) -> Any:
        if name not in (split_keys or ()):
            return column[np.repeat(np.arange(len(self)), n_split)]
        return column.reshape(len(self) * n_split, column.shape[1] // n_split, *column.shape[2:])

    kinds = self.tensors, self.non_tensor_batch
    tensors, arrays = ({name: unfold(name, kind[name]) for name in kind} for kind in kinds)
    return type(self).from_dict(tensors, arrays, self.meta_info)


def padding(self: DataProto, padding_size: int, padding_candidate: str = "") -> None:
    """Appends the last row, or with "first" the first, `padding_size` times, in place."""
    row = 0 if padding_candidate == "first" else len(self) - 1
    grown = self[[*range(len(self)), *[row] * padding_size]]
    self.batch, self.non_tensor_batch = grown.batch, grown.non_tensor_batch


def is_padding_enabled(self: DataProto) -> bool:
    """Says whether the batch was made with auto_padding=True: chunk() then takes numbers that do not divide it."""
    return bool(self.meta_info.get(AUTO_PADDING))


def to_tensordict(self: DataProto) -> TensorDict:
    """Returns all columns in one TensorDict: arrays as stacks of a value a row, meta_info as single values."""
    names = [*self.tensors, *self.non_tensor_batch, *self.meta_info]
    assert len(set(names)) == len(names), f"a name stands in two of batch, non_tensor_batch and meta_info: {names}"
    stacks = {name: NonTensorStack(*map(NonTensorData, rows)) for name, rows in self.non_tensor_batch.items()}
    values = {name: NonTensorData(value) for name, value in self.meta_info.items()}
    return TensorDict(self.tensors | stacks | values, batch_size=[len(self)])


def from_tensordict(
    cls: type[DataProto], tensor_dict: TensorDict, meta_info: dict[str, Any] | None = None, num_batch_dims: int = 1
) -> DataProto:
    """Undoes `to_tensordict`; `meta_info` goes before what the TensorDict has."""
    tensors, arrays, values = {}, {}, {}
    for name in tensor_dict.keys():  # noqa: SIM118 - iterating a TensorDict gives rows
        column = tensor_dict.get(name)
        if isinstance(column, Tensor):
            tensors[name] = column
        elif isinstance(column, NonTensorStack):
            arrays[name] = object_array(column.tolist())
        else:
            values[name] = column.data
    return cls.from_dict(tensors, arrays, values | (meta_info or {}), num_batch_dims)


def get_data_info(self: DataProto) -> str:
    """Describes the columns in lines, in the sections batch, non_tensor_batch and meta_info."""
    tensors = [f"  {name}: {tuple(value.shape)} ({value.dtype}) {value.device}" for name, value in self.tensors.items()]
    arrays = [f"  {name}: {value.shape} ({value.dtype})" for name, value in self.non_tensor_batch.items()]
    values = [f"  {name}: {type(value).__name__}" for name, value in self.meta_info.items()]
    return "\n".join(["batch", *tensors, "non_tensor_batch", *arrays, "meta_info", *values])


def print_size(self: DataProto, prefix: str = "") -> None:
    """Prints the GiB of the tensors and of the arrays."""
    sizes = [sum(value.nbytes for value in kind.values()) / 2**30 for kind in (self.tensors, self.non_tensor_batch)]
    print(f"{prefix}Size of tensordict: {sizes[0]} GB, size of non_tensor_batch: {sizes[1]} GB")


def chunk(self: DataProto, chunks: int) -> list[DataProto]:
    """Cuts `chunks` consecutive pieces of equal size; with auto_padding the last may be shorter, or fewer."""
    if self.meta_info.get(AUTO_PADDING):
        return self.split(-(-len(self) // chunks))
    assert len(self) % chunks == 0, f"only support equal chunk. Got size of DataProto {len(self)} and chunk {chunks}"
    return self.chunk_uneven(chunks)


def rename(self: DataProto, old_keys: str | list[str], new_keys: str | list[str]) -> DataProto:
    """Renames tensors in place; returns self."""
    old, new = ([keys] if isinstance(keys, str) else [*keys] for keys in (old_keys, new_keys))
    remaining = [name for name in (*self.tensors, *self.non_tensor_batch) if name not in old]
    if len(old) != len(new) or len({*new, *remaining}) < len(new) + len(remaining):
        raise ValueError(f"each of {old} needs one new name, unlike the other columns {remaining}; got {new}")
    renamed = self.pop(old).tensors  # all are taken out first, so that two names can be swapped
    self.batch.update(dict(zip(new, renamed.values(), strict=True)))
    return self


for name in (name.removeprefix("DataProto.") for name in present("optional") if name.startswith("DataProto.")):
    setattr(DataProto, name, globals()[name])
DataProto.from_tensordict = classmethod(from_tensordict)


def entropy_from_logits(logits: Tensor, chunk_size: int = 2048) -> Tensor:
    """Entropy in nats of each softmax: [..., V] of any float dtype -> [...] float32; at once, whatever `chunk_size`."""
    log_probs = logits.float().log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1)


def get_response_mask(
    response_id: Tensor, eos_token: int | Sequence[int] = 2, dtype: torch.dtype = torch.int64
) -> Tensor:
    """1 up to and including the first end-of-sequence token (any of `eos_token`), 0 after it; [B, R] -> [B, R]."""
    is_eos = torch.isin(response_id, torch.as_tensor(eos_token, device=response_id.device)).long()
    eos_before = is_eos.cumsum(-1) - is_eos
    return (eos_before == 0).to(dtype)


def pad_2d_list_to_length(response: Sequence[Sequence], pad_token_id: float, max_length: int | None = None) -> Tensor:
    """Ragged rows -> one right-padded tensor [len(response), max(longest row, max_length)]."""
    width = max(max(map(len, response), default=0), max_length or 0)
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """Pads the last axis to `max_seq_len`; a longer tensor comes back as it is."""
    missing = max(0, max_seq_len - tensors.shape[-1])
    return F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor, attention_mask: Tensor, max_length: int, pad_token_id: int, left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Pads or truncates ids and attention mask, both [B, L], to [B, max_length].

    `truncation` names the side that is cut: "left" keeps the last tokens, "middle" the first max_length // 2 and the
    rest from the end; "error" raises NotImplementedError.
    """
    sides = ("left", "right", "middle", "error")
    assert truncation in sides, f"truncation is {truncation!r}, but must be one of {sides}"
    assert input_ids.ndim == 2, f"input_ids has shape {tuple(input_ids.shape)}, but must be [batch, length]"
    length = input_ids.shape[-1]
    if length <= max_length:
        padded_ids = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
        return padded_ids, pad_sequence_to_length(attention_mask, max_length, 0, left_pad)
    if truncation == "error":
        raise NotImplementedError(f"a sequence has {length} tokens, but at most {max_length} may be: set truncation")
    num_head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    first_of_tail = length - (max_length - num_head)
    indices = [*range(num_head), *range(first_of_tail, length)]
    return input_ids[:, indices], attention_mask[:, indices]


def compute_response_mask(data: DataProto) -> Tensor:
    """Returns the part of the attention mask that covers the responses, [B, R]."""
    return data.batch["attention_mask"][:, -data.batch["responses"].shape[1] :]


compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage  # verl's loop-free twin; here none loops


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Returns scores - kl_ratio · (old_log_prob - ref_log_prob), [B, R]; nothing is masked."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


def compute_policy_loss(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, cliprange: float | None = None,
    *, cliprange_low: float | None = None, cliprange_high: float | None = None, clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Calls `compute_policy_loss_vanilla` as before there were configs; low and high default to `cliprange`.

    Returns:
        (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower), scalar tensors.
    """
    bounds = {"clip_ratio": cliprange, "clip_ratio_low": cliprange_low, "clip_ratio_high": cliprange_high}
    config = ActorConfig(**bounds, clip_ratio_c=clip_ratio_c)
    if None in clip_bounds(config):
        raise ValueError("compute_policy_loss: pass cliprange, or both cliprange_low and cliprange_high.")
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    names = ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower")
    return loss, *(metrics[f"actor/{name}"].detach().to(loss) for name in names)


def compute_policy_loss_reinforce(rollout_log_prob: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Any]]:
    """Calls `core_algos.compute_policy_loss_reinforce`; the first argument has verl's name."""
    return core_algos.compute_policy_loss_reinforce(rollout_log_prob, *args, **kwargs)


class ActorConfig(schema.ActorConfig):
    """The actor's settings by all of verl's keys, with counts for agg_loss."""

    def __init__(self, global_batch_info: dict[str, Any] | None = None, **settings: Any) -> None:
        known = {item.name for item in fields(schema.ActorConfig)}
        verdicts = {key: judge(f"{ACTOR}.{key}", None, schema.Config).kind for key in settings.keys() - known}
        super().__init__(**{key: it for key, it in settings.items() if verdicts.get(key) in (None, "unknown")})
        vars(self)["global_batch_info"] = global_batch_info or {}  # which is no setting


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregated entropy of logits [B, R, V]: a bonus, to be subtracted from the loss."""
    logits = zero_masked(logits, response_mask.unsqueeze(-1))
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


def load_all_tools(tool_config_path: str | None = None, function_tool_path: str | None = None) -> list[BaseTool]:
    """Returns the tools of a yaml and of a file of functions in a list."""
    settings = schema.MultiTurnConfig(tool_config_path=tool_config_path, function_tool_path=function_tool_path)
    return [*find("source", "tools")(settings).values()]


@contextmanager
def marked_timer(name: str, timing_raw: dict[str, float], *args: Any, **kwargs: Any) -> Iterator[None]:
    """Adds the seconds of its body to timing_raw[name]; colours and domains of profilers are left out."""
    with timer(name, timing_raw):
        yield


def identity(*args: Any, **kwargs: Any) -> Any:
    """Returns its first argument: a decorator, a log or a conversion of verl's that has nothing to do here."""
    return next(iter((*args, *kwargs.values())), None)


def hf_tokenizer(name_or_path: str, correct_pad_token: bool = True, correct_gemma2: bool = True, **kwargs: Any) -> Any:
    """Loads a tokenizer, with a pad token; Gemma 2's ends a turn as its template does, without being told."""
    return as_users_read(AutoTokenizer.from_pretrained(name_or_path, **kwargs))


def hf_processor(name_or_path: str, **kwargs: Any) -> None:
    """Returns None, as verl does where a model reads text alone."""


def get_checkpoint_tracker_filename(root_path: str) -> str:
    """Returns the path of the file with the number of the newest checkpoint."""
    return os.path.join(root_path, "latest_checkpointed_iteration.txt")


def find_latest_ckpt_path(path: str, directory_format: str = "global_step_{}") -> str | None:
    """Returns the folder of the newest checkpoint in `path`; None: there is none."""
    tracker = Path(get_checkpoint_tracker_filename(path))
    newest = Path(path, directory_format.format(tracker.read_text().strip())) if tracker.is_file() else None
    return str(newest) if newest is not None and newest.is_dir() else None


def copy_to_local(src: str, *args: Any, **kwargs: Any) -> str:
    """Returns a local path as it is. Raises ValueError for an address of another file system."""
    if "://" in src:
        raise ValueError(f"{src}: only local paths are known here; copy it by hand, and give the local path.")
    return src


def copy(src: str, dst: str, **kwargs: Any) -> str:
    """Copies a file, or what a folder holds, and returns the path of the copy. Raises ValueError as `copy_to_local`."""
    if Path(copy_to_local(src)).is_dir():
        return shutil.copytree(src, copy_to_local(dst), dirs_exist_ok=True)
    return shutil.copy(src, copy_to_local(dst))


def makedirs(name: str, mode: int = 0o777, exist_ok: bool = False, **kwargs: Any) -> None:
    """Makes a folder. Raises ValueError as `copy_to_local`."""
    os.makedirs(copy_to_local(name), mode, exist_ok)


class Tracking:
    """Logs metrics to the terminal and to services: the class by which scripts of verl's users log.

    Args:
        default_backend: of console, tensorboard (in tensorboard_log/), wandb, mlflow, trackio, swanlab.
        config: of the run, which services show.
    """

    def __init__(
        self, project_name: str, experiment_name: str, default_backend: Any = "console", config: Any = None
    ) -> None:
        names = [default_backend] if isinstance(default_backend, str) else list(default_backend)
        if unknown := sorted({*names} - {"console", *LOGGER_TYPE_TO_CLASS}):
            raise ValueError(f"Tracking has no backend {unknown}; it has console, {', '.join(LOGGER_TYPE_TO_CLASS)}.")
        PartialState(cpu=True)  # trackers ask it
        self.logger: dict[str, Any] = {name: print for name in names if name == "console"}
        for name in {*names} - {"console"}:
            settings = {"tensorboard": {"logging_dir": "tensorboard_log"}, "mlflow": {"run_name": experiment_name}}
            settings |= {"swanlab": {"experiment_name": experiment_name}}
            run = experiment_name if name == "tensorboard" else project_name
            self.logger[name] = LOGGER_TYPE_TO_CLASS[name](run, **settings.get(name, {"name": experiment_name}))
            self.logger[name].start()
            if name != "tensorboard":  # whose parameters are numbers and texts alone
                self.logger[name].store_init_configuration(dict(config or {}))

    def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
        """Logs the metrics of a step to all backends, or to those that `backend` lists."""
        for name, tracker in self.logger.items():
            if backend is None or name in backend:
                if name == "console":
                    print(f"step:{step} - " + " - ".join(f"{key}:{value}" for key, value in data.items()))
                else:
                    tracker.log(dict(data), step)


if __name__ == "__main__":
    if not Path(*sys.argv[1:2]).is_file():
        raise SystemExit("usage: python -m extras.verl.compat SCRIPT.py [ARGUMENT …], SCRIPT.py being a file")
    sys.argv = sys.argv[1:]
    StandIns.install()
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def needs_critic(config: schema.Config) -> bool:
    """Says what verl's need_critic does."""
    return "critic" in needed_roles(config)


def needs_reference(config: schema.Config) -> bool:
    """Says what verl's need_reference_policy does."""
    return "ref" in needed_roles(config)
