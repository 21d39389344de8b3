"""The training loop: with toy roles, whose policy is a table, and with the real tiny model in this process."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import main
from configs.extras import TABLE
from configs.schema import Config
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from data.sampler import PromptLoader, SequentialSampler
from data.types import SamplingParams, Stage
from examples.novelty_trainer import NoveltyTrainer
from tests.batches import episode_batch, padded, random_groups
from tests.runs import compose, learning_metrics, short_run, tree_of, whole_and_resumed
from training.core_algos import register_adv_est
from training.mini_batches import Update, first_policy_step
from training.ray_trainer import RayPPOTrainer
from training.roles import POLICY_COLUMNS, ROLES, columns_read
from workers.group import Role

TOKENIZER = build_tokenizer()
ALL_ROWS = "actor_rollout_ref.actor.calculate_entropy=true"  # or updates go without rows of no advantage
PROMPTS = TOKENIZER.convert_tokens_to_ids(["0", "1", "2", "3"])
ARMS = TOKENIZER.convert_tokens_to_ids(["L", "R"])
ROWS = [{"raw_prompt_ids": [prompt], "data_source": "bandit", "best": "LR"[i % 2]} for i, prompt in enumerate(PROMPTS)]


def pull(data: DataProto) -> list[float]:
    return [float(text == best) for text, best in zip(data.responses, data.best, strict=True)]


class Bandit:
    """All roles at once: logits [prompt, arm] in a table, a response is one arm. Writes down what it is asked for."""

    def __init__(self) -> None:
        self.table = torch.zeros(len(PROMPTS), len(ARMS), requires_grad=True)
        self.calls: list[str] = []
        self.updates: list[DataProto] = []
        self.told: list[Update] = []  # beside each of them
        self.skips: list[float] = []  # what the next updates say

    def log_probs(self, batch: DataProto) -> Tensor:
        prompts = [PROMPTS.index(token) for token in batch.prompts[:, 0]]
        arms = [ARMS.index(token) for token in batch.responses[:, 0]]
        return self.table.log_softmax(-1)[prompts, arms][:, None]

    def generate_sequences(self, prompts: DataProto, sampling: SamplingParams, seed: int) -> DataProto:
        self.calls.append("generate")
        rows = [PROMPTS.index(ids[0]) for ids in prompts.raw_prompt_ids]
        generator = torch.Generator().manual_seed(seed)
        arms = torch.multinomial(self.table.detach().softmax(-1)[rows], 1, generator=generator)[:, 0].tolist()
        responses = [[ARMS[arm]] for arm in arms]
        return prompts.union(padded([*prompts.raw_prompt_ids], responses, 1, 1, TOKENIZER.pad_token_id))

    def reward(self, data: DataProto) -> list[float]:
        self.calls.append("reward")
        return pull(data)

    def compute_log_prob(self, batch: DataProto, temperature: float, columns: Sequence[str]) -> DataProto:
        assert "old_log_probs" in columns and temperature == 1.0
        self.calls.append("old_log_prob")
        log_probs = self.log_probs(batch).detach()
        found = {"old_log_probs": log_probs, "entropys": torch.zeros_like(log_probs)}
        return DataProto.from_dict({column: found[column] for column in columns})

    def compute_values(self, batch: DataProto) -> DataProto:
        self.calls.append("values")
        return DataProto.from_dict({"values": torch.full(batch.responses.shape, 0.5)})

    def update_critic(self, mini_batch: DataProto, update: Update) -> dict[str, float]:
        self.calls.append("update_critic")
        return {"critic/vf_loss": 0.25}

    def update_policy(self, mini_batch: DataProto, update: Update) -> dict[str, float]:
        self.calls.append("update_actor")
        self.updates.append(mini_batch)
        self.told.append(update)
        loss = -(self.log_probs(mini_batch) * mini_batch.advantages).sum() / update.counts["batch_num_tokens"]
        [gradient] = torch.autograd.grad(loss, self.table)
        self.table = (self.table - gradient).detach().requires_grad_()
        skipped = self.skips.pop(0) if self.skips else 0.0
        return {"actor/pg_loss": loss.item(), "actor/skipped_updates": skipped, "actor/ratio_max": len(self.updates)}

    def update_weights(self, version: int) -> dict[str, float]:
        self.calls.append("update_weights")
        return {"rollout/weight_version": version}


class ToyReference:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def compute_log_prob(self, batch: DataProto, temperature: float, columns: Sequence[str]) -> DataProto:
        assert columns == ["ref_log_prob"]
        self.calls.append("ref")
        return DataProto.from_dict({"ref_log_prob": torch.full(batch.responses.shape, math.log(0.5))})


class Toy(Role):
    """A role of this process, which is given batches as they are."""

    def __init__(self, name: str, player: Any, group: Any) -> None:
        super().__init__(group, ROLES[name])
        self.player = player

    def rows(self, method: str, batch: DataProto, *arguments: Any) -> Any:
        return getattr(self.player, method)(batch, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["player"], name)


class CuriousSampler(SequentialSampler):
    seen: list[DataProto]

    def update(self, batch: DataProto) -> None:
        self.seen = [*vars(self).get("seen", []), batch]


def make_trainer(folder: Path, *overrides: str, ref=False, critic=False, reward=None, steps=1, bandit=None):
    bandit = bandit or Bandit()
    config = compose(
        f"trainer.default_local_dir={folder}",
        "trainer.logger=[]",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        *overrides,
        name="ppo_trainer",
    )
    players = {"actor": bandit, "rollout": bandit}
    players |= ({"ref": ToyReference(bandit.calls)} if ref else {}) | ({"critic": bandit} if critic else {})
    group = SimpleNamespace(size=1)
    trainer = RayPPOTrainer(
        config,
        tokenizer=TOKENIZER,
        roles={name: Toy(name, player, group) for name, player in players.items()},
        reward=reward or bandit.reward,
        train_loader=PromptLoader(ROWS, 4, CuriousSampler(ROWS, config.data)),
        total_steps=steps,
    )
    return trainer, bandit


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gae"])
def test_the_loop_teaches_a_table_which_arm_pays(tmp_path, estimator):
    trainer, bandit = make_trainer(
        tmp_path, f"algorithm.adv_estimator={estimator}", critic=estimator == "gae", steps=30
    )
    trainer.fit()
    scores = [metrics["critic/score/mean"] for metrics in learning_metrics(tmp_path).values()]
    assert len(scores) == 30 and scores[0] < 0.8
    assert sum(scores[-5:]) / 5 > 0.9
    assert bandit.table.argmax(1).tolist() == [0, 1, 0, 1]


ALL_TIMED = {"step", "start", "data", "gen", "adv", "metrics", "update_sampler", "save_checkpoint"}
LEARN, CRITIC, MINI = "update_actor update_weights", {"critic": True}, "actor_rollout_ref.actor.ppo_mini_batch_size=2"
STAGES = {  # overrides, roles, and what is called once responses are scored
    "exactly on-policy": ([], {}, LEARN),
    "mini-batches": (["actor_rollout_ref.actor.ppo_mini_batch_size=3"], {}, f"old_log_prob update_actor {LEARN}"),
    "epochs": (["actor_rollout_ref.actor.ppo_epochs=2"], {}, f"old_log_prob update_actor {LEARN}"),
    "KL in the loss": (["actor_rollout_ref.actor.use_kl_loss=true"], {"ref": True}, f"ref {LEARN}"),
    "KL in the reward": (["algorithm.use_kl_in_reward=true"], {"ref": True}, f"old_log_prob ref {LEARN}"),
    "critic": (["algorithm.adv_estimator=gae"], CRITIC, f"values update_critic {LEARN}"),
    "critic alone, in warm-up": (
        ["algorithm.adv_estimator=gae", "trainer.critic_warmup=2", MINI], CRITIC, "values update_critic update_critic",
    ),
}  # fmt: skip


def assert_stages_run(tmp_path: Path, overrides: list[str], roles: dict[str, bool], expected: list[str]) -> None:
    trainer, bandit = make_trainer(tmp_path, *overrides, **roles)
    trainer.fit()
    assert bandit.calls == expected
    [metrics] = (json.loads(line)["data"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    timed = {name.removeprefix("timing_s/") for name in metrics if name.startswith("timing_s/")}
    assert timed == ALL_TIMED | set(expected) - {"generate"}


@pytest.mark.parametrize("case", STAGES)
def test_stages_run_in_order_and_only_where_needed(tmp_path, case):
    overrides, roles, calls = STAGES[case]
    assert_stages_run(tmp_path, overrides, roles, ["generate", "reward", *calls.split()])


class Told(Stage):
    """Asks for the old log-probs, and says when it runs and which columns the batch has by then."""

    @classmethod
    def reads(cls, config: Config) -> set[str]:
        return {"old_log_probs"}

    def __call__(self, batch: DataProto, timing: dict[str, float]) -> dict[str, float]:
        later = ("token_level_scores", "old_log_probs", "advantages")
        return {f"{self.at}/{name}": 1.0 for name in later if name in batch}


@pytest.mark.parametrize(("at", "there"), [("scored", 1), ("prepared", 2), ("advantaged", 3)])
def test_a_stage_of_the_table_runs_at_its_place_where_it_is_wanted(tmp_path, monkeypatch, at, there):
    monkeypatch.setitem(TABLE, "stage", {"algorithm.norm_adv_by_std_in_grpo": f"{__name__}:Told"})
    monkeypatch.setattr(Told, "at", at, raising=False)
    found = {}
    for value in ("true", "false"):
        trainer, bandit = make_trainer(tmp_path / value, f"algorithm.norm_adv_by_std_in_grpo={value}")
        trainer.fit()
        metrics = learning_metrics(tmp_path / value)[1]
        found[value] = [*(name for name in metrics if name.startswith(f"{at}/"))], "old_log_prob" in bandit.calls
    assert len(found["true"][0]) == there and found["true"][1]
    assert found["false"] == ([], False)


def test_the_actor_learns_from_step_critic_warmup_on_and_its_schedule_lies_within_those_steps(tmp_path, tiny_model):
    """The critic's schedule has all steps, the actor's those after the warmup."""
    optim = "{lr: 1.0e-3, lr_scheduler_type: cosine, lr_warmup_steps: 1, min_lr_ratio: 0.1}"
    overrides = [
        "algorithm.adv_estimator=gae",
        "trainer.critic_warmup=3",
        "trainer.total_training_steps=5",
        f"actor_rollout_ref.actor.optim={optim}",
        f"critic.optim={optim}",
        "env.val_episodes=0",
    ]
    main.run(compose(*short_run(tiny_model, tmp_path, *overrides)))
    metrics = learning_metrics(tmp_path)
    actor, critic = ([metrics[step].get(f"{who}/lr") for step in range(1, 6)] for who in ("actor", "critic"))
    assert actor == [None, None, 0.0, 1e-3, pytest.approx(1e-3 * (0.1 + 0.9 * 0.5))]
    assert critic[:2] == [0.0, 1e-3] and critic[2] > critic[3] > critic[4] > 1e-4


def test_the_first_refused_updates_are_told_and_kept_for_study_and_several_in_a_row_end_the_run(tmp_path, caplog):
    overrides = ["trainer.max_skipped_updates=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"]
    trainer, bandit = make_trainer(tmp_path, *overrides, steps=9)
    bandit.skips = [0.0, 1.0, 0.0, 0.0] * 3 + [1.0, 0.0, 0.0, 1.0]  # steps 1, 3, 5, 7 and 8 of two updates each
    with pytest.raises(RuntimeError, match=r"not finite in 2 steps in a row \(trainer\.max_skipped_updates=2"):
        trainer.fit()
    assert trainer.global_step == 8 and [*learning_metrics(tmp_path)] == [*range(1, 9)]
    told = [step for step in range(1, 10) if f"Step {step}: the loss or gradient was not finite in 1" in caplog.text]
    assert told == [1, 3, 5, 7]
    kept = sorted(path.name for path in tmp_path.glob("refused_update_step_*.pkl"))
    assert kept == [f"refused_update_step_{step}.pkl" for step in (1, 3, 5)]
    refused = DataProto.load_from_disk(tmp_path / kept[0])
    assert torch.equal(refused.advantages, bandit.updates[1].advantages) and len(refused) == 8


def test_what_is_learnt_from_is_what_the_policy_said(tmp_path):
    """Nothing is learnt from tokens that an environment said between the policy's."""
    trainer, _ = make_trainer(tmp_path)
    batch = episode_batch(random_groups(0), "transcript", 0)
    batch.pop(["rollout_log_probs"])  # or a correction hands out a mask of its own
    trainer.compute_advantages(batch, {})
    assert torch.equal(batch.loss_mask, batch.response_mask)
    assert (batch.attention_mask[:, -batch.responses.shape[1] :] > batch.loss_mask).any()


