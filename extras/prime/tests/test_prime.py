"""PRIME by hand, its model's update one row at a time, and whole runs: all orders, losses, and a resume to the bit."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import main
from configs.errors import ConfigError
from configs.schema import ModelConfig, OptimConfig
from custom.tiny_model import save_tiny_model
from data.padding import last_token
from data.protocol import DataProto, object_array
from extras.prime.estimator import (
    batch_norm,
    best_of_n_weights,
    compute_prime_advantage_return,
    opponents_of,
    pair_accuracy,
    row_losses,
    sign_accuracy,
    token_rewards,
)
from extras.prime.model import ProcessRewardModel
from extras.prime.settings import PrimeConfig
from extras.prime.stage import ProcessRewards, outcomes
from tests.batches import (
    CUTS,
    MASKED_ROW,
    Recorded,
    close,
    padded,
    policy_tokens,
    ragged_batch,
    recorded,
    relative_distance,
    unpadded,
)
from tests.ranks import Ranks
from tests.runs import compose, learning_metrics, short_run, state_files, whole_and_resumed
from tests.test_replicas import own_share, save_two_layers
from training.mini_batches import Update, global_batch_info
from training.roles import ROLES, columns_read, needed_roles
from workers.engine import TrainEngine
from workers.micro_batches import MicroBatchSize
from workers.model_worker import model_bytes
from workers.models import load_causal_lm
from workers.parallel import Replicas

CPU = torch.device("cpu")
BETA = 0.5
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
Q = torch.tensor([[0.4, -0.2, 0.6, 0], [1, -3, 0, 0]])
ACC = torch.tensor([1.0, 0.0])
SCORES = BETA * Q.sum(1)
RETURNS = [[4.675, 4.6166667, 4.8583333, 0], [-4.7833333, -5.1416667, 0, 0]]
ADVANTAGES = [[0.7221290, 0.7111306, 0.7566957, 0], [-1.0611967, -1.1287588, 0, 0]]


def outcome_at_end(acc: Tensor, mask: Tensor) -> Tensor:
    """Scores [B, R] that pay the outcome on the last token."""
    return last_token(mask) * acc[:, None]


def advantages(rewards: Tensor, acc: Tensor, mask: Tensor, index: list[str], **coefs: float) -> tuple[Tensor, Tensor]:
    return compute_prime_advantage_return(outcome_at_end(acc, mask), rewards, mask, index, **coefs)


def test_the_losses_by_hand():
    close(row_losses(SCORES, ACC).mean(), 0.4131385, 1e-6)
    opponents = opponents_of(SCORES, ACC, ["a", "a"], MASK)
    close(opponents, [-1.0, 0.4])
    close(row_losses(SCORES, ACC, opponents, torch.ones(2)).mean(), 0.2204174, 1e-6)
    assert opponents_of(SCORES, ACC, ["a", "b"], MASK).tolist() == [0, 0]


def test_returns_and_advantages_by_hand():
    rewards = torch.tensor([[0.02, -0.01, 0, 0], [0.05, 0, 0, 0]])
    found = advantages(rewards, ACC, MASK, ["a", "a"])
    close(found[1], RETURNS)
    close(found[0], ADVANTAGES)


def test_rewards_of_tokens_by_hand():
    close(token_rewards(Q, MASK, BETA), [[0.2, -0.1, 0, 0], [0.5, 0, 0, 0]])
    close(token_rewards(Q, MASK, BETA, 0.5), [[0.2 - 0.05 + 0.075, -0.1 + 0.15, 0, 0], [0.5 - 0.75, 0, 0, 0]])
    close(batch_norm(token_rewards(Q, MASK, BETA), MASK), [[0.4, -0.2, 0, 0], [1, 0, 0, 0]], 1e-5)
    assert batch_norm(torch.zeros(2, 4), MASK).tolist() == torch.zeros(2, 4).tolist()


def test_accuracies_and_best_of_n_weights_by_hand():
    assert pair_accuracy(SCORES, ACC, ["a", "a"], MASK) == 1 == sign_accuracy(SCORES, ACC, MASK)
    assert pair_accuracy(-SCORES, ACC, ["a", "a"], MASK) == 0 == sign_accuracy(-SCORES, ACC, MASK)
    assert pair_accuracy(SCORES, torch.ones(2), ["a", "a"], MASK) == 0.5
    assert pair_accuracy(SCORES, ACC, ["a", "b"], MASK) == 0.5  # neither has a pair
    values, mask = torch.tensor([3.0, 1.0, 2.0, 9.0]), torch.ones(4, 2)
    close(best_of_n_weights(values, ["a", "a", "a", "b"], mask), [3, 3 / 9, 3 * 4 / 9, 1])


def test_the_baseline_of_a_row_is_the_others_mean_and_a_part_of_its_own_distance():
    mask, index = torch.ones(3, 5, dtype=torch.long), ["a"] * 3
    rewards = torch.randn(3, 5)
    _, returns = advantages(rewards, torch.zeros(3), mask, index, reward_dpo_coef=1)
    means = rewards.mean(1)
    for row in range(3):
        others = (means.sum() - means[row]) / 2
        wanted = rewards[row] - others + (rewards[row] - means[row]) / 2
        close(returns[row], wanted.flip(0).cumsum(0).flip(0), 1e-5)


def test_a_failed_row_leaves_every_statistic():
    rewards, index = torch.tensor([[0.02, -0.01, 0, 0], [0.05, 0, 0, 0], [9.0] * 4]), ["a"] * 3
    mask = torch.cat([MASK, torch.zeros(1, 4, dtype=torch.long)])
    acc, scores = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([*SCORES.tolist(), 9.0])
    found = advantages(rewards, acc, mask, index)
    assert not found[0][2].any() and not found[1][2].any()
    close(found[1][:2], RETURNS)
    close(opponents_of(scores, acc, index, mask)[:2], [-1.0, 0.4])
    close(best_of_n_weights(scores, index, mask)[:2], best_of_n_weights(SCORES, ["a", "a"], MASK))
    assert pair_accuracy(scores, torch.tensor([1.0, 0.0, 0.5]), index, mask) == 1
    lone = advantages(rewards[:2], acc[:2], torch.tensor([[1, 1, 1, 0], [0, 0, 0, 0]]), ["a", "a"])
    assert not lone[0].any() and not lone[1].any()


# The model's update


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_two_layers(tmp_path_factory.mktemp("models") / "two_layers")


def model_of(path: Path, size: MicroBatchSize = CUTS["3 rows"], parallel: Replicas | None = None, **settings):
    """The process reward model of a run, of whose weights the clip is far away."""
    config = PrimeConfig(enable=True, beta_train=BETA, **settings)
    module = load_causal_lm(ModelConfig(path=str(path)), parallel=parallel or Replicas())
    engine = TrainEngine(module, OptimConfig(lr=1e-3, clip_grad=1e9), 10, CPU, torch.float32)
    return ProcessRewardModel(config, engine, size, CUTS["24 tokens"])


def outcome_batch() -> DataProto:
    """Rows with outcomes, compared with numbers near an untrained model's log-probs."""
    batch = ragged_batch()
    batch.batch["prm_outcomes"] = torch.tensor([1.0, 0, 1, 1, 0, 0, 1, 0, 0.25])[:, None]
    batch.batch["prm_reference"] = batch.batch["ref_log_prob"]
    return batch


