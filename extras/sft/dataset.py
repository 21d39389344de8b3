"""Prompt/response rows and whole conversations for supervised training.

A chat template with generation markers decides which tokens are learnt. With any other template, and for other roles,
the conversation is encoded as in an episode: an answer is the tokens of its text and its end, so that the model learns
the tokens that it will have to produce.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jinja2 import TemplateError
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from configs.checks import plural
from configs.errors import notice_once
from configs.extras import has
from configs.import_utils import bind, check_reads, find, load_subclass
from data.chat import ANSWER, START, ChatFormat, Prompt, as_messages, check_writes, clean_messages, parse_prompt
from data.padding import media_of
from data.pretrained import template_terminator
from data.rl_dataset import truncate
from data.rows import NO_TEXT, BadRow, BadRows, Origin, check_is_read, files_key, print_report, read_rows
from data.types import Message, Sample
from extras.sft.settings import SFTDataConfig

IMAGE_KEY = "images"  # the column with the images of a prompt, where the model reads some
LEARNT = "learnt-0417"  # placeholder for a learnt content, to find its place in the rendered text
GENERATION_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class SFTDataset(Dataset):
    """Rows with a `sample`, whose policy tokens are what is learnt: the response, or of a conversation (column
    data.messages_key) what `ConversationFormat` says. A response has `end_id` behind it, so that the model learns to
    stop.

    Raises:
        ValueError: more than a share data.max_bad_fraction of the rows are unusable; names file and row: a missing or
            bad column, or a row above data.max_length with data.truncation=error.
    """

    def __init__(
        self,
        data_files: str | Path | list[str],
        tokenizer: PreTrainedTokenizerBase,
        config: SFTDataConfig,
        end_id: int,
        max_samples: int = -1,
    ) -> None:
        self.config = config
        self.tokenizer, self.end_id = tokenizer, end_id
        self.conversations = ConversationFormat(tokenizer, config, end_id)
        self.num_cut = self.num_texts = 0  # rows: cut to length, and with a text as the prompt
        unread: list[BadRow] = []
        self.data_files = [data_files] if isinstance(data_files, str | Path) else list(data_files)
        key = files_key(self.data_files, config)
        self.lengths = self._lengths(key)
        rows = self.lengths.rows if self.lengths else read_rows(self.data_files, unread, key)
        positions = range(len(rows))[: max_samples if max_samples >= 0 else None]
        looked_at = self.lengths.look(positions) if self.lengths else positions
        bad, samples = BadRows(len(positions) + len(unread), self.config.max_bad_fraction, unread), {}
        for position in looked_at:
            origin, row = rows[position]
            try:
                samples[position] = self._encode(row, origin)
            except ValueError as error:
                bad.add(BadRow(origin, str(error), cause=error))
        bad.check()
        self.samples: Sequence[Sample] = [*samples.values()]
        if self.lengths:
            left_out = dict.fromkeys(each for each in looked_at if each not in samples)
            self.samples = self.lengths.leave_out(left_out, positions, lambda each: self._encode(*rows[each][::-1]))
            first = rows[0][1]
            is_text = first.get(config.messages_key) is None and isinstance(first.get(config.prompt_key), str)
            self.num_texts = len(self.samples) * is_text
        if self.num_texts and tokenizer.chat_template:
            notice_once(
                f"{plural(self.num_texts, 'row')} with a text as the prompt (data.prompt_key={config.prompt_key}), "
                'which is read without the chat template. [{"role": "user", "content": …}] has it applied.'
            )
        print_report(data_files, len(self.samples), self._describe(), bad.describe())

    def _lengths(self, key: str) -> Any:
        """Opens large parquet files, whose rows are looked at once and made when they are drawn; None: all others."""
        if type(self) is not SFTDataset or not has("dataset", "lengths"):
            return None
        config = self.config
        decisive = config.truncation, config.roles_to_train, config.turns_to_train, config.apply_chat_template_kwargs
        return find("dataset", "lengths").fitting(
            self.data_files,
            self.tokenizer,
            key,
            keys=[(config.messages_key,), (config.prompt_key, config.response_key)],
            encode=lambda row: len((sample := self._sample(row, Origin("", 0))).prompt_ids) + len(sample.token_ids),
            limit=config.max_length,
            settings=[self.end_id, config.prompt_dict_keys, config.response_dict_keys, *decisive],
            empty=(*NO_TEXT, config.tools_key),
        )

    def _describe(self) -> str:
        if self.lengths:
            return f"at most {self.config.max_length} tokens each"
        lengths = [len(sample.prompt_ids) + len(sample.token_ids) for sample in self.samples]
        learnt = sum(sum(sample.policy_mask) for sample in self.samples)
        cut = f"; {plural(self.num_cut, 'row')} cut to data.max_length={self.config.max_length}" if self.num_cut else ""
        return f"{min(lengths)} to {max(lengths)} tokens each; {learnt} of {sum(lengths)} tokens are learnt{cut}"

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"sample": self.samples[position]}

    def prompt_ids(self, like: "SFTDataset | None" = None) -> list[list[int]]:
        """Returns each row's token ids before the first that is learnt; of those, at least, that `like` has too."""
        samples = self.samples
        if self.lengths and like is not None:
            rows = (row for _, row in read_rows(like.data_files, []))
            samples = self.lengths.like(rows, (self.config.messages_key, self.config.prompt_key), samples)
        return [sample.prompt_ids for sample in samples]

    def _encode(self, row: dict[str, Any], origin: Origin) -> Sample:
        """Encodes a row, and cuts it to data.max_length."""
        sample = self._sample(row, origin)
        fitting = fit_sample(sample, self.config, origin)
        self.num_cut += fitting is not sample
        return fitting

    def _sample(self, row: dict[str, Any], origin: Origin) -> Sample:
        """Encodes a row, however long: the tokens that are learnt are the policy's."""
        config = self.config
        is_answer = row.get(config.messages_key) is None
        key = config.prompt_key if is_answer else config.messages_key
        reads_images = is_answer and "images" in vars(self.tokenizer)
        check_is_read(row, key, origin, *([IMAGE_KEY] if reads_images else []))
        try:
            prompt = parse_prompt(self._prompt(row) if is_answer else row[key])
        except ValueError as error:
            raise ValueError(f"{origin}: {error} (column {key})") from error
        try:
            if is_answer:
                sample = self._encode_answer(prompt, row)
                self.num_texts += isinstance(prompt, str)
            elif isinstance(prompt, str):
                raise ValueError(f"column {key} is a text; it must be a list of chat messages.")
            else:
                sample = self.conversations.sample(prompt, row.get(config.tools_key))
        except (ValueError, TemplateError) as error:  # templates refuse messages by TemplateError
            raise ValueError(f"{origin}: {error}") from error
        return sample

    def _encode_answer(self, prompt: Prompt, row: dict[str, Any]) -> Sample:
        """Encodes a prompt to read and a response to learn."""
        response = within(row.get(self.config.response_key), self.config.response_dict_keys)
        if not isinstance(response, str):
            raise ValueError(
                f"the response (column data.response_key={self.config.response_key}) is {response!r}; it must be "
                f"a string. This row has the columns {', '.join(row)}."
            )
        encode, reader = self.conversations.chat(row.get(self.config.tools_key)).prompt_ids, vars(self.tokenizer)
        images = row.get(IMAGE_KEY)
        sample = Sample(reader["images"].encode(prompt, images, IMAGE_KEY, encode) if images else encode(prompt))
        sample.extend([*self.tokenizer.encode(response, add_special_tokens=False), self.end_id], None, policy=True)
        return sample

    def _prompt(self, row: dict[str, Any]) -> Any:
        """Returns the prompt column, or its entry at data.prompt_dict_keys: a text there is a user's message."""
        keys = self.config.prompt_dict_keys
        prompt = within(row.get(self.config.prompt_key), keys)
        return as_messages(prompt) if keys and isinstance(prompt, str) else prompt


