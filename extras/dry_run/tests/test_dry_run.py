"""trainer.dry_run=true: a step that changes and writes nothing, and shows what looks wrong."""

import pytest
import torch

import main
from configs.settings import with_settings
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from extras.dry_run.dry_run import DryRun, findings, highlight_trained, is_templated_twice
from tests.batches import padded
from tests.runs import compose, short_run
from training.ray_trainer import RayPPOTrainer

TOKENIZER = build_tokenizer()
TEACHES = {
    **{"critic/score/max": 1.0, "critic/score/mean": 0.5, "critic/score/min": 0.0},
    **{"critic/advantages/max": 0.7, "critic/advantages/min": -0.7},
    **{"response_length/max": 3.0, "response_length/clip_ratio": 0.0},
}
CONFIG = compose("data.max_prompt_length=8", "data.max_response_length=4", "actor_rollout_ref.model.path=unused")


def test_the_config_of_a_dry_run_is_one_small_step_that_learns_nothing():
    config = compose("trainer.dry_run=true", "actor_rollout_ref.model.path=unused")
    small = DryRun.settle(config)
    assert (small.data.train_batch_size, small.actor_rollout_ref.actor.ppo_mini_batch_size) == (2, 2)
    assert small.actor_rollout_ref.actor.optim.lr == small.critic.optim.lr == 0
    assert small.actor_rollout_ref.rollout == config.actor_rollout_ref.rollout and small.env == config.env
    assert config.trainer.action == "dry_run" and CONFIG.trainer.action == "train"


@pytest.mark.parametrize("name", ["frozenlake", "frozenlake_ppo", "frozenlake_multiturn"])
def test_it_writes_nothing_changes_nothing_and_shows_each_part(name, tmp_path, tiny_model, capsys, monkeypatch):
    weights, step = [], RayPPOTrainer.step

    def watched(trainer):
        model = trainer.actor.group.worker.policy.module
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        found = step(trainer)
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        return found

    monkeypatch.setattr(RayPPOTrainer, "step", watched)
    command = [setting for setting in short_run(tiny_model, tmp_path / "run") if "test_freq" not in setting]
    metrics = main.run(compose(*command, "trainer.dry_run=true", name=name))
    before, after = weights
    assert all(map(torch.equal, before, after)) and metrics["actor/grad_norm"] >= 0
    assert not (tmp_path / "run").exists()
    shown = capsys.readouterr().out
    for part in ("prompt 2 of 2", "<|user|>", "trained", "advantage", "critic/score/mean", "what looks wrong"):
        assert part in shown


def batch_of(prompts: list[str], responses: list[str], end_reason: str = "terminated") -> DataProto:
    ids = [[TOKENIZER.encode(text) for text in texts] for texts in (prompts, responses)]
    batch = padded(*ids, 8, 4, TOKENIZER.pad_token_id)
    batch.batch["loss_mask"] = batch.batch["response_mask"]
    return with_columns(batch, {"uid": prompts, "end_reason": [end_reason] * len(prompts)})


def with_columns(batch: DataProto, columns: dict[str, list[str]]) -> DataProto:
    batch.non_tensor_batch.update(DataProto.from_single_dict(columns).non_tensor_batch)
    return batch


def found(batch: DataProto, metrics: dict[str, float] = TEACHES, **settings: object) -> list[str]:
    changed = {name.replace("__", "."): value for name, value in settings.items()}
    return [*findings(batch, metrics, with_settings(CONFIG, changed), TOKENIZER)]


SOUND = batch_of(["<|user|>a<|end|>", "<|user|>b<|end|>"], ["yes", "no"])


def test_a_sound_step_has_no_findings():
    assert found(SOUND) == []


def test_prompts_that_may_be_cut_are_counted_unless_none_can_be():
    full = batch_of(["abcdefgh", "abc"], ["yes", "no"])
    [said] = found(full, data__truncation="left")
    assert said.startswith("1 of 2 prompts fill data.max_prompt_length=8")
    assert found(full, data__truncation="error") == []