def update_of(batch: DataProto) -> Update:
    return Update(step=0, seed=0, temperature=1.0, counts=global_batch_info(batch, PrimeConfig(enable=True)))


def learn(model: ProcessRewardModel, batch: DataProto, whole: DataProto | None = None) -> Recorded:
    update = update_of(batch if whole is None else whole)
    return recorded(model.engine, lambda: model.update_prm(batch, update).meta_info["metrics"])


def slow_scores(model: ProcessRewardModel, batch: DataProto) -> list[tuple[Tensor, float]]:
    """beta · Q and the outcome of each row that did not fail, one row at a time."""
    found = []
    for row in range(len(batch)):
        if row == MASKED_ROW:
            continue
        ids, prompt = unpadded(batch, row)
        log_probs = model.engine.module(ids[None]).logits[0, prompt - 1 : -1].log_softmax(-1)
        places = policy_tokens(batch, row)
        chosen = log_probs[places, ids[prompt:][places]] - batch.batch["prm_reference"][row, places]
        found.append((BETA * chosen.sum(), batch.batch["prm_outcomes"][row, 0].item()))
    return found


def test_the_update_is_that_of_rows_one_by_one(policy: Path):
    batch, model = outcome_batch(), model_of(policy)
    scores = slow_scores(model, batch)
    loss = sum(F.binary_cross_entropy_with_logits(score, torch.tensor(acc)) for score, acc in scores) / 8
    wanted = torch.autograd.grad(loss, [weight for weight in model.engine.module.parameters() if weight.requires_grad])
    metrics, gradient, _ = learn(model, batch)
    assert metrics["reward_model/dpo_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert relative_distance(gradient, list(wanted)) < 1e-5
    assert {"reward_model/grad_norm", "rm/lr", "reward_model/skipped_updates"} < metrics.keys()


@pytest.mark.parametrize("loss_type", ["ce", "dpo", "bon_rm"])
@pytest.mark.parametrize("cut", CUTS)
def test_how_rows_are_cut_changes_nothing(policy: Path, cut: str, loss_type: str):
    batch = outcome_batch()
    if loss_type != "ce":
        batch.batch["prm_opponents"], batch.batch["prm_weights"] = torch.randn(9, 1), torch.rand(9, 1)
    wanted = learn(model_of(policy, CUTS["all rows"], loss_type=loss_type), batch)
    found = learn(model_of(policy, CUTS[cut], loss_type=loss_type), batch)
    assert found[0] == pytest.approx(wanted[0], rel=1e-4)
    assert relative_distance(found[1], wanted[1]) < 1e-5


def test_the_passes_that_learn_return_the_log_probs_from_before(policy: Path):
    batch, model = outcome_batch(), model_of(policy)
    before = model.compute_prm(batch, ["prm_log_probs"]).batch["prm_log_probs"]
    learnt = model.update_prm(batch, update_of(batch)).batch["prm_log_probs"]
    close(learnt, before)
    assert not learnt[MASKED_ROW].any()
    assert (model.compute_prm(batch, ["prm_log_probs"]).batch["prm_log_probs"] - before).abs().max() > 1e-3


def step_of_share(path: Path, spread) -> tuple[dict[str, float], list[Tensor], list[Tensor]]:
    """An update by this rank's share of the rows."""
    batch, model = outcome_batch(), model_of(path, parallel=spread())
    metrics, gradient, weights = learn(model, own_share(batch), batch)
    full = model.engine.parallel.full
    return metrics, [*map(full, gradient)], [*map(full, weights)]


def assert_ranks_take_the_step_of_one(ranks: Ranks, path: Path, spread) -> None:
    metrics, gradient, weights = step_of_share(path, Replicas)
    for found in ranks.run(step_of_share, path, spread):
        assert found[0] == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        assert relative_distance(found[1], gradient) < 1e-5 and relative_distance(found[2], weights) < 3e-5


@pytest.mark.slow
def test_ranks_take_the_step_of_one(ranks: Ranks, policy: Path):
    assert_ranks_take_the_step_of_one(ranks, policy, Replicas)


# Runs

PRIME = ["recipe=prime", "algorithm.filter_groups.enable=false", "algorithm.prime.optim.lr=1e-3"]
PRIME += ["data.max_response_length=4", "env.val_episodes=0"]


def play(model: Path, folder: Path, *more: str) -> dict[int, dict[str, float]]:
    main.run(compose(*short_run(model, folder, "actor_rollout_ref.rollout.n=4", *PRIME, *more)))
    return learning_metrics(folder)


OTHER = "algorithm.prime.model.path={folder}/other"
REWARD = "def compute_reward(prompt, response, ground_truth):\n    return float(sum(map(ord, response)) % 2)\n"


@pytest.fixture
def scored(tmp_path: Path) -> list[str]:
    """A reward by which answers nearly always differ."""
    (tmp_path / "reward.py").write_text(REWARD)
    key = "reward.custom_reward_function"
    return [f"{key}.path={tmp_path}/reward.py", f"{key}.name=compute_reward"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["algorithm.prime.update=after", "algorithm.prime.ppo_mini_batch_size=2"],
        ["algorithm.prime.update=reverse", "algorithm.prime.loss_type=dpo", "algorithm.prime.norm=none", OTHER],
        ["algorithm.prime.loss_type=bon_acc", "algorithm.prime.lam=0.5"],
        ["algorithm.prime.loss_type=bon_rm", "actor_rollout_ref.rollout.temperature=0.9"],
        ["actor_rollout_ref.model.lora_rank=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2"],
    ],
    ids=str,
)
def test_every_order_and_loss_trains(tiny_model: Path, tmp_path: Path, scored: list[str], more: list[str]):
    """Another model than the policy is compared with its own start, so that it pays nothing before it has learnt."""
    save_tiny_model(tmp_path / "other", seed=5, hidden_size=48, layers=2)
    metrics = play(tiny_model, tmp_path / "run", *scored, *(setting.format(folder=tmp_path) for setting in more))
    assert (metrics[1]["reward_model/raw_reward"] == 0) == (OTHER in more)
    for step in (1, 2, 3, 4):
        assert metrics[step]["reward_model/grad_norm"] > 0 == metrics[step]["reward_model/skipped_updates"]
        assert metrics[step]["rm/lr"] == 1e-3 and 0 <= metrics[step]["reward_model/dpo_acc_before"] <= 1
    assert metrics[4]["reward_model/raw_reward"] != 0 != metrics[4]["reward_model/reward"]