def fit_sample(sample: Sample, config: SFTDataConfig, origin: Origin | str) -> Sample:
    """Cuts a row to data.max_length: `left` from the prompt's start, `right` from the response's end; raises ValueError
    for data.truncation=error, or if nothing would be left."""
    prompt_ids, response_ids = sample.prompt_ids, sample.token_ids
    excess = len(prompt_ids) + len(response_ids) - config.max_length
    if excess <= 0:
        return sample
    if config.truncation == "error" or media_of(prompt_ids):
        raise ValueError(
            f"{origin}: prompt and response have {len(prompt_ids) + len(response_ids)} tokens, above "
            f"data.max_length={config.max_length}: raise it, or cut mere texts by data.truncation=left or right."
        )
    cut_prompt = config.truncation == "left"
    ids = prompt_ids if cut_prompt else response_ids
    if excess >= len(ids):
        side = "prompt" if cut_prompt else "response"
        raise ValueError(
            f"{origin}: data.truncation={config.truncation} would leave nothing of the {side}: {excess} tokens are "
            f"above data.max_length={config.max_length}."
        )
    if cut_prompt:
        return replace(sample, prompt_ids=truncate(prompt_ids, len(prompt_ids) - excess, "left"))
    return sample.until(len(response_ids) - excess)


def answer_end(tokenizer: PreTrainedTokenizerBase) -> int:
    """Returns the token that ends an answer: the chat template's, or the end of sequence."""
    end_id = template_terminator(tokenizer)
    return tokenizer.eos_token_id if end_id is None else end_id


