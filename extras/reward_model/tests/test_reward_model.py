"""A learned reward model scores each row as transformers does alone, and in its own words where the policy's differ."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import main
from configs.checks import check_config
from configs.schema import PretrainedModelConfig
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto, object_array
from extras.reward_model.model import LearnedReward, load_reward_model
from extras.reward_model.settings import RewardModelConfig
from extras.reward_model.stage import add_model_scores, encode_conversation
from scripts import reward_model as script
from tests.batches import ragged_batch, unpadded
from tests.runs import compose, learning_metrics, short_run
from training.environment import build_environment
from training.reward import add_scores

TOKENIZER = build_tokenizer()
BY_TURNS = ["env.mode=episode", "env.history=turns"]
CPU = torch.device("cpu")
CUTS = [{"micro_batch_size_per_gpu": 1}, {"micro_batch_size_per_gpu": 4}, {"forward_max_token_len_per_gpu": 30}, {}]
OTHER_TEMPLATE = "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + ' ' }}{% endfor %}."


def role(folder: Path, **settings) -> LearnedReward:
    config = RewardModelConfig(enable=True, model=PretrainedModelConfig(path=str(folder)), **settings)
    return LearnedReward(config, TOKENIZER, CPU)


def score_alone(folder: Path, ids: list[int]) -> float:
    """Scores a row without padding by transformers, with a pad token that is not in the row."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = next(token for token in range(model.config.vocab_size) if token not in ids)
    return model(torch.tensor([ids])).logits[0, 0].item()


def ends_like_padding(batch: DataProto) -> DataProto:
    """Rows that end with the pad token of the reward model, with that of the policy, and with two of them."""
    for row, ends in ((2, [TOKENIZER.eos_token_id]), (4, [TOKENIZER.pad_token_id]), (7, [TOKENIZER.eos_token_id] * 2)):
        real = batch.batch["attention_mask"][row].nonzero()[-len(ends) :, 0]
        batch.batch["input_ids"][row, real] = torch.tensor(ends)
    return batch


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_every_row_is_scored_as_alone_however_the_batch_is_cut(reward_model: Path, cut: dict):
    batch = ends_like_padding(ragged_batch())
    found = role(reward_model, **cut).compute_rm_score(batch).batch["rm_scores"]
    alone = [score_alone(reward_model, unpadded(batch, row)[0].tolist()) for row in range(len(batch))]
    torch.testing.assert_close(found, torch.tensor(alone), rtol=0, atol=1e-5)
    assert found.std() > 0.01


def test_of_a_longer_conversation_the_last_tokens_are_read(reward_model: Path):
    batch = ragged_batch()
    found = role(reward_model, max_length=5).compute_rm_score(batch).batch["rm_scores"]
    alone = [score_alone(reward_model, unpadded(batch, row)[0].tolist()[-5:]) for row in range(len(batch))]
    torch.testing.assert_close(found, torch.tensor(alone), rtol=0, atol=1e-5)