def test_a_model_that_never_learns_rewards_nothing(tiny_model: Path, tmp_path: Path, scored: list[str]):
    frozen = play(tiny_model, tmp_path / "none", *scored, "algorithm.prime.update=none")
    alone = "algorithm.adv_estimator_kwargs={reward_dpo_coef:0}"
    outcome = play(tiny_model, tmp_path / "outcome", *scored, alone)
    assert all(frozen[step]["reward_model/raw_reward"] == 0 for step in frozen if step)
    for step in (1, 2, 3, 4):
        names = [name for name in frozen[step] if name.startswith(("actor/", "critic/"))]
        assert [frozen[step][name] for name in names] == [outcome[step][name] for name in names]


def test_a_resumed_run_repeats_to_the_bit(tiny_model: Path, tmp_path: Path, scored: list[str]):
    whole, again = whole_and_resumed(tiny_model, tmp_path, "actor_rollout_ref.rollout.n=4", *PRIME, *scored)
    assert {part.name for part in (tmp_path / "whole/global_step_2").iterdir() if part.is_dir()} == {"actor", "prm"}
    assert [again[step] for step in (3, 4)] == [whole[step] for step in (3, 4)]
    assert state_files(tmp_path / "resumed", 4) == state_files(tmp_path / "whole", 4)