@runtime_checkable
class LearnsNext(Protocol):
    """A dataset whose loss_mask is 1 where the next token is learnt: that of verl's SFTDataset, until version 0.8."""

    learns_next: bool


class TokenRows(Dataset):
    """A dataset class of the user's as rows with a `sample`: of its input_ids, where attention_mask is 1, those are
    learnt where loss_mask is 1, as in verl. All rows are made once at the start, to be checked."""

    def __init__(self, rows: Dataset, config: SFTDataConfig) -> None:
        self.rows, self.config = rows, config
        lengths = [len(sample.prompt_ids) + len(sample.token_ids) for sample in map(self.sample, range(len(rows)))]
        print_report(type(rows).__name__, len(rows), f"{min(lengths)} to {max(lengths)} tokens each")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> dict[str, Any]:
        return {"sample": self.sample(position)}

    def prompt_ids(self) -> list[list[int]]:
        return [self.sample(position).prompt_ids for position in range(len(self))]

    def sample(self, position: int) -> Sample:
        row, origin = self.rows[position], f"{type(self.rows).__name__}, row {position}"
        columns = [row.get(name) for name in ("input_ids", "loss_mask")]
        if any(part is None for part in columns) or len(columns[0]) != len(columns[1]):
            raise ValueError(f"{origin} has {', '.join(row)}; it needs input_ids and loss_mask, of one length.")
        ids, mask = (torch.as_tensor(part).long() for part in columns)
        if isinstance(self.rows, LearnsNext):
            mask = mask.roll(1)
        if row.get("attention_mask") is not None:
            is_text = torch.as_tensor(row["attention_mask"]).bool()
            ids, mask = ids[is_text], mask[is_text]
        if len(ids) > self.config.max_length:
            raise ValueError(f"{origin} has {len(ids)} tokens, more than data.max_length={self.config.max_length}.")
        try:
            return sample_of(Part([token], bool(flag)) for token, flag in zip(ids.tolist(), mask.tolist(), strict=True))
        except ValueError as error:
            raise ValueError(f"{origin}: {error}") from error


def create_sft_dataset(
    data_files: str | list[str],
    tokenizer: PreTrainedTokenizerBase,
    config: SFTDataConfig,
    end_id: int,
    max_samples: int = -1,
) -> "SFTDataset | TokenRows":
    """Reads the rows of `data_files` by the class data.custom_cls, called with the arguments that it names."""
    chosen = config.custom_cls
    if chosen.path is None:
        return SFTDataset(data_files, tokenizer, config, end_id, max_samples)
    dataset_class = load_subclass(chosen.path, chosen.name, Dataset, "data.custom_cls.name")
    check_reads(dataset_class, "config", "data.custom_cls", chosen.extras)
    offered = {"tokenizer": tokenizer, "config": config, "processor": None, "max_samples": max_samples}
    offered |= {"parquet_files": data_files, "data_files": data_files, "end_id": end_id}
    dataset = bind(dataset_class, offered, chosen.kwargs, f"data.custom_cls.name={chosen.name}")()
    return dataset if len(dataset) and "sample" in dataset[0] else TokenRows(dataset, config)


def within(value: Any, keys: str | list[str] | None) -> Any:
    """Returns the value under the `keys`, one after the other, in nested dicts; None if one is missing."""
    for key in [keys] if isinstance(keys, str) else keys or []:
        value = value.get(key) if isinstance(value, dict) else None
    return value


class Part(NamedTuple):
    """Neighbouring tokens that are all learnt, or all only read."""

    ids: list[int]
    learnt: bool


