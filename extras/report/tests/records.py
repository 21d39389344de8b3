"""Compares records of rollouts with the batch that they are of."""

import torch
from transformers import PreTrainedTokenizerBase

from data.protocol import DataProto
from extras.report.transcripts import COMPUTED
from training.episode_rows import EpisodeRows


def assert_records_are_the_batch(records: list[dict], batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> None:
    """Compares every number, mask and text of records with the columns that they are of."""
    episodes, tensors = EpisodeRows(batch), batch.tensors
    assert len(records) == episodes.count
    width, exact = tensors["responses"].shape[1], {"log_probs": "rollout_log_probs", "rewards": "token_level_scores"}
    for number, record in enumerate(records):
        assert record.keys() >= {"uid", "input", "output", "gts", "score", "end_reason"}
        of_episode = (episodes.episode_of_row == number).nonzero()[:, 0].tolist()
        for place, row in zip(of_episode, record["rows"], strict=True):
            kept = tensors["attention_mask"][place, -width:].bool()
            assert row["token_ids"] == tensors["responses"][place][kept].tolist()
            assert row["policy_mask"] == tensors["response_mask"][place][kept].tolist()
            for name, column in exact.items():
                assert torch.equal(torch.tensor(row[name]).float(), tensors[column][place][kept])
            assert {*COMPUTED} & row.keys() == {*COMPUTED} & tensors.keys()
            for name in {*COMPUTED} & row.keys():
                torch.testing.assert_close(torch.tensor(row[name]), tensors[name][place][kept], rtol=1e-5, atol=1e-7)
            for part in ("prompt", "token"):
                whole = tokenizer.decode(row[f"{part}_ids"], skip_special_tokens=False)
                assert "".join(row[f"{part}_texts"]) == whole