def test_the_policys_reference_is_asked_where_it_is_the_same(tiny_model: Path, tmp_path: Path):
    save_tiny_model(tmp_path / "other", seed=5, hidden_size=48, layers=2)

    def roles(*more: str) -> tuple[list[str], set[str]]:
        config = compose(*short_run(tiny_model, tmp_path, *PRIME, *more))
        return needed_roles(config), columns_read(config)

    names, columns = roles()
    assert names == ["actor", "rollout", "ref", "prm"] and "prm_ref_log_prob" not in columns
    other = OTHER.format(folder=tmp_path)
    for more in ("actor_rollout_ref.rollout.temperature=0.7", other):
        names, columns = roles(more)
        assert names == ["actor", "rollout", "prm"] and "prm_ref_log_prob" in columns
    hotter = compose(*short_run(tiny_model, tmp_path, *PRIME, "actor_rollout_ref.rollout.temperature=0.7"))
    held = model_bytes(hotter, {"policy": Replicas()})
    assert held["prm"] == held["actor"] * 20 / 16, "weights, gradients and moments, and the weights it is compared with"
    assert "prm" not in roles("trainer.val_only=true")[0]
    assert "prm" not in needed_roles(compose(*short_run(tiny_model, tmp_path)))


def test_an_estimator_of_the_users_may_name_the_rewards(tiny_model: Path, tmp_path: Path, restored_registries):
    (tmp_path / "mine.py").write_text(
        "from training.core_algos import register_adv_est\n"
        "@register_adv_est('only_process')\n"
        "def only_process(prm_rewards, response_mask):\n"
        "    return prm_rewards * response_mask, prm_rewards\n"
    )
    mine = [f"actor_rollout_ref.model.external_lib={tmp_path}/mine.py", "algorithm.adv_estimator=only_process"]
    metrics = play(tiny_model, tmp_path / "run", *mine, "algorithm.prime.enable=true")
    assert metrics[2]["reward_model/grad_norm"] > 0


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (["actor_rollout_ref.rollout.n=1"], r"rollout\.n=1"),
        (["algorithm.prime.enable=false"], r"algorithm\.prime\.enable=false"),
        (["algorithm.use_kl_in_reward=true"], r"algorithm\.use_kl_in_reward=true"),
        (["reward.reward_kwargs.overlong_buffer_cfg.enable=true"], r"overlong_buffer_cfg\.enable=true"),
        (["reward.reward_model.enable=true", "reward.reward_model.model.path=x"], r"algorithm\.prime\.model\.path"),
        (["env.mode=episode", "env.history=turns"], r"env\.history=transcript"),
        (["algorithm.prime.ppo_mini_batch_size=9"], r"algorithm\.prime\.ppo_mini_batch_size=9"),
        (["algorithm.prime.model.path=nowhere"], r"algorithm\.prime\.model\.path"),
        (["algorithm.prime.loss_type=bce"], r"algorithm\.prime\.loss_type"),
        (["algorithm.prime.granularity=whole"], r"algorithm\.prime\.granularity"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_by_its_key(tiny_model: Path, tmp_path: Path, settings: list[str], named: str):
    with pytest.raises((ConfigError, ValueError), match=named):
        main.build(compose(*short_run(tiny_model, tmp_path, "recipe=prime", *settings)))


def test_models_of_other_tokens_or_beside_split_layers_are_refused(tiny_model: Path, tmp_path: Path):
    from transformers import AutoTokenizer

    save_tiny_model(tmp_path / "other", seed=5, hidden_size=48, layers=2)
    other = ["recipe=prime", f"algorithm.prime.model.ref_path={tmp_path}/other"]
    with pytest.raises(ConfigError, match=r"algorithm\.prime\.model\.ref_path=.*2 workers a layer"):
        main.build(compose(*short_run(tiny_model, tmp_path, *other, "actor_rollout_ref.actor.tensor_parallel_size=2")))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "other")
    tokenizer.add_tokens(["<other>"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"algorithm\.prime\.model\.ref_path=.*other tokens"):
        main.build(compose(*short_run(tiny_model, tmp_path, *other)))


def test_what_prompts_show_beside_their_text_is_learnt_from(tiny_model: Path, tmp_path: Path):
    batch = padded([[1], [1]], [[1, 2], [3]], 1, 2, 0)
    batch.batch["token_level_scores"] = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    batch.batch["ref_log_prob"] = torch.zeros(2, 2)
    batch.non_tensor_batch |= {"uid": object_array(["a", "a"]), "media": object_array(["one", "two"])}
    seen = []

    def learn(learner, mini_batches) -> dict[str, float]:
        seen.extend(mini_batch.media.tolist() for mini_batch, _ in mini_batches)
        return {}

    config = compose(*short_run(tiny_model, tmp_path, "recipe=prime", "algorithm.prime.update=after"))
    role = SimpleNamespace(spec=ROLES["prm"])
    trainer = SimpleNamespace(config=config, roles={"prm": role}, learn=learn, global_step=1)
    ProcessRewards(trainer)(batch, {})
    assert seen == [["one", "two"]] and not batch.batch["prm_rewards"].any()


def test_an_outcome_beyond_0_and_1_is_refused():
    batch = padded([[1], [1]], [[1, 2], [3]], 1, 2, 0)
    batch.batch["token_level_scores"] = torch.tensor([[0.0, 1.0], [0.0, -0.5]])
    with pytest.raises(ValueError, match=r"row 1 .* scored -0\.5"):
        outcomes(batch)
