"""Answers the prompts of a file, n times each: python -m extras.evaluation.main_generation data.path=…

The output has the rows of the input, each with a list of responses. It is written batch by batch: the same command,
run again after it was stopped, continues there, and gives the same responses as an uninterrupted one.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a file it runs like as a module

from configs.checks import check_model_early
from configs.loader import command
from extras.evaluation.settings import GenerationConfig, GenerationDataConfig, check_generation

ANSWER_PROMPTS = "extras.evaluation.main_generation.answer_prompts"
main = command("generation", GenerationConfig, check_generation, __doc__, ANSWER_PROMPTS, check_model_early)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any

from rich.progress import Progress, TimeElapsedColumn
from transformers import PreTrainedTokenizerBase

from configs.checks import plural, sampling
from configs.errors import ConfigError, refusals
from configs.schema import DataConfig
from configs.settings import safe_settings
from data.chat import Prompt, as_messages, encode_prompt
from data.files import append, json_line, lock, replacing
from data.pretrained import load_tokenizer
from data.protocol import DataProto, object_array
from data.rl_dataset import RLHFDataset
from data.types import Row, SamplingParams
from extras.standalone.rollout import StandaloneRollout
from training.checkpoint import flatten
from workers.rollout import generate_batch

DECISIVE = ("model.", "rollout.", "trainer.seed", "data.response_key")  # settings that change what is written


def answer_prompts(config: GenerationConfig) -> None:
    """Loads the tokenizer and the prompts, then generates; refuses unusable files in one line."""
    with refusals():
        tokenizer = load_tokenizer(config.model, "model")
        dataset = load_prompts(config.data, tokenizer)
    run(config, tokenizer, dataset)


class ChatDataset(RLHFDataset):
    """A dataset in which a prompt may also be a string, a user's message."""

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        return encode_prompt(as_messages(prompt), self.tokenizer, **self.config.apply_chat_template_kwargs)


