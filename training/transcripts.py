"""Rollouts as people and programs read them: rows of JSON, and the same in the terminal.

trainer.rollout_data_dir and trainer.validation_data_dir hold one JSON object a line. An episode's has texts to read
(`turns`) and, token by token, the rows that were learnt from (`rows`), which `read_episodes` gives back as they were.
In the terminal an episode is shown turn by turn: dim what the policy was shown, bold what it said (which is what is
trained), and what that earned.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from data.protocol import DataProto
from data.types import Sample
from training.episode_rows import EpisodeRows
from training.reports import fields_table, message_fields, short_number, without_middle
from training.reward import reward_view

Record = dict[str, Any]

# Columns of an episode that its record has under the same name, where the batch has them.
ABOUT = (
    "uid", "data_source", "reset_seed", "success", "end_reason", "failure", "__num_turns__", "tool_call_counts",
    "tool_failures", "tool_rewards", "turn_scores", "invalid_actions",
)  # fmt: skip
# Lists of a row in a record, with an entry a token, and the columns [B, R] that they come from.
TOKENS = {
    "token_ids": "responses",
    "policy_mask": "response_mask",
    "log_probs": "rollout_log_probs",
    "weight_versions": "weight_versions",
    "rewards": "token_level_scores",
    "turns": "turn_ids",
}

BRIEF_TURNS = 8  # longer episodes lose their middle where they are shown briefly
IN_TURNS = ("step", "input", "output", "turns", "rows", "raw_prompt", "__num_turns__")


def sample_rows(batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> list[Record]:
    """Turns a scored batch into readable rows: verl's keys (input, output, gts, score, step), and the reward's fields.

    Of episodes, one row for each, with its tokens (`episode_records`).
    """
    if "episode" in batch:
        return episode_records(batch, tokenizer, step)
    view = reward_view(batch, tokenizer)
    columns = {
        "input": view.prompts,
        "output": view.responses,
        "gts": view.ground_truths,
        "score": total_scores(batch),
        "end_reason": view.end_reason,
        "weight_versions": span_of_versions(batch),
        **{name: view.get(name) for name in batch.meta_info["reward_extra_keys"]},
    }
    return [{"step": step, **{name: values[row] for name, values in columns.items()}} for row in range(len(batch))]


def span_of_versions(batch: DataProto) -> list[list[int]]:
    """Lists, for each row, the first and the last version of the weights that the policy's tokens were sampled from;
    empty, where the policy has none."""
    columns = zip(batch.batch["weight_versions"], batch.batch["response_mask"].bool(), strict=True)
    return [[min(found), max(found)] if (found := versions[mask].tolist()) else [] for versions, mask in columns]


def episode_records(batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> list[Record]:
    """Turns episodes into records: verl's keys (input, output, gts, score, step), turns as texts, rows as tokens."""
    episodes = EpisodeRows(batch)
    names = [name for name in (*ABOUT, *batch.meta_info.get("reward_extra_keys", ())) if name in batch]
    labels = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    records = []
    for number, (last, score) in enumerate(zip(episodes.last_row.tolist(), episodes.scores().tolist(), strict=True)):
        rows = [token_lists(batch, row) for row in (episodes.of_row == number).nonzero()[:, 0].tolist()]
        turns = turn_texts(rows, tokenizer)
        label = labels[last]
        record = {
            "step": step,
            "input": turns[0]["prompt"] if turns else "",
            "output": " · ".join(turn["response"] for turn in turns),
            "gts": label.get("ground_truth") if isinstance(label, dict) else None,
            "score": score,
            **{name: batch.get(name)[last] for name in names},
            "turns": turns,
            "rows": rows,
        }
        records.append(record)
    return records


def token_lists(batch: DataProto, row: int) -> Record:
    """Takes one row of a batch without its padding: prompt_ids, and the lists of `TOKENS`."""
    width = batch.batch["responses"].shape[1]
    attended = batch.batch["attention_mask"][row].bool()
    lists = {name: batch.batch[column][row][attended[-width:]].tolist() for name, column in TOKENS.items()}
    return {"prompt_ids": batch.batch["prompts"][row][attended[:-width]].tolist(), **lists}


def turn_texts(rows: list[Record], tokenizer: PreTrainedTokenizerBase) -> list[Record]:
    """Decodes each turn: the prompt, the trained part of the answer, and its reward.

    What follows the last answer is a turn of its own, without an answer.
    """
    turns: list[Record] = []
    for row in rows:
        shown = row["prompt_ids"]
        tokens = [*zip(row["turns"], row["token_ids"], row["policy_mask"], row["rewards"], strict=True)]
        for turn in sorted({*row["turns"]}):
            said = [token for number, token, policy, _ in tokens if number == turn and policy]
            prompt, response = tokenizer.batch_decode([shown, said], skip_special_tokens=True)
            earned = sum(reward for number, _, _, reward in tokens if number == turn)
            turns.append({"prompt": prompt, "response": response, "reward": earned})
            shown = [token for number, token, policy, _ in tokens if number == turn and not policy]
        if shown:
            turns.append({"prompt": tokenizer.decode(shown, skip_special_tokens=True), "response": "", "reward": 0.0})
    return turns