GRPO = ["actor_rollout_ref.actor.use_kl_loss=false"]


# The log-prob pass


@pytest.mark.parametrize(
    ("overrides", "columns"),
    [
        ([], []),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=3"], ["old_log_probs"]),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=4"], []),
        (["actor_rollout_ref.actor.ppo_epochs=2"], ["old_log_probs"]),
        (["actor_rollout_ref.actor.ppo_epochs=2", "trainer.critic_warmup=2"], []),  # of this step
        (["actor_rollout_ref.actor.ppo_epochs=2", "trainer.critic_warmup=1"], ["old_log_probs"]),
        (["actor_rollout_ref.actor.use_kl_loss=true"], []),
        (["algorithm.use_kl_in_reward=true"], ["old_log_probs"]),
        (["algorithm.adv_estimator=optimal_token_baseline"], ["old_log_probs", "sum_pi_squared"]),
        ([MINI, "actor_rollout_ref.actor.calculate_entropy=true"], ["entropys", "old_log_probs"]),
        ([MINI, "actor_rollout_ref.actor.entropy_coeff=0.1"], ["entropys", "old_log_probs"]),
        (["actor_rollout_ref.actor.entropy_coeff=0.1"], []),
    ],
)
def test_the_log_prob_pass_is_made_where_something_reads_it_and_for_that_alone(overrides, columns):
    config = compose("data.train_batch_size=4", "algorithm.adv_estimator=grpo", *overrides, name="ppo_trainer")
    assert sorted(columns_read(config, first_policy_step(config) <= 1).intersection(POLICY_COLUMNS)) == columns