def load_prompts(data: GenerationDataConfig, tokenizer: PreTrainedTokenizerBase) -> RLHFDataset:
    """Loads the rows of data.path, in their order, with the token ids of their prompts."""
    settings = DataConfig(
        prompt_key=data.prompt_key,
        max_prompt_length=data.max_prompt_length,
        filter_overlong_prompts=False,
        truncation=data.truncation,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    dataset_class = ChatDataset if data.strings_are_chat else RLHFDataset
    dataset = dataset_class(data.path, tokenizer, config=settings)
    if data.response_key in dataset.rows[0]:
        column = f"the rows of data.path={data.path} have a column {data.response_key!r} already"
        raise ValueError(f"{column}: set another in data.response_key.")
    return dataset


def run(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase, dataset: RLHFDataset) -> None:
    """Generates the responses that the output file does not have yet."""
    data, path, total = config.data, Path(config.data.output_path), len(dataset)
    with unfinished_table(path, job_identity(config, dataset)) as table:
        with refusals():
            rollout = StandaloneRollout(config.model, config.rollout, tokenizer, config.trainer.n_threads)
        known = f", {len(table)} of them answered already" if len(table) else ""
        print(f"{plural(total, 'prompt')}{known}; sampling {sampling(config.rollout)}.")
        with closing(rollout.engine), Progress(*Progress.get_default_columns(), TimeElapsedColumn()) as progress:
            task = progress.add_task("prompts answered", total=total, completed=len(table))
            while len(table) < total:
                rows = range(len(table), min(len(table) + data.batch_size, total))
                table.append(answer_rows(config, tokenizer, dataset, rollout, rows))
                progress.update(task, completed=len(table))
        table.finish()
    print(f"wrote {path}, with the responses in the column {data.response_key!r}.")


def job_identity(config: GenerationConfig, dataset: RLHFDataset) -> dict[str, Any]:
    """Identifies a job: a process continues the file of another only if both have the same settings and rows."""
    digest = hashlib.sha256()
    for row, ids in zip(dataset.rows, dataset.prompt_ids, strict=True):
        digest.update(len(ids).to_bytes(8) + ids.tobytes() + json_line(row))
    settings = {key: value for key, value in flatten(safe_settings(config)) if key.startswith(DECISIVE)}
    return {**settings, "data.path": f"{len(dataset)} rows of {', '.join(dataset.rows[0])}, {digest.hexdigest()[:16]}"}


def answer_rows(
    config: GenerationConfig,
    tokenizer: PreTrainedTokenizerBase,
    dataset: RLHFDataset,
    rollout: StandaloneRollout,
    rows: range,
) -> list[Row]:
    """Returns the rows at these places with n responses each, their end reasons and their numbers of tokens."""
    n, response_key = config.rollout.n, config.data.response_key
    ids = object_array([dataset[row]["raw_prompt_ids"] for row in rows])
    prompts = DataProto.from_single_dict({"raw_prompt_ids": ids}).repeat(n, interleave=True)
    params = SamplingParams.from_config(config.rollout, config.rollout.response_length)
    with rollout.precision():
        batch = generate_batch(rollout.engine, prompts, params, config.trainer.seed, first_row=rows.start * n)
    tokens = [ids[mask.bool()] for ids, mask in zip(batch.responses, batch.response_mask, strict=True)]
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    answered = []
    for number, row in enumerate(rows):
        part = slice(number * n, (number + 1) * n)
        answered.append({
            **{name: value for name, value in dataset.rows[row].items() if value != {}},
            response_key: texts[part],
            "end_reasons": list(batch.end_reason[part]),
            "response_lengths": [len(response) for response in tokens[part]],
        })  # fmt: skip
    return answered


class UnfinishedTable:
    """The rows so far of a .jsonl or .parquet file that is not finished; made by `unfinished_table`."""

    def __init__(self, path: Path, partial: Path, rows: int) -> None:
        self.path, self.partial, self.rows = path, partial, rows

    def __len__(self) -> int:
        return self.rows

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Adds `rows`; they are on disk when this returns."""
        append(self.partial, b"".join(map(json_line, rows)))
        self.rows += len(rows)

    def finish(self) -> None:
        """Puts the table into its place, whole."""
        lines = self.partial.read_bytes().split(b"\n")[1:-1]
        with replacing(self.path) as file:
            if self.path.suffix == ".parquet":
                import pyarrow.parquet

                rows = [json.loads(line) for line in lines]
                columns = dict.fromkeys(name for row in rows for name in row)
                table = pyarrow.table({name: [row.get(name) for row in rows] for name in columns})
                pyarrow.parquet.write_table(table, file)
            else:
                file.writelines(line + b"\n" for line in lines)
        self.partial.unlink()


@contextmanager
def unfinished_table(path: Path, identity: Mapping[str, Any]) -> Iterator[UnfinishedTable]:
    """Opens the table for `path`, with the rows that an earlier process of the same `identity` wrote.

    They are in PATH.partial: the identity in its first line, then a row a line. A line cut short by a kill is removed.

    Raises:
        ConfigError: they have another identity (the message names the differences), or another process is writing.
    """
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("a+b") as file:
        if not lock(file):
            raise ConfigError(f"{partial} belongs to another process, which goes on: wait, or stop it.")
        file.seek(0)
        content = file.read()
        lines, first = content[: content.rfind(b"\n") + 1], json_line(identity)
        file.truncate(len(lines))
        if not lines:
            append(partial, first)
        elif not lines.startswith(first):
            before, now = json.loads(lines.partition(b"\n")[0]), json.loads(first)
            names = [name for name in before | now if before.get(name) != now.get(name)]
            changes = [f"{name}: {json.dumps(before.get(name))} → {json.dumps(now.get(name))}" for name in names]
            raise ConfigError(
                f"{partial} was begun with other settings ({'; '.join(changes)}): use those, or remove it."
            )
        yield UnfinishedTable(path, partial, max(0, lines.count(b"\n") - 1))
