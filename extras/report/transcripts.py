"""Rollouts as records of JSON: texts for people, tokens with their numbers for programs.

trainer.rollout_data_dir, trainer.validation_data_dir and a run's samples/ hold one JSON object a line, a record of a
sample: an answer to a prompt, or a whole episode. It has texts to read, for an episode turn by turn (`turns`), and the
trained tokens with the numbers of each (`rows`), which `read_episodes` returns unchanged.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from data.protocol import DataProto
from data.types import Sample
from training.episode_rows import EpisodeRows
from training.reward import policy_text

Record = dict[str, Any]

# Columns of a sample that its record has under the same name, where the batch has them.
ABOUT = (
    "uid", "data_source", "reset_seed", "success", "end_reason", "failure", "__num_turns__", "tool_call_counts",
    "tool_failures", "tool_rewards", "turn_scores", "tool_extra_fields", "invalid_actions", "__messages__",
)  # fmt: skip
# Names that no field of a reward's result may take.
OURS = frozenset((
    "step", "input", "output", "response", "gts", "score", *ABOUT, "extra_info", "weight_versions",
    "reward_extra_keys", "raw_prompt", "turns", "rows",
))  # fmt: skip
# Lists of a row in a record, with an entry a token, and the columns [B, R] that they come from.
TOKENS = {
    "token_ids": "responses",
    "policy_mask": "response_mask",
    "log_probs": "rollout_log_probs",
    "weight_versions": "weight_versions",
    "rewards": "token_level_scores",
    "turns": "turn_ids",
}
# Further lists, of columns of the same name that a batch may have: numbers of six digits.
COMPUTED = ("old_log_probs", "ref_log_prob", "values", "entropys", "advantages")

NOT_EXTRAS = ("rows", "turns", "weight_versions", "end_reason")  # of samples that are read again

BROKEN = "\ufffd"  # stands for bytes that are no character, or not yet
SAMPLE_CHARACTERS = 2000  # longer texts of a printed sample lose their middle
MOST_HELD = 32  # tokens that may have no text until all before them are decoded again


def sample_rows(
    batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int, numbers: Sequence[int] | None = None
) -> list[Record]:
    """Turns the samples of a scored batch into records: verl's keys (input, output, gts, score, step), the columns of
    `ABOUT`, the fields of the reward, turns as texts, and rows as tokens.

    A sample is a row, or an episode of several. `numbers` picks some, as `EpisodeRows` numbers them.
    """
    episodes, texts = EpisodeRows(batch), token_texts_of(tokenizer)
    numbers = range(episodes.count) if numbers is None else numbers
    names, is_episode = [name for name in ABOUT if name in batch], "episode" in batch
    keys = batch.meta_info.get("reward_extra_keys", ())
    fields = {f"reward_{name}" if name in OURS else name: name for name in keys}
    columns, scores = batch.non_tensor_batch, episodes.scores().tolist()
    has_chats = "raw_prompt" in columns and all(isinstance(chat, list) for chat in columns["raw_prompt"])
    records = []
    for number in numbers:
        last = episodes.last_row[number]
        rows = [token_lists(batch, row, texts) for row in (episodes.episode_of_row == number).nonzero()[:, 0].tolist()]
        label = columns["reward_model"][last] if "reward_model" in columns else None
        record = {
            "step": step,
            **read_texts(rows, tokenizer, is_episode),
            "gts": label.get("ground_truth") if isinstance(label, dict) else None,
            "score": scores[number],
            **{name: batch.get(name)[last] for name in names},
            **({} if is_episode else {"weight_versions": span_of_versions(rows[0])}),
            **{shown: columns[name][last] for shown, name in fields.items()},
            "reward_extra_keys": [*fields],
        }
        if "extra_info" in columns:
            record["extra_info"] = without_objects(columns["extra_info"][last] or {})
        if has_chats:
            record["raw_prompt"] = columns["raw_prompt"][last]
        records.append(record | {"rows": rows})
    return records


def read_texts(rows: list[Record], tokenizer: PreTrainedTokenizerBase, is_episode: bool) -> Record:
    """Decodes the rows of a sample for people: input and output, and for an episode its turns.

    The `response` of an episode is the text that its reward gets: turns on lines of their own, not joined by dots.
    """
    responses = [policy_text(row["token_ids"], row["policy_mask"], tokenizer) for row in rows]
    if is_episode:
        turns = turn_texts(rows, tokenizer)
        output = " · ".join(turn["response"] for turn in turns)
        texts = {"input": turns[0]["prompt"] if turns else "", "output": output, "turns": turns}
        return texts | {"response": "\n".join(responses)}
    return {"input": tokenizer.decode(rows[0]["prompt_ids"], skip_special_tokens=True), "output": responses[0]}


def span_of_versions(row: Record) -> list[int]:
    """Lists the first and the last version of the weights that the policy's tokens are from; empty if it has none."""
    versions = [number for number, policy in zip(row["weight_versions"], row["policy_mask"], strict=True) if policy]
    return [min(versions), max(versions)] if versions else []


def without_objects(info: Mapping[str, Any]) -> Record:
    """Leaves out entries that JSON has no form for, such as an environment's state: its reset seed is in the record."""
    plain_types = (str, int, float, list, tuple, Mapping, np.ndarray, np.generic, Tensor)
    return {name: value for name, value in info.items() if value is None or isinstance(value, plain_types)}


