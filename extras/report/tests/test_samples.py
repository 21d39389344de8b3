"""Records of samples: numbers of the batch, texts that join, scores that can be computed again; and which are kept."""

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configs.schema import AlgorithmConfig, ScoringConfig
from custom.tiny_model import build_tokenizer
from data.files import dump_jsonl
from data.protocol import DataProto
from extras.evaluation import main_eval
from extras.report.observer import SampleFiles, pick_groups, pick_prompts
from extras.report.tests.records import assert_records_are_the_batch
from extras.report.transcripts import BROKEN, OURS, TokenTexts, sample_rows, span_of_versions
from extras.try_reward.__main__ import load_reward, read_views, score_rows
from tests.batches import Turn, episode_batch, padded, random_groups
from tests.runs import compose, files_of_at_most
from training.advantage import Estimator
from training.reward import add_scores, load_reward_manager

TINY = build_tokenizer()
TEXTS = [
    "Hello world", "für die Straße, ÄÖÜ", "👩‍👩‍👧 family 🏳️‍🌈", "مرحبا بالعالم", "你好,世界 𠀀", "a\u202eb \u2028 c",
    "  two  spaces ", " ", "e\u0301 and \ufffd", "</script><!-- ${x}",
]  # fmt: skip


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2's and Qwen's form: bytes as letters."""
    tokens = ["<|end|>", "<|user|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "ür"]
    merges = [("h", "e"), ("l", "l")]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|end|>", "additional_special_tokens": ["<|user|>"]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def sentencepiece(metaspace: bool) -> PreTrainedTokenizerFast:
    """T5's form (`metaspace`), or Llama's: pieces with ▁ for a space, which the first loses; the rest in bytes."""
    pieces = ["▁Hello", "▁world", "▁", "fü", "▁die", *"rabcdeilosStw"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    scores = [(token, -1.0 if len(token) < 2 else -len(token) / 10) for token in tokens]
    tokenizer = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=True))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


TOKENIZERS = {
    "byte-level": byte_level(),
    "llama": sentencepiece(metaspace=False),
    "t5": sentencepiece(metaspace=True),
    "tiny": TINY,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_texts_of_tokens_join_to_the_text_of_all(name):
    tokenizer, rng = TOKENIZERS[name], random.Random(0)
    texts = TokenTexts(tokenizer)
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    cases = [*encoded, *([1, *ids, 0, *ids] for ids in encoded), []]
    cases += [[rng.randrange(len(tokenizer)) for _ in range(rng.randrange(90))] for _ in range(200)]
    for ids in cases:
        found = texts.of(ids)
        assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert len(found) == len(ids)


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("byte-level", "hello für", ["he", "ll", "o", " ", "f", "", "ü", "r"]),
        ("byte-level", "👧世", ["", "", "", "👧", "", "", "世"]),
        ("llama", "Hello world é", ["Hello", " world", " ", "", "é"]),
        ("t5", "Hello 世 fü", ["Hello", " ", "", "", "世", " ", "fü"]),
    ],
)
def test_a_character_of_several_tokens_is_held_by_the_last(name, text, pieces):
    tokenizer = TOKENIZERS[name]
    texts, ids = TokenTexts(tokenizer), tokenizer.encode(text, add_special_tokens=False)
    assert texts.of(ids) == pieces
    if text == "👧世":  # bytes that are no character stay where they are
        assert texts.of([*ids[4:6], *tokenizer.encode("a", add_special_tokens=False)]) == [BROKEN, "", "a"]


@pytest.mark.parametrize(("history", "estimator"), [("transcript", "grpo"), ("turns", "gae")])
def test_records_of_episodes_have_the_numbers_of_the_batch(history, estimator, tmp_path):
    batch = episode_batch(random_groups(3), history, 3)
    batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
    batch.batch["rollout_log_probs"] = torch.where(batch.response_mask.bool(), batch.batch["old_log_probs"], 0.0)
    batch.batch.update(Estimator(AlgorithmConfig(adv_estimator=estimator))(batch))
    dump_jsonl(tmp_path / "3.jsonl", sample_rows(batch, TINY, step=3))
    records = [json.loads(line) for line in (tmp_path / "3.jsonl").read_text().splitlines()]
    assert_records_are_the_batch(records, batch, TINY)
    assert any(row["advantages"] for record in records for row in record["rows"])
    assert all("turns" in record for record in records)


@pytest.mark.parametrize("rejected", [0, 1])
def test_a_record_says_which_tokens_the_loss_leaves_out_where_it_leaves_some_out(rejected):
    batch = groups_of([0.0, 1.0])
    batch.batch["loss_mask"] = batch.response_mask.clone()
    batch.batch["loss_mask"][0, 0] -= rejected
    rows = [row for record in sample_rows(batch, TINY, step=1) for row in record["rows"]]
    assert [row.get("loss_mask", [None])[0] for row in rows] == ([0, 1] if rejected else [None, None])


@pytest.mark.parametrize(("mask", "span"), [([0, 1, 1], [2, 3]), ([0, 0, 0], [])])
def test_the_versions_of_the_weights_are_those_of_the_policys_tokens(mask, span):
    assert span_of_versions({"weight_versions": [0, 3, 2], "policy_mask": mask}) == span


ANSWERS = ["6", "The sum is 6.", "7", ""]
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info, response_ids, messages, group):
    right = ground_truth in solution_str
    score = right + 0.25 * extra_info["level"] + 0.5 * (data_source == "products")
    score += 8 * len(response_ids) + 1024 * sum(map(len, group)) + 8192 * sum(len(said["content"]) for said in messages)
    return {"score": score, "step": "mine", "output": 5, "why": "right" if right else "wrong"}
"""


