"""Packs rollouts for the page: columns of what is sorted by, and a chunk of numbers for the tokens of a step.

A token takes about six bytes of the page, where its JSON takes a hundred; samples.js opens a chunk when it is first
looked at. Prompts and the texts of tokens stand in one table each.
"""

import base64
import json
import math
import zlib
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from extras.report.runs import RunRecord, SampleFile

CHUNK_TOKENS = 200_000  # of one file, at most: more take too long to open
LARGEST_INT = 2**53  # beyond it a browser rounds
SMALLEST, LARGEST = 0.1, 32.767  # thousandths in two bytes hold lists whose largest number is between
AROUND = "\ufdd1"  # a picture in the text of a prompt; Unicode keeps it out of all texts
NONE = -(2**15)  # stands there for "not computed"
LEAST = 1e-6  # share of the groups, below which the room is given up
MOST = 1e30  # for a number of a token: a sample that has a larger one is broken
LISTS = (  # of a row, with a number a token
    *("log_probs", "old_log_probs", "ref_log_prob", "advantages", "entropys", "values", "rewards"),
    *("policy_mask", "loss_mask"),
)
ITEM = ("reset_seed", "index")  # with the text of a prompt, these tell that two samples are of the same one
# Fields of a record that are packed elsewhere than among the other things that are known about a sample.
PACKED = {
    "step", "input", "output", "rows", "turns", "score", "end_reason", "reward_extra_keys", "raw_prompt", "response",
    "__messages__",
}  # fmt: skip
# Raised for a line that is torn, or not such a record.
BROKEN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)


class Table(dict[Any, int]):
    """Numbers values in the order in which they are first looked up."""

    def __missing__(self, value: Any) -> int:
        number = self[value] = len(self)
        return number


def pack_samples(runs: Sequence[RunRecord], room: int) -> dict[str, Any] | None:
    """Packs the samples of all runs into at most `room` bytes of JSON; None if there are none.

    Where not all fit, whole groups are left out, evenly over the steps, and `left_out` says how many. Lines that cannot
    be read are named in the run's `missing`.
    """
    share = 1.0
    while True:
        packer = Packer(share)
        for number, run in enumerate(runs):
            for file in run.samples:
                packer.add(number, file)
        packed = packer.result()
        if (size := len(json.dumps(packed))) <= room or share < LEAST:
            break
        share *= 0.95 * room / size
    for number, sentence in packer.missing:
        runs[number].missing.append(sentence)
    if size > room or (packer.dropped and not packer.chunks):
        for run in filter(lambda run: run.samples, runs):
            run.missing.append("Its samples are left out: beside the curves there is no room for them.")
        return None
    return packed if packer.chunks else None


class Packer:
    """Packs file by file, `share` of the groups."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.groups = self.dropped = self.dropped_samples = 0
        self.prompts, self.tokens, self.items, self.reasons = Table(), Table(), Table(), Table()
        names = ("line", "score", "advantage", "length", "tokens", "reason", "group", "item", "prompt")
        self.columns: dict[str, list[Any]] = {name: [] for name in names}
        self.chunks: list[dict[str, Any]] = []
        self.missing: list[tuple[int, str]] = []  # a run, and a sentence

    def add(self, run: int, file: SampleFile) -> None:
        """Packs the samples of a file into chunks."""
        chunk, broken, name = Chunk(self), 0, f"{file.path.parent.name}/{file.path.name}"
        groups: dict[Any, int | None] = {}
        try:
            with file.path.open("rb") as lines:
                for number, line in enumerate(lines):
                    try:
                        record = json.loads(line, parse_constant=lambda name: None)
                        group = self.group_of(record.get("uid", f"line {number}"), groups)
                        if group is not None:
                            chunk.add(record, number, group)
                    except BROKEN:
                        broken += bool(line.strip())
                    if len(chunk.ids) > CHUNK_TOKENS:
                        self.close(chunk, run, file)
                        chunk = Chunk(self)
        except OSError as error:
            self.missing.append((run, f"{name} cannot be read ({error.strerror}): its samples are left out."))
        if broken:
            self.missing.append((run, f"{name}: {broken} samples cannot be read and are left out."))
        self.close(chunk, run, file)

    def group_of(self, uid: Any, groups: dict[Any, int | None]) -> int | None:
        """Returns the number of a sample's group, or None where it is left out; `groups` are those of its file."""
        if uid not in groups:
            before = self.groups + self.dropped
            keep = int((before + 1) * self.share) > int(before * self.share)
            groups[uid] = self.groups if keep else None
            self.groups, self.dropped = self.groups + keep, self.dropped + (not keep)
        self.dropped_samples += groups[uid] is None
        return groups[uid]

    def close(self, chunk: "Chunk", run: int, file: SampleFile) -> None:
        """Adds a chunk that is complete."""
        if chunk.details:
            about = {"run": run, "kind": file.kind, "step": file.step, "count": len(chunk.details)}
            self.chunks.append(about | chunk.pack())

    def result(self) -> dict[str, Any]:
        """Returns all that samples.js reads."""
        ids, texts = zip(*self.tokens, strict=True) if self.tokens else ((), ())
        left_out = f"{self.dropped} of {self.dropped + self.groups} groups ({self.dropped_samples} samples)"
        return {
            "columns": self.columns,
            "reasons": [*self.reasons],
            "chunks": self.chunks,
            "prompts": pack_json([*self.prompts]),
            "vocabulary": pack_json({"ids": ids, "texts": texts}),
            "left_out": f"{left_out} are left out, evenly, to keep this page small." if self.dropped else None,
        }


