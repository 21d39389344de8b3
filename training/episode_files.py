"""Episodes as JSON objects, one a line: what rollout_data_dir and validation_data_dir hold of them.

Each has texts to read (`turns`) and, token by token, the rows that were learnt from (`rows`), which `read_episodes`
gives back as they were.
"""

import json
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.padding import Sample
from data.protocol import DataProto
from training.episodes import Episodes

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
    "rewards": "token_level_scores",
    "turns": "turn_ids",
}


def episode_records(batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> list[Record]:
    """The episodes of a scored batch: verl's keys (input, output, gts, score, step), turns as texts, rows as tokens."""
    episodes = Episodes(batch)
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
    """One row of a batch without its padding: prompt_ids, and the lists of `TOKENS`."""
    width = batch.batch["responses"].shape[1]
    attended = batch.batch["attention_mask"][row].bool()
    lists = {name: batch.batch[column][row][attended[-width:]].tolist() for name, column in TOKENS.items()}
    return {"prompt_ids": batch.batch["prompts"][row][attended[:-width]].tolist(), **lists}


def turn_texts(rows: list[Record], tokenizer: PreTrainedTokenizerBase) -> list[Record]:
    """What the policy was shown in each turn, what of its answer is trained, and what that earned.

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
    """The lines of a file of rollouts, in order. Raises ValueError for one that is no JSON object."""
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: this is not JSON: {error}.") from error
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: a rollout is a JSON object, not {type(record).__name__}.")
        records.append(record)
    return records


def read_episodes(path: str | Path) -> list[list[Sample]]:
    """The rows of each episode of a file, as they were sampled; what else its line says of it is in their `extras`.

    Log-probs and rewards are those of the batch, to the bit; weight versions are not kept and read as 0.

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
    """A row of a record; asserts that its lists have one entry a token."""
    versions = [0] * len(row["token_ids"])
    lists = {name: row[name] for name in TOKENS}
    return Sample(row["prompt_ids"], **lists, weight_versions=versions, end_reason=end_reason, extras=extras)