def scored_batch(folder: Path) -> DataProto:
    """Answers to two prompts, of two sources, scored by a function that returns names of ours beside the score."""
    rows = [TINY.encode(text) + [TINY.eos_token_id] for text in ANSWERS]
    prompts = [TINY.encode(text) for text in ("2+4=", "2+4=", "2*3=", "2*3=")]
    batch = padded(prompts, rows, 8, 20, TINY.pad_token_id)
    chats = [[{"role": "user", "content": TINY.decode(ids)}] for ids in prompts]
    columns = {
        "raw_prompt_ids": prompts,
        "raw_prompt": chats,
        "uid": ["a", "a", "b", "b"],
        "data_source": ["sums", "sums", "products", "products"],
        "extra_info": [{"level": place, "state": object()} for place in range(4)],
        "reward_model": [{"ground_truth": "6"}] * 4,
    }
    batch = batch.union(DataProto.from_single_dict(columns))
    (folder / "my_reward.py").write_text(REWARD)
    config = compose(f"reward.custom_reward_function.path={folder}/my_reward.py", "reward.in_process=true").reward
    return add_scores(batch, load_reward_manager(config, TINY, None), TINY, config)


def test_a_rewards_own_keys_overwrite_none_of_ours(tmp_path):
    batch = scored_batch(tmp_path)
    records = sample_rows(batch, TINY, step=4)
    for record, answer in zip(records, ANSWERS, strict=True):
        assert record["step"] == 4 and record["output"] == answer and record["weight_versions"] == [0, 0]
        assert record["reward_step"] == "mine" and record["reward_output"] == 5
        assert record["reward_extra_keys"] == ["reward_output", "reward_step", "why"]
        assert record["extra_info"].keys() == {"level"}, "an object of Python's is not JSON"
        assert record.keys() <= OURS | {"reward_step", "reward_output", "why"}
    assert [record["why"] for record in records] == ["right", "right", "wrong", "wrong"]
    assert_records_are_the_batch(records, batch, TINY)


def test_a_dump_is_scored_again_as_in_training(tmp_path):
    batch, file = scored_batch(tmp_path), tmp_path / "4.jsonl"
    dump_jsonl(file, sample_rows(batch, TINY, step=4))
    scores = batch.batch["token_level_scores"].sum(1).tolist()
    assert [score % 8 for score in scores] == [1.0, 1.25, 1.0, 1.25] and len({int(score) for score in scores}) == 4
    config = ScoringConfig(in_process=True)
    reward = load_reward(str(tmp_path / "my_reward.py"), None, config)
    views = read_views(str(file), needs_response=True)
    assert [outcome.score for outcome in score_rows(views, reward)] == scores
    assert [view["prompts"] for view in views] == ["2+4=", "2+4=", "2*3=", "2*3="]
    assert views[0]["raw_prompt"] == [{"role": "user", "content": "2+4="}]
    again = [f"data.path={file}", "data.response_key=output", f"data.output_path={tmp_path}/figures.json"]
    main_eval.main([*again, f"reward.custom_reward_function.path={tmp_path}/my_reward.py", "reward.in_process=true"])
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["sums"]["mean@1"] == sum(scores[:2]) / 2 and found["products"]["mean@1"] == sum(scores[2:]) / 2