def read_records(path: str | Path) -> list[Record]:
    """Reads the lines of a file of rollouts, in order. Raises ValueError for one that is no JSON object."""
    records = []
    lines = Path(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")  # JSON may hold other line ends
    for number, line in enumerate(lines if lines != [""] else [], start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: this is not JSON: {error}.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: a rollout is a JSON object, not {type(record).__name__}.")
        records.append(record)
    return records


def read_episodes(path: str | Path) -> list[list[Sample]]:
    """Reads the rows of each episode of a file, as they were sampled; the other fields of its line are their `extras`.

    Log-probs and rewards are those of the batch, to the bit.

    Raises:
        ValueError: a line is no JSON, is no episode, or has lists of different lengths; names it.
    """
    episodes = []
    for number, record in enumerate(read_records(path), start=1):
        if "rows" not in record:
            raise ValueError(f"{path}, line {number}: this is no episode: it has no rows of tokens, but {[*record]}.")
        about = {name: value for name, value in record.items() if name not in ("rows", "turns", "end_reason")}
        try:
            samples = [as_sample(row, record["end_reason"], dict(about)) for row in record["rows"]]
        except (AssertionError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: its rows are broken: {error}.") from error
        episodes.append(samples)
    return episodes


def as_sample(row: Record, end_reason: str | None, extras: Record) -> Sample:
    """Builds the sample of a record's row; asserts that its lists have one entry a token."""
    lists = {name: row[name] for name in TOKENS}
    return Sample(row["prompt_ids"], **lists, end_reason=end_reason, extras=extras)


def by_kind(samples: Sequence[Record]) -> dict[str, list[Record]]:
    """Separates samples of the validation set from whole episodes, under their names in print."""
    kinds = {
        "rows": [row for row in samples if "turns" not in row],
        "episodes": [row for row in samples if "turns" in row],
    }
    return {kind: rows for kind, rows in kinds.items() if rows}


def select_fields(row: Record) -> Record:
    """Selects the fields of an answer for the terminal; chat messages each under its role."""
    shown = {name: value for name, value in row.items() if name not in ("step", "raw_prompt") and value is not None}
    if "raw_prompt" in row:
        del shown["input"]
        shown = message_fields(row["raw_prompt"]) | shown
    return shown


def total_scores(batch: DataProto) -> list[float]:
    return batch.batch["token_level_scores"].sum(1).tolist()


def spread(rows: Sequence[Record], count: int) -> list[Record]:
    """Picks `count` rows, evenly spaced from best to worst score."""
    ordered = sorted(rows, key=lambda row: -row["score"])
    return [ordered[int(place)] for place in np.linspace(0, len(ordered) - 1, min(count, len(ordered)))]


def print_records(title: str, records: Sequence[Record], brief: bool) -> None:
    """Prints each rollout in a box under `title`, for example "validation at step 3", and its number.

    If `brief`, long episodes and long texts lose their middle, and an answer has its readable fields alone.
    """
    console = Console()
    for number, record in enumerate(records, start=1):
        if "turns" in record:
            content = episode_view(record, brief)
        else:
            content = fields_table(select_fields(record) if brief else record)
        console.print(Panel(content, title=Text(f"{title} · {number} of {len(records)}"), title_align="left"))


def episode_view(record: Record, brief: bool) -> Group:
    """Lays out the turns of an episode, and its other fields below them."""
    turns = Table.grid(padding=(0, 2))
    turns.add_column(style="cyan", no_wrap=True)
    turns.add_column(overflow="fold")
    turns.add_column(style="green", no_wrap=True)
    for number, turn in leave_out_middle(record["turns"], BRIEF_TURNS if brief else None):
        if turn is None:
            turns.add_row("…", Text(f"{number} more turns", style="dim"), "")
        else:
            turns.add_row(str(number), turn_view(turn, brief), short_number(turn["reward"]) if turn["reward"] else "")
    about = {name: value for name, value in record.items() if name not in IN_TURNS and not says_nothing(value)}
    about = {"return" if name == "score" else name: value for name, value in about.items()}
    return Group(turns, Text(), fields_table(about))


def says_nothing(value: Any) -> bool:
    """Whether it is None, or a list or dictionary without entries."""
    return value is None or (isinstance(value, list | dict) and not value)


def turn_view(turn: Record, brief: bool) -> Group:
    """Styles a turn: the prompt dim, the answer bold; an answer that cannot be seen is quoted."""
    answer = turn["response"]
    styled = [(turn["prompt"], "dim"), (answer if answer.strip() else repr(answer) * bool(answer), "bold")]
    texts = [(without_middle(text) if brief else text, style) for text, style in styled if text.strip()]
    return Group(*(Text.from_ansi(text, style=style) for text, style in texts))


def leave_out_middle(turns: Sequence[Record], most: int | None) -> list[tuple[int, Record | None]]:
    """Numbers the turns; keeps the first and the last, `most` in all, and between them (number left out, None)."""
    numbered, left_out = [*enumerate(turns)], 0 if most is None else len(turns) - most
    if left_out <= 0:
        return numbered
    half = most // 2
    return [*numbered[:half], (left_out, None), *numbered[half + left_out :]]