def test_responses_that_never_end_by_themselves_are_named_where_they_could():
    endless = batch_of(["a", "b"], ["yess", "nooo"], end_reason="max_tokens")
    [said] = found(endless)
    assert said.startswith("no response ends by itself")
    assert found(endless, actor_rollout_ref__rollout__response_length=1) == []
    assert found(endless, TEACHES | {"reward/valid_action/mean": 0.9}) == []


def test_moves_that_are_paid_alike_are_named_once_and_before_the_step_has_shown_it():
    moves = pytest.importorskip("extras.gym.actions").Moves(30, 30, frozenset([0.0]))
    for metrics in (TEACHES, TEACHES | {"critic/score/max": 0.0, "critic/score/mean": 0.0}):
        [said] = findings(SOUND, metrics, CONFIG, TOKENIZER, moves)
        assert said.startswith("in 30 of 30 training states all legal actions pay alike (0;")


def test_a_reward_that_teaches_nothing_is_explained():
    [said] = found(SOUND, {**TEACHES, "critic/score/max": 0.0, "critic/score/mean": 0.0})
    assert said.startswith("every response scores 0")


def test_episodes_that_never_go_on_are_named():
    batch = with_columns(SOUND.select_idxs([0, 1]), {"episode": ["a", "b"], "__num_turns__": [1, 1]})
    [said] = found(batch)
    assert said.startswith("no episode has a second turn")
    for settings in ({"env__max_turns": None}, {"env__id": None}):  # nobody calls a tool
        assert found(batch, **settings) == [said]
    assert found(batch, env__max_turns=1) == []
    assert found(batch, env__id=None, actor_rollout_ref__rollout__multi_turn__max_assistant_turns=1) == []
    assert found(with_columns(batch, {"__num_turns__": [1, 2]})) == []


@pytest.mark.parametrize(
    ("history", "room"), [("transcript", "data.max_response_length=4"), ("turns", "data.max_prompt_length=8")]
)
def test_the_room_that_ended_an_episode_is_named(history, room):
    columns = {"episode": ["a", "b"], "__num_turns__": [2, 2], "end_reason": ["terminated", "context_full"]}
    [said] = found(with_columns(SOUND.select_idxs([0, 1]), columns), env__history=history)
    assert said.startswith(f"1 of 2 episodes ended for want of room: raise {room}")
    columns["end_reason"] = ["terminated", "answer_cut"]  # there was room
    assert not found(with_columns(SOUND.select_idxs([0, 1]), columns), env__history=history)


HEADS, USER = ["<|start_header_id|>", "<|end_header_id|>"], "<|start_header_id|>user<|end_header_id|>\n\n"


@pytest.mark.parametrize(
    ("specials", "text", "twice"),
    [
        (["<|im_start|>"], "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        (["<|im_start|>"], "<|im_start|>user\n<|im_start|>system\nBe kind.<|im_end|>\n", True),
        (["<s>", "[INST]"], "<s>[INST] hi [/INST]", False),
        (["<s>", "[INST]"], "<s>[INST] <s>[INST] hi [/INST]", True),
        (["<s>", "[INST]"], "<s><s>[INST] hi [/INST]", True),
        (HEADS, f"{USER}{USER}hi<|eot_id|>", True),
        (HEADS, f"<|start_header_id|>system<|end_header_id|>\n\n<|eot_id|>{USER}hi", False),
    ],
)
def test_a_template_that_was_applied_twice_is_seen_where_a_message_opens_in_another(specials, text, twice):
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    assert is_templated_twice(text, tokenizer) is twice


def test_what_is_trained_is_marked():
    text = highlight_trained(TOKENIZER.encode("yes<|end|>ok"), [1, 1, 1, 0, 1, 1], TOKENIZER)
    marked = [(text.plain[span.start : span.end], span.style) for span in text.spans]
    assert marked == [("yes", "bold green"), ("<|end|>", "dim"), ("ok", "bold green")]