# Which samples are kept


def groups_of(*scores: list[float]) -> DataProto:
    """A group for each of the lists, with an episode of one turn for each of its scores."""
    return episode_batch([[[Turn(2, 1, score)] for score in group] for group in scores], "transcript")


BATCH = groups_of([0.0, 0.5], [1.0, 1.0], [0.0, 1.0], [0.0, 0.0, 0.0])


def sample_files(folder: Path, *overrides: str, total_steps: int = 200) -> SampleFiles:
    config = compose(f"trainer.default_local_dir={folder}", "trainer.test_freq=5", *overrides)
    return SampleFiles(config, total_steps, TINY)


def kept(folder: Path, kind: str = "train") -> list[int]:
    return sorted(int(path.stem) for path in (folder / "samples" / kind).glob("*.jsonl"))


def test_the_widest_group_and_a_drawn_one_are_picked_whole():
    assert pick_groups(BATCH, 1, seed=0) == [4, 5]
    drawn = [pick_groups(BATCH, 2, seed) for seed in range(20)]
    assert all(numbers[:2] == [4, 5] for numbers in drawn)
    assert {tuple(numbers[2:]) for numbers in drawn} == {(0, 1), (2, 3), (6, 7, 8)}
    assert sorted(pick_groups(BATCH, 9, seed=0)) == [*range(9)] == pick_prompts(BATCH, 9)
    assert pick_prompts(BATCH, 2) == [0, 1, 6, 7, 8]


def test_fifty_steps_are_kept_the_first_and_the_last_among_them(tmp_path):
    files, state = sample_files(tmp_path), torch.random.get_rng_state()
    for step in range(1, 201):
        files.keep_batch(BATCH, step)
        if step % 5 == 0:
            files.keep_validation([BATCH, BATCH], step)
    assert torch.equal(torch.random.get_rng_state(), state)
    steps = kept(tmp_path)
    assert len(steps) == 50 and steps[0] == 1 and steps[-1] == 200
    assert {after - before for before, after in pairwise(steps)} == {4, 5}
    assert kept(tmp_path, "validation") == [*range(5, 201, 5)]
    [*records] = map(json.loads, (tmp_path / "samples/validation/10.jsonl").read_text().splitlines())
    assert len(records) == 2 * 9 and records[0]["step"] == 10
    files.start(150)
    assert max(kept(tmp_path)) <= 150 == max(kept(tmp_path, "validation")), "what is done again is written again"
    files.start(0)
    assert kept(tmp_path) == kept(tmp_path, "validation") == []


def test_below_the_limit_fewer_steps_are_kept_evenly_and_that_is_said_once(tmp_path, capsys):
    files = sample_files(tmp_path, "trainer.test_freq=1")
    files.keep_batch(BATCH, 1)
    size = (tmp_path / "samples/train/1.jsonl").stat().st_size
    files.limit = 22 * size
    for step in range(1, 201):
        files.keep_batch(BATCH, step)
        files.keep_validation([BATCH], step)
        total = sum(path.stat().st_size for path in (tmp_path / "samples").rglob("*.jsonl"))
        assert total <= files.limit
    for steps in (kept(tmp_path), kept(tmp_path, "validation")):
        gaps = [after - before for before, after in pairwise(steps[:-1])]
        assert len(steps) > 3 and steps[-1] == 200 and max(gaps) - min(gaps) <= 2
    assert kept(tmp_path)[0] == 1
    assert capsys.readouterr().err.count("trainer.sample_max_mb") == 1
    files.limit, before = size, kept(tmp_path)
    (tmp_path / "samples/train/200.jsonl").unlink()
    files.keep_batch(BATCH, 200)
    assert kept(tmp_path) == before[:-1], "a step alone may be too large: it is left out, and the others stay"


@pytest.mark.parametrize("setting", ["trainer.sample_groups=0", "trainer.val_only=true"])
def test_no_samples_are_kept_where_none_are_wanted(setting, tmp_path):
    files = sample_files(tmp_path, setting)
    files.keep_batch(BATCH, 1)
    files.keep_validation([BATCH], 5)
    assert not (tmp_path / "samples").exists()


def test_a_full_disk_costs_samples_and_not_the_run(tmp_path, caplog):
    with files_of_at_most(100):
        sample_files(tmp_path).keep_batch(BATCH, 1)
    assert "samples/train/1.jsonl: not written, the disk is full" in caplog.text and kept(tmp_path) == []
