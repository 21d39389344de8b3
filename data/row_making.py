"""Rows of a dataset of any class, completed as those of RLHFDataset are, and measured before a run."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rich.progress import track
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from configs.schema import DataConfig
from data.rl_dataset import PROGRESS_BAR_FROM, OverlongPrompt, RLHFDataset, report_overlong
from data.sampler import Dynamic
from data.types import Row


def row_maker(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Callable[[Row, int], Row]:
    """What completes a row of `dataset`, given its position: `make_row`, its own or that of RLHFDataset."""
    if isinstance(dataset, RLHFDataset):
        return dataset.make_row
    maker = RLHFDataset(None, tokenizer, config=config)
    return partial(maker.make_row, source=type(dataset).__name__)


def overlong_rows(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> frozenset[int]:
    """The positions of rows to leave out, as their prompts are longer than data.max_prompt_length; in a warning, too.

    For a class of the user's, all rows of which are made once: those of files were measured when they were read, and
    those that change by the step (`on_batch_end`) cannot be. None are left out where prompts may be cut instead
    (data.filter_overlong_prompts=false data.truncation=left): nothing is measured then.

    Raises:
        OverlongPrompt: the first such row, if data.filter_overlong_prompts is false and data.truncation "error".
        ValueError: all rows are too long, or a row cannot be used.
    """
    measured = type(dataset).__getitem__ is RLHFDataset.__getitem__
    may_be_cut = not config.filter_overlong_prompts and config.truncation != "error"
    if measured or may_be_cut or isinstance(dataset, Dynamic):
        return frozenset()
    make_row = row_maker(dataset, tokenizer, replace(config, truncation="error"))
    total, overlong = len(dataset), {}
    for position in track(range(total), "measuring prompts", disable=total < PROGRESS_BAR_FROM):
        try:
            make_row(dataset[position], position)
        except OverlongPrompt as error:
            if not config.filter_overlong_prompts:
                raise
            overlong[position] = (error.origin, error.length)
    if overlong:
        report_overlong(list(overlong.values()), total, config.max_prompt_length)
    return frozenset(overlong)