class Chunk:
    """Some samples of one file, and the numbers of their tokens one after the other."""

    def __init__(self, packer: Packer) -> None:
        self.packer = packer
        self.ids: list[int] = []  # numbers in packer.tokens
        self.masks: list[np.ndarray] = []
        self.numbers: list[np.ndarray] = []
        self.details: list[str] = []  # JSON objects

    def add(self, record: dict[str, Any], line: int, group: int) -> None:
        """Adds a sample; if the record is not one, adds nothing and raises one of BROKEN."""
        rows, score, tables = record["rows"], record.get("score"), self.packer
        ids, texts = join(rows, "token_ids"), join(rows, "token_texts")
        numbers = np.concatenate([np.empty((len(LISTS), 0)), *map(numbers_of, rows)], axis=1)
        if not len(texts) == len(ids) == numbers.shape[1] or (np.abs(numbers) > MOST).any():
            raise ValueError("lists of different length, or a number that no token has")
        lists = dict(zip(LISTS, numbers, strict=True))
        mask, lost = lists["policy_mask"] > 0, lists["loss_mask"] == 0
        score = float(f"{score:.7g}") if score is not None and math.isfinite(score) else None
        tokens = [tables.tokens[token] for token in zip(ids, texts, strict=True)]
        prompts = [text_of_prompt(row) or str(record["input"]) for row in rows or [record]]
        earned = lists["advantages"][mask & np.isfinite(lists["advantages"])]
        known = {k: str(v) if isinstance(v, int) and abs(v) > LARGEST_INT else v for k, v in record.items()}
        extra = {name: known[name] for name in record.get("reward_extra_keys") or () if name in known}
        about = {name: value for name, value in known.items() if name not in PACKED | {*extra} and value is not None}
        shown = [[tables.prompts[prompt], len(row["token_ids"])] for prompt, row in zip(prompts, rows, strict=False)]
        detail = json.dumps({"rows": shown, "said": extra, "about": about}, allow_nan=False)
        columns = {
            "line": line,
            "score": score,
            "advantage": float(f"{earned.mean():.4g}") if len(earned) else None,
            "length": int(mask.sum()),
            "tokens": len(ids),
            "reason": tables.reasons[str(record.get("end_reason") or "")],
            "group": group,
            "item": tables.items[json.dumps([record["input"], *(find(record, key) for key in ITEM)])],
            "prompt": tables.prompts[prompts[0]],
        }
        for name, value in columns.items():
            tables.columns[name].append(value)
        self.ids += tokens
        self.masks.append(mask + (mask & lost).astype("u1"))
        self.numbers.append(numbers)
        self.details.append(detail)

    def pack(self) -> dict[str, Any]:
        """Returns tokens, `numbers` (name, bytes of each, and the size that 99 % are below), data and details.

        The data are ids (4 bytes), numbers as floats (4 bytes) or in thousandths (2), and the mask (1 byte), one after
        the other.
        The mask is 0 of what the environment said, 1 of what the policy said, 2 of that if the loss leaves it out.
        """
        columns = dict(zip(LISTS, np.concatenate(self.numbers, axis=1), strict=True))
        current = np.where(np.isnan(columns["old_log_probs"]), columns["log_probs"], columns["old_log_probs"])
        masks = np.concatenate(self.masks)
        packed = []
        for name, values in {
            "advantage": columns["advantages"],
            "log_prob": columns["log_probs"],
            "entropy": columns["entropys"],
            "mismatch": columns["old_log_probs"] - columns["log_probs"],
            "kl": current - columns["ref_log_prob"],
            "value": columns["values"],
            "reward": columns["rewards"],
        }.items():
            sizes = np.abs(values[(masks > 0) & np.isfinite(values)])
            if len(sizes):
                largest = np.nanmax(np.abs(values))
                fits = largest == 0 or SMALLEST <= largest <= LARGEST
                part = np.nan_to_num(np.rint(1000 * values), nan=NONE).astype("<i2") if fits else values.astype("<f4")
                top = round(float(np.quantile(sizes, 0.99, method="higher")), 4)
                packed.append(({"name": name, "bytes": part.itemsize, "top": top}, part.tobytes()))
        packed.sort(key=lambda part: -part[0]["bytes"])  # as typed arrays are aligned
        data = [np.array(self.ids, "<u4").tobytes(), *(content for _, content in packed), masks.tobytes()]
        return {
            "tokens": len(self.ids),
            "numbers": [about for about, _ in packed],
            "data": encode(b"".join(data)),
            "details": encode(f"[{','.join(self.details)}]".encode()),
        }


def join(rows: Sequence[dict[str, Any]], name: str) -> list[Any]:
    """Joins a list of each row; a row without token_texts shows ids in brackets."""
    return [*chain.from_iterable(row.get(name) or map("⟨{}⟩".format, row["token_ids"]) for row in rows)]


def text_of_prompt(row: dict[str, Any]) -> str:
    """Joins the texts of a row's prompt, with each picture in place of its tokens."""
    texts = [*(row.get("prompt_texts") or "")]
    for first, count, url in reversed(row.get("pictures") or []):
        texts[first : first + count] = [f"{AROUND}{url}{AROUND}"]
    return "".join(texts)


def numbers_of(row: dict[str, Any]) -> np.ndarray:
    """Returns the LISTS of a row, [lists, tokens]; NaN where there is none. One of another length raises ValueError."""
    none = [math.nan] * len(row["token_ids"])
    return np.array([none if row.get(name) is None else row[name] for name in LISTS], float)


def find(record: dict[str, Any], key: str) -> Any:
    """Returns a field of a record, or else of its extra_info."""
    extra = record.get("extra_info")
    return record.get(key, extra.get(key) if isinstance(extra, dict) else None)


def pack_json(value: Any) -> str:
    return encode(json.dumps(value, allow_nan=False).encode())


def encode(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, 4)).decode()  # 4: as small as 6, in a third of the time
