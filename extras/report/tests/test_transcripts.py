"""Files of rollouts: what they say, what is read back, and what is seen of them in the terminal."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from data.files import dump_jsonl
from data.padding import collate, collate_turns
from data.protocol import DataProto
from extras.report import show_episodes
from extras.report.transcripts import COMPUTED, read_episodes, read_records, sample_rows
from tests.batches import Turn, episode_batch, random_groups
from training.episode_rows import EpisodeRows

HISTORIES = ("transcript", "turns")


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool = False) -> str:
        return "".join(chr(ord("A") + number) for number in ids)

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in rows]


def written(path: Path, batch: DataProto) -> Path:
    dump_jsonl(path, sample_rows(batch, Letters(), step=3))
    return path


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("history", HISTORIES)
def test_a_file_of_episodes_gives_the_batch_back_to_the_bit(history, seed, tmp_path):
    batch = episode_batch(random_groups(seed), history, seed)
    batch.batch["rollout_log_probs"] = torch.where(batch.response_mask.bool(), batch.batch["old_log_probs"], 0.0)
    episodes = read_episodes(written(tmp_path / "3.jsonl", batch))
    samples = [sample for rows in episodes for sample in rows]
    width = batch.batch["responses"].shape[1]
    again = collate(samples, 4, width, pad_token_id=0)
    again.batch.update(collate_turns(samples, width))
    for name, column in again.tensors.items():
        assert torch.equal(column, batch.batch[name]), name
    assert [*again.end_reason] == [*batch.end_reason] and [*again.uid] == [*batch.uid]
    assert len(episodes) == EpisodeRows(batch).count


def test_a_record_says_what_was_shown_said_and_earned():
    batch = episode_batch([[[Turn(2, 1, 0.5), Turn(1, 2, 1.0)]]], "transcript", success=[True], reset_seed=[77])
    [record] = sample_rows(batch, Letters(), step=3)
    shown = ["FGH", "".join(map(chr, [ord("A") + 50])), "".join(map(chr, [ord("A") + 51] * 2))]
    turns = zip(shown, ["KK", "L", ""], [0.5, 1.0, 0.0], strict=True)
    assert record["turns"] == [{"prompt": text, "response": said, "reward": paid} for text, said, paid in turns]
    about = {"step": 3, "input": "FGH", "output": "KK · L · ", "score": 1.5, "success": True, "reset_seed": 77}
    [in_turns] = sample_rows(episode_batch([[[Turn(2, 1, 0.5), Turn(1, 2, 1.0)]]], "turns"), Letters(), step=3)
    assert record["response"] == in_turns["response"] == "KK\nL"
    assert record.items() >= about.items() and record["end_reason"] == "terminated"
    assert record["rows"] == [
        {
            "prompt_ids": [5, 6, 7],
            "prompt_texts": ["F", "G", "H"],
            "token_texts": ["K", "K", shown[1], "L", *shown[2]],
            "token_ids": [10, 10, 50, 11, 51, 51],
            "policy_mask": [1, 1, 0, 1, 0, 0],
            "log_probs": [-0.5, -0.5, 0, -0.5, 0, 0],
            "rewards": [0, 0.5, 0, 1, 0, 0],
            "turns": [0, 0, 0, 1, 1, 1],
            "weight_versions": [0, 0, 0, 0, 0, 0],
            **{name: [float(f"{n:.6g}") for n in batch.batch[name][0].tolist()] for name in COMPUTED[:3]},
        }
    ]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda record: record["rows"][0]["policy_mask"].pop(), "line 2: its rows are broken: the lists of a sample"),
        (lambda record: record["rows"][0].pop("turns"), "line 2: its rows are broken: 'turns'"),
        (lambda record: record.pop("rows"), "line 2: this is no sample: it has no rows of tokens, but .*'step'"),
        ("{", "line 2: this is not JSON"),
        ("[1]", "line 2: .*, not list"),
    ],
)
def test_a_file_that_was_changed_is_refused_by_its_line(spoil, says, tmp_path):
    records = sample_rows(episode_batch([[[Turn(2)], [Turn(1)]]], "turns"), Letters(), step=3)
    if isinstance(spoil, str):
        (tmp_path / "3.jsonl").write_text(f"{json.dumps(records[0])}\n{spoil}\n")
    else:
        spoil(records[1])
        dump_jsonl(tmp_path / "3.jsonl", records)
    with pytest.raises(ValueError, match=says):
        read_episodes(tmp_path / "3.jsonl")


def test_a_line_of_a_file_ends_at_a_line_feed_alone(tmp_path):
    told = [{"output": "a\u2028b\x85c\u2029"}, {"output": "\x1c"}]
    dump_jsonl(tmp_path / "x.jsonl", told)
    assert read_records(tmp_path / "x.jsonl") == told
    (tmp_path / "x.jsonl").write_text("")
    assert read_records(tmp_path / "x.jsonl") == []


def test_the_terminal_shows_turns_rewards_and_which_tokens_are_trained(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    batch = episode_batch([[[Turn(2, 3, 0.25), Turn(1, 0, 1.0)], []]], "transcript", success=[True, None])
    file = str(written(tmp_path / "3.jsonl", batch))
    show_episodes.main([file])
    output = capsys.readouterr().out
    assert "1 of 2" in output and "2 of 2" in output
    assert "\x1b[2mFGH" in output and "\x1b[1mKK" in output and "\x1b[2msss" in output  # dim, bold, dim
    assert re.search(r"0\.25.*1\.00.*score.*1\.25.*terminated.*timeout.*hung \(my_env.py:7\)", output, re.DOTALL)
    show_episodes.main([file, "--row", "1"])
    assert "1 of 1" in (output := capsys.readouterr().out) and "hung" in output and "terminated" not in output
    for arguments in ([file, "--row", "2"], [file + "x"]):
        with pytest.raises(SystemExit):
            show_episodes.main(arguments)
    said = capsys.readouterr().err
    assert "has 2 lines, counted from 0" in said and "there is no file" in said


def test_samples_are_printed_as_they_are(capsys):
    samples = [
        {"prompt": "\x1b[31mS\x1b[0mFFF \x1b[2J[bold]go[/INST]", "output": "left\nright", "score": 1.0},
        {"prompt": "x" * 10_000 + "END", "response": "", "score": np.float32(0.5), "ground_truth": None},
    ]
    show_episodes.print_records("validation rows at step 4", samples)
    output = capsys.readouterr().out
    for text in ("validation rows at step 4 · 1 of 2", "2 of 2", "SFFF [bold]go[/INST]", "left", "1.00", "0.50"):
        assert text in output
    assert "\x1b" not in output
    assert "8003 characters" in output and "END" in output
    assert output.count("x") < 2_100