class ConversationFormat:
    """Encodes conversations as samples whose policy tokens are the ones to learn.

    Args:
        config: the roles whose messages are learnt, and the template's arguments.
        end_id: the token that ends an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, end_id: int) -> None:
        self.tokenizer, self.config, self.end_id = tokenizer, config, end_id
        self.formats = {"": ChatFormat(tokenizer, config.apply_chat_template_kwargs)}  # by the tools they describe
        marks = GENERATION_MARKER.search(tokenizer.chat_template or "") is not None
        self.uses_markers = marks and set(config.roles_to_train) <= {"assistant"}

    def sample(self, messages: Sequence[Message], tools: Any) -> Sample:
        """Encodes a conversation up to the last message that is learnt."""
        learnt = learnt_messages(messages, self.config)
        count = len(learnt) - learnt[::-1].index(True) if True in learnt else 0
        if not count:
            raise ValueError(
                f"messages of the roles {', '.join(dict.fromkeys(message['role'] for message in messages))} hold none "
                f"to learn: data.roles_to_train={self.config.roles_to_train}, and a weight of 0 leaves one out."
            )
        messages = [{key: value for key, value in each.items() if key != "weight"} for each in messages[:count]]
        messages = clean_messages(messages, self.tokenizer)
        chat = self.chat(tools)
        split = self.mask_from_template if self.uses_markers else self.mask_by_turns
        return sample_of(split(messages, learnt[:count], chat))

    def chat(self, tools: Any) -> ChatFormat:
        """Returns the template's format for conversations with these tools: schemas, or JSON of them."""
        key = tools if isinstance(tools, str) else json.dumps(tools) if tools else ""
        if key not in self.formats:
            kwargs = {**self.config.apply_chat_template_kwargs, "tools": json.loads(key)}
            self.formats[key] = ChatFormat(self.tokenizer, kwargs)
        return self.formats[key]

    def mask_from_template(self, messages: list[Message], learnt: list[bool], chat: ChatFormat) -> Iterable[Part]:
        """Splits a conversation by the template's generation markers, each around one answer."""
        check_writes(messages, self.tokenizer, tokenize=False, **chat.template_kwargs)
        encoded = self.tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True, **chat.template_kwargs
        )
        pairs = zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        parts = [Part([token for token, _ in run], bool(mark)) for mark, run in groupby(pairs, lambda pair: pair[1])]
        of_answers = [flag for message, flag in zip(messages, learnt, strict=True) if message["role"] == "assistant"]
        if len(of_answers) != sum(part.learnt for part in parts):
            raise ValueError(
                f"{len(of_answers)} answers, and the chat template marks {sum(part.learnt for part in parts)} by its "
                "generation markers: they must be around every answer, and an answer must not be empty."
            )
        self._check_ends(parts, chat)
        chosen = iter(of_answers)
        return [Part(part.ids, part.learnt and next(chosen)) for part in parts]

    def mask_by_turns(self, messages: list[Message], learnt: list[bool], chat: ChatFormat) -> Iterator[Part]:
        """Splits a conversation turn by turn: prompt, answer, the messages that follow it, the next answer."""
        start, last_id, calls = 0, None, ()
        for is_answer, group in groupby(messages, lambda message: message["role"] == "assistant"):
            turn = list(group)
            if is_answer and (start == 0 or len(turn) > 1):
                raise ValueError(
                    "messages must start with a prompt, and hold one answer at a time, a text or calls of tools; a "
                    "chat template with generation markers takes others."
                )
            flags = learnt[start : start + len(turn)]
            if is_answer:
                ids, calls = self.answer_ids(turn[0], chat), turn[0].get("tool_calls", ())
                last_id = ids[-1]
                yield Part(ids, flags[0])
            elif any(flags):
                yield from self.mask_of_messages(turn, flags, chat, last_id, calls)
            else:
                yield Part(chat.increment(turn, True, last_id, calls) if start else chat.prompt_ids(turn), False)
            start += len(turn)

    @cached_property
    def opening(self) -> list[int]:
        """Token ids that the template writes before an answer's text, if the last is special: gpt-oss's channel."""
        chat, answer = self.formats[""], {"role": "assistant", "content": ANSWER}
        before, full_text = chat.render(START, True), chat.render([*START, answer], False)
        text = full_text.removeprefix(before).partition(ANSWER)[0] if full_text.startswith(before) else ""
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        last = self.tokenizer.added_tokens_decoder.get(ids[-1]) if ids else None
        return ids if last and last.special else []

    def answer_ids(self, message: Message, chat: ChatFormat) -> list[int]:
        """Encodes an answer with its end: its text, or the template's rendering of calls, thoughts and parts."""
        content = message.get("content")
        if isinstance(content, str) and message.keys() == {"role", "content"}:
            return [*self.opening, *self.tokenizer.encode(content, add_special_tokens=False), self.end_id]
        before, full_text = chat.render(START, True), chat.render([*START, message], False)
        if not full_text.startswith(before):
            raise ValueError(
                f"the chat template writes an answer of {', '.join(message)} otherwise than behind its own start of an "
                "answer: what the model would learn is not what it will be asked for."
            )
        ids = self.tokenizer.encode(full_text.removeprefix(before), add_special_tokens=False)
        if self.end_id in ids:
            return ids[: len(ids) - ids[::-1].index(self.end_id)]
        last = self.tokenizer.added_tokens_decoder.get(ids[-1])  # gpt-oss's calls have an end of their own
        return ids if "tool_calls" in message and last and last.special else [*ids, self.end_id]

    def mask_of_messages(
        self, messages: list[Message], learnt: list[bool], chat: ChatFormat, last_id: int | None, calls: Sequence[Any]
    ) -> Iterator[Part]:
        """Splits messages other than answers: the contents of some are learnt, with the token that ends each; behind an
        answer with these calls that `last_id` ends, or as a prompt."""
        first = last_id is None
        contents = {f"{LEARNT}-{index}-": messages[index].get("content") for index, flag in enumerate(learnt) if flag}
        keys = iter(contents)
        marked = [each | {"content": next(keys)} if flag else each for each, flag in zip(messages, learnt, strict=True)]
        pieces, full_text = (
            chat.render(part, True) if first else chat.increment_text(part, calls) for part in (marked, messages)
        )
        pieces = re.split(f"({'|'.join(contents)})", pieces)
        for written in (contents, {mark: str(content).strip() for mark, content in contents.items()}):  # some trim
            if "".join(str(written.get(piece, piece)) for piece in pieces) == full_text:
                break
        else:
            raise ValueError(
                f"the chat template does not write a {messages[learnt.index(True)]['role']}'s content as it is, so it "
                f"cannot be found there: take the role out of data.roles_to_train={self.config.roles_to_train}."
            )
        for index, piece in enumerate(pieces):
            opens = first and index == 0 and self.tokenizer.chat_template is None  # a template writes its own
            ids = self.tokenizer.encode(written.get(piece, piece), add_special_tokens=opens)
            end = chat.end_of_turn(ids, last_id) if piece not in written and (index or not first) else 0
            if index:  # otherwise it ends the answer before, which already has it
                yield Part(ids[:end], True)
            yield Part(ids[end:], piece in written)

    def _check_ends(self, parts: list[Part], chat: ChatFormat) -> None:
        """Prints a notice, once, if an answer's end is not learnt."""
        for part, following in pairwise(parts):
            if part.learnt and chat.end_of_turn(following.ids):
                notice_once(
                    "the chat template's generation markers leave out the token that ends an answer: the model will "
                    "not learn to stop. Put the end of an answer before {% endgeneration %}."
                )