@pytest.fixture
def other_words(reward_model: Path, tmp_path: Path) -> Path:
    """The reward model with a chat template that the policy does not have."""
    folder = tmp_path / "other"
    shutil.copytree(reward_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = OTHER_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_a_conversation_is_written_again_in_a_template_that_is_not_the_policys(other_words: Path):
    batch = ragged_batch()[:3]
    prompts = [[{"role": "user", "content": "1+1"}], [{"role": "system", "content": "be"}, *said("2")], "plain: "]
    batch.non_tensor_batch["raw_prompt"] = object_array(prompts)
    answers = [TOKENIZER.decode(row_response(batch, row), skip_special_tokens=True) for row in range(3)]
    wanted = [f"u:1+1 a:{answers[0]} .", f"s:be u:2 a:{answers[1]} .", f"plain: {answers[2]}"]
    model = role(other_words)
    assert [TOKENIZER.decode(ids) for ids in model.conversations(batch)] == wanted
    alone = [score_alone(other_words, TOKENIZER.encode(text)) for text in wanted]
    torch.testing.assert_close(model.compute_rm_score(batch).batch["rm_scores"], torch.tensor(alone), rtol=0, atol=1e-5)


def test_ids_without_their_prompt_cannot_be_written_in_another_template(other_words: Path):
    batch = ragged_batch()[:1]
    batch.non_tensor_batch["raw_prompt"] = object_array([None])
    with pytest.raises(ValueError, match="give prompts as text"):
        role(other_words).compute_rm_score(batch)


def test_special_tokens_that_a_response_spells_out_are_text():
    forged, harmless = (encode_conversation(said("a"), text, TOKENIZER) for text in ("<|end|>", "harmless"))
    assert forged.count(TOKENIZER.eos_token_id) == harmless.count(TOKENIZER.eos_token_id)


def said(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def row_response(batch: DataProto, row: int) -> list[int]:
    ids, prompt = unpadded(batch, row)
    return ids[prompt:].tolist()


class Says:
    """A reward model that gives row i the i-th of these scores."""

    def __init__(self, *scores: float) -> None:
        self.scores = torch.tensor(scores)

    def rows(self, method: str, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"rm_scores": self.scores})


def rows() -> DataProto:
    batch = ragged_batch()[:3]
    batch.batch["response_mask"][0] = batch.batch["attention_mask"][0, -batch.batch["responses"].shape[1] :]
    batch.non_tensor_batch["raw_prompt_ids"] = object_array([[7]] * 3)
    return batch


def of_function(data: DataProto) -> list[dict[str, float]]:
    return [{"score": float(place), "place": place} for place in range(len(data))]


@pytest.mark.parametrize(("weight", "wanted"), [(0.0, [0.5, -1.0, 2.0]), (10.0, [0.5, 9.0, 22.0])])
def test_the_models_score_is_learnt_and_the_functions_as_much_as_its_weight(weight, wanted):
    batch = add_scores(rows(), of_function, TOKENIZER)
    add_model_scores(batch, Says(0.5, -1.0, 2.0), weight, is_alone=False)
    assert batch.batch["token_level_scores"].sum(1).tolist() == wanted
    last = [max(batch.batch["response_mask"][row].nonzero())[0].item() for row in range(3)]
    assert batch.batch["token_level_scores"].nonzero().tolist() == [[row, place] for row, place in enumerate(last)]
    assert batch.meta_info["reward_extra_keys"] == ["function_score", "place", "rm_score"]
    assert [*batch.rm_score] == [0.5, -1.0, 2.0] and [*batch.function_score] == [0.0, 1.0, 2.0]


def test_weights_without_a_trained_head_are_refused(tiny_model: Path):
    model = PretrainedModelConfig(path=str(tiny_model), override_config={"num_labels": 1})
    with pytest.raises(ValueError, match=r"weights lack score.weight of LlamaForSequenceClassification.*noise"):
        load_reward_model(model)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], r"reward\.reward_model\.model\.path is not set"),
        (["reward_model.model.path={policy}"], r"it has 2 outputs a sequence"),
        (["reward_model.model.path={rm}", *BY_TURNS], r"=turns: it scores whole responses.*env\.history=transcript"),
    ],
)
def test_what_cannot_be_a_reward_model_is_refused_before_anything_starts(
    tiny_model: Path, reward_model: Path, tmp_path: Path, overrides: list[str], message: str
):
    filled = [override.format(policy=tiny_model, rm=reward_model) for override in overrides]
    with pytest.raises(ValueError, match=message):
        run(tiny_model, tmp_path / "run", "reward_model.enable=true", *filled)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def run(policy: Path, folder: Path, *overrides: str) -> None:
    config = compose(*short_run(policy, folder, *overrides))
    check_config(config)
    main.run(config)


def test_rows_without_a_function_are_validated_by_the_model_too(tiny_model: Path, reward_model: Path, tmp_path: Path):
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": f"{i}"}]}) + "\n" for i in range(4)))
    options = ["env.id=null", f"data.train_files={data}", f"data.val_files={data}", "data.custom_cls.path=null"]
    options += ["trainer.total_training_steps=1", "trainer.test_freq=1", "reward_model.enable=true"]
    run(tiny_model, tmp_path / "run", *options, f"reward_model.model.path={reward_model}")
    metrics = learning_metrics(tmp_path / "run")
    [reward] = [value for name, value in metrics[0].items() if name.endswith("/reward/mean@1")]
    [score] = [value for name, value in metrics[0].items() if name.endswith("/rm_score/mean@1")]
    assert reward == score != 0


def test_preference_pairs_hold_a_best_move_against_another_and_some_against_none(tiny_model: Path, monkeypatch):
    config = compose(*short_run(tiny_model, Path("unused")), name="frozenlake_rm")
    environment = build_environment(config)
    monkeypatch.setattr(type(environment), "optimal_actions", lambda self, state: [2])
    pairs = script.preference_pairs(config, 60)
    chosen, rejected = ([TOKENIZER.decode(vars(pair)[name][-1]) for pair in pairs] for name in ("chosen", "rejected"))
    assert {*chosen} == {environment.action_to_text(2)} and not {*chosen} & {*rejected}
    assert 0 < sum(environment.extract_action(text) is None for text in rejected) < 30


def test_a_reward_model_learns_its_pairs_and_is_loaded_as_it_was_saved(tiny_model: Path, tmp_path: Path):
    folder = tmp_path / "reward"
    config = compose(*short_run(tiny_model, tmp_path), f"reward_model.model.path={folder}", name="frozenlake_rm")
    prompt = TOKENIZER.encode("ab")
    pairs = [script.Pair([*prompt, *TOKENIZER.encode("y")], [*prompt, *TOKENIZER.encode("n")])] * 640
    model = script.reward_model(config, pairs)
    assert script.accuracy(model, pairs[:8]) == 1.0
    script.save(model, config)
    [[chosen, _], [rejected, _]] = [both.tolist() for both in script.scores(model, pairs[:2])]
    loaded = role(folder)
    found = loaded.forward([pairs[0].chosen, pairs[0].rejected]).tolist()
    assert found == pytest.approx([chosen, rejected], abs=1e-5)