def token_lists(batch: DataProto, row: int, texts: "TokenTexts") -> Record:
    """Takes one row of a batch without its padding: ids and texts of the prompt, its pictures, and the lists of
    `TOKENS`, token_texts and, where they were computed, `COMPUTED`; loss_mask if some of its tokens were rejected."""
    width, tensors = batch.batch["responses"].shape[1], batch.tensors
    attended = tensors["attention_mask"][row].bool()
    prompt_ids = tensors["prompts"][row][attended[:-width]].tolist()
    is_real = attended[-width:]
    lists = {name: tensors[column][row][is_real].tolist() for name, column in TOKENS.items() if column in tensors}
    lists.setdefault("turns", [0] * len(lists["token_ids"]))
    for name in (name for name in COMPUTED if name in tensors):
        lists[name] = [float(f"{number:.6g}") for number in tensors[name][row][is_real].tolist()]
    if "loss_mask" in tensors and not tensors["loss_mask"].equal(tensors["response_mask"]):
        lists["loss_mask"] = tensors["loss_mask"][row][is_real].int().tolist()
    shown = {"prompt_ids": prompt_ids, "prompt_texts": texts.of(prompt_ids)}
    media = batch.non_tensor_batch["media"][row] if "media" in batch.non_tensor_batch else None
    if media:
        shown["pictures"] = media.thumbnails(prompt_ids)
    return {**shown, "token_texts": texts.of(lists["token_ids"]), **lists}


class TokenTexts:
    """Texts of tokens that join exactly to the text of all, special tokens included.

    A character of several tokens is held by the last of them, the others have "". Bytes that are no character are
    U+FFFD, held by the first of them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.first: dict[int, str] = {}  # text of each id alone, where some tokenizers strip a space
        self.later: dict[int, str] = {}  # and after another token

    def of(self, ids: list[int]) -> list[str]:
        """Returns a text for each of `ids`."""
        for token in {*ids} - self.first.keys():
            alone, twice = self.decode([token]), self.decode([token, token])
            self.first[token] = alone
            self.later[token] = twice[len(alone) :] if twice.startswith(alone) else alone
        full_text = self.decode(ids)
        texts = [self.first[token] for token in ids[:1]] + [self.later[token] for token in ids[1:]]
        return texts if "".join(texts) == full_text else self._align(ids, full_text)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _align(self, ids: list[int], joined: str) -> list[str]:
        """Cuts `joined` into a text for each of `ids`, up to the point that the tokens so far determine."""
        texts: list[str] = []
        start = before = 0  # the text of ids from `start` on is not certain yet; those from `before` on are its context
        begins = emitted = 0  # where the text of ids[start:] begins in `joined`, and how much of `joined` is given out
        for end, token in enumerate(ids, start=1):
            pending = end - start
            text = self.later[token] if end > 1 else self.first[token]
            certain = pending == 1 and BROKEN not in text and joined.startswith(text, begins)
            if not certain:
                if pending > MOST_HELD:
                    start = before = begins = 0
                context, both = self.decode(ids[before:start]), self.decode(ids[before:end])
                text = both[len(context) :] if both.startswith(context) else self.decode(ids[start:end])
                pairs = zip(text, joined[begins : begins + len(text)], strict=False)
                known = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                certain = (known == len(text) and not text.endswith(BROKEN)) or pending > MOST_HELD
                text = text[:known]
            reached = max(emitted, begins + len(text))
            texts.append(joined[emitted:reached])
            emitted = reached
            if certain:
                before, start, begins = start if text else before, end, emitted
        texts[-1] += joined[emitted:]
        return texts


@lru_cache(maxsize=1)
def token_texts_of(tokenizer: PreTrainedTokenizerBase) -> TokenTexts:
    """Returns the texts of a tokenizer's tokens: the same object each time, which knows what it has decoded."""
    return TokenTexts(tokenizer)


def turn_texts(rows: list[Record], tokenizer: PreTrainedTokenizerBase) -> list[Record]:
    """Decodes each turn: the prompt, the trained part of the answer, and its reward.

    The text after the last answer is a turn of its own, without an answer.
    """
    turns: list[Record] = []
    for row in rows:
        shown = row["prompt_ids"]
        tokens = [*zip(row["turns"], row["token_ids"], row["policy_mask"], row["rewards"], strict=True)]
        for turn in sorted({*row["turns"]}):
            answer = [token for number, token, policy, _ in tokens if number == turn and policy]
            prompt, response = tokenizer.batch_decode([shown, answer], skip_special_tokens=True)
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
    """Reads the rows of each sample of a file, as they were drawn; the other fields of its line are their `extras`.

    An answer to a prompt is an episode of one row. Log-probs and rewards are those of the batch, to the bit.
    """
    episodes = []
    for number, record in enumerate(read_records(path), start=1):
        if "rows" not in record:
            raise ValueError(f"{path}, line {number}: this is no sample: it has no rows of tokens, but {[*record]}.")
        extras = {name: value for name, value in record.items() if name not in NOT_EXTRAS}
        try:
            samples = [
                Sample(
                    row["prompt_ids"],
                    **{name: row[name] for name in TOKENS},
                    end_reason=record.get("end_reason"),
                    extras=dict(extras),
                )
                for row in record["rows"]
            ]
        except (AssertionError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: its rows are broken: {error}.") from error
        episodes.append(samples)
    return episodes


def without_middle(text: str) -> str:
    """Cuts a `text` that is longer than SAMPLE_CHARACTERS to its beginning and its end."""
    left_out = len(text) - SAMPLE_CHARACTERS
    if left_out <= 0:
        return text
    half = SAMPLE_CHARACTERS // 2
    return f"{text[:half]}\n… {left_out} characters …\n{text[-half:]}"