def learnt_messages(messages: Sequence[Message], config: SFTDataConfig) -> list[bool]:
    """Decides which messages are learnt: by role, by turn, and by their `weight`, 0 or 1 (OpenAI's format)."""
    for message in messages:
        if message.get("weight", 1) not in (0, 1):
            raise ValueError(f"a message has weight {message['weight']!r}: it must be 1 (learnt) or 0 (only read).")
    learnt = [each["role"] in config.roles_to_train and each.get("weight", 1) == 1 for each in messages]
    if config.turns_to_train == "last" and True in learnt:
        last = len(learnt) - 1 - learnt[::-1].index(True)
        learnt = [index == last for index in range(len(learnt))]
    return learnt


def sample_of(parts: Iterable[Part]) -> Sample:
    """Joins `parts` into a prompt, up to the first token that is learnt, and the response from there to the last.

    The very first token of a text is never learnt, as nothing predicts it.
    """
    parts = [part for part in parts if part.ids]
    ids = [token for part in parts for token in part.ids]
    mask = [part.learnt for part in parts for _ in part.ids]
    mask[:1] = [False]
    if True not in mask:
        raise ValueError("no token of it is learnt.")
    first, end = mask.index(True), len(mask) - mask[::-1].index(True)
    sample = Sample(ids[:first])
    start = first
    for learnt, run in groupby(mask[first:end]):
        count = len(list(run))
        sample.extend(ids[start : start + count], None, policy=learnt)
        start += count
    return sample