REAL = ("data.max_response_length=4", "actor_rollout_ref.rollout.temperature=0.7", "trainer.total_training_steps=2")


# What an estimator asks for


def test_an_estimator_is_given_the_roles_and_columns_that_it_names(tmp_path, tiny_model, restored_registries):
    seen = []

    @register_adv_est("needy")
    def estimate(
        token_level_rewards, response_mask, values, ref_log_prob, reward_baselines, old_log_probs, entropys,
        sum_pi_squared,
    ):  # fmt: skip
        seen.append((values, ref_log_prob, reward_baselines, old_log_probs, entropys, sum_pi_squared))
        return token_level_rewards - values * response_mask, token_level_rewards

    main.run(compose(*short_run(tiny_model, tmp_path, *REAL, "algorithm.adv_estimator=needy", "env.val_episodes=0")))
    metrics = learning_metrics(tmp_path)[1]
    assert metrics["critic/vf_loss"] >= 0 and len(seen) == 2
    for values, ref, baselines, *of_actor in seen:
        assert {column.shape for column in (values, ref, *of_actor)} == {(8, 4)} and baselines.shape == (8,)
    torch.testing.assert_close(seen[0][1], seen[0][3])  # the reference is the policy of the first step


# The overlong penalty


def test_the_overlong_penalty_is_for_training_alone(tmp_path, tiny_model):
    found = {}
    for enable in ("true", "false"):
        overrides = ["data.max_response_length=5", f"reward.reward_kwargs.overlong_buffer_cfg.enable={enable}"]
        folder = tmp_path / enable
        main.run(
            compose(*short_run(tiny_model, folder, *overrides, "env.val_size=4", "trainer.total_training_steps=1"))
        )
        found[enable] = learning_metrics(folder)
    assert found["true"][0] == found["false"][0]  # validation
    [with_penalty, without] = (found[enable][1] for enable in ("true", "false"))
    assert with_penalty["critic/score/mean"] == without["critic/score/mean"]
    mean = with_penalty["reward/overlong_reward/mean"]
    assert mean < 0 and with_penalty["critic/rewards/mean"] == pytest.approx(without["critic/rewards/mean"] + mean)
    assert mean == pytest.approx(-with_penalty["reward/overlong/mean"])  # a buffer of one token: all or nothing


def test_a_reward_that_never_comes_is_said_once_with_its_likeliest_cause(tmp_path, caplog):
    trainer, _ = make_trainer(tmp_path, "trainer.no_signal_steps=4", reward=lambda data: [0.0] * len(data), steps=9)
    trainer.fit()
    messages = [record.getMessage() for record in caplog.records if "taught nothing" in record.getMessage()]
    assert len(messages) == 1
    assert messages[0].startswith("4 steps in a row taught nothing") and "every response scores 0" in messages[0]


def test_val_only_prints_and_records_the_checkpoint_and_leaves_the_runs_folder_alone(tmp_path, tiny_model, capsys):
    run, dumps = tmp_path / "run", tmp_path / "dumps"
    command = short_run(tiny_model, run, "trainer.save_freq=2", "trainer.test_freq=2", "trainer.total_training_steps=2")
    last = main.run(compose(*command))
    before = tree_of(run)
    capsys.readouterr()
    assert main.run(compose(*command, "trainer.val_only=true")) == last
    printed = capsys.readouterr().out
    assert "validation at step 2: FrozenLake-v1: acc" in printed and "resuming from" in printed
    assert all(f"  {name}: {value:.6g}" in printed for name, value in last.items())
    assert tree_of(run) == before
    for _ in range(2):
        main.run(compose(*command, "trainer.val_only=true", f"trainer.validation_data_dir={dumps}"))
    record = [json.loads(line) for line in (dumps / "validation_metrics.jsonl").read_text().splitlines()]
    assert record == [{"step": 2, "data": last}] * 2
    assert len((dumps / "2.jsonl").read_text().splitlines()) == 2


def test_a_trainer_of_the_users_has_a_stage_more_and_its_state_is_resumed(tmp_path, tiny_model):
    own = "trainer.cls=examples/novelty_trainer.py:NoveltyTrainer"
    metrics, again = whole_and_resumed(tiny_model, tmp_path, own)
    assert [again[step] for step in (3, 4)] == [metrics[step] for step in (3, 4)]
    assert 0 < metrics[4]["novelty/bonus"] < 0.1001


def test_an_answer_is_new_once():
    batch, counts = padded([[1], [1], [2]], [[3], [3], [3]], 1, 1, 0), SimpleNamespace(seen=Counter())
    for seen in (torch.tensor([2, 2, 1]), torch.tensor([4, 4, 2])):
        assert torch.equal(NoveltyTrainer.novelty(counts, batch), 0.1 / seen.sqrt())
