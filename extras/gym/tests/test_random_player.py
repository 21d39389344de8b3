"""The return of a random player beside each validation: the same in every run, in time, and a bar for the policy."""

import random
from statistics import fmean
from types import SimpleNamespace

import pytest

from custom.env_wrapper import make_env
from extras.gym import walks
from extras.gym.walks import RandomPlayer
from tests.runs import compose
from tests.test_validation import on_episodes

RETURN, RANDOM = "val-core/Blackjack-v1/return/mean@1", "val-aux/Blackjack-v1/random_player/return/mean@1"


def player(env_id: str = "Blackjack-v1", episodes: int = 100, **settings: object) -> RandomPlayer:
    game = SimpleNamespace(environment=make_env(env_id, **settings))
    config = compose(f"env.val_episodes={episodes}")
    return RandomPlayer(SimpleNamespace(env_setup=game, config=config, total_steps=10))


@pytest.mark.parametrize(("env_id", "least", "most"), [("Blackjack-v1", -0.6, -0.2), ("MountainCar-v0", -200, -200)])
def test_it_plays_whole_episodes_of_legal_moves_equally_in_every_run(env_id, least, most):
    chance = random.getstate()
    returns = player(env_id).returns
    assert random.getstate() == chance and len(returns) == 64 and least <= fmean(returns) <= most
    assert player(env_id, episodes=8).returns == player(env_id, episodes=8, processes=1).returns == returns[:8]


def test_it_stands_in_the_metrics_and_the_line_of_a_validation_and_costs_no_success(tmp_path, capsys):
    trainer = on_episodes(tmp_path, lambda text, times: "L")
    metrics = trainer.validate()
    expected = metrics["val-aux/FrozenLake-v1/random_player/return/mean@1"]
    assert 0 <= expected < 1 and trainer.validation is metrics
    line = f"validation at step 1: FrozenLake-v1: acc 0, return 0, a random player's return {expected:.4g}"
    assert line in capsys.readouterr().out


def test_a_policy_that_is_worse_is_warned_of_once_and_not_early(caplog):
    watch = player()
    for step, reached in [(0, -1.0), (4, -1.0), (5, fmean(watch.returns) - 0.01), (5, 0.5), (8, -1.0), (10, -1.0)]:
        metrics = {RETURN: reached}
        watch.validated(step, [], metrics)
        assert metrics[RANDOM] == fmean(watch.returns)
        assert len(caplog.records) == (step >= 8)
    assert "worse than a random player at step 8" in caplog.text


@pytest.mark.parametrize(("seconds", "episodes", "repeatable"), [(-1.0, 4, True), (10.0, 0, True), (10.0, 4, False)])
def test_nothing_is_said_without_episodes_that_can_be_played_in_time(monkeypatch, seconds, episodes, repeatable):
    monkeypatch.setattr(walks, "MOST_SECONDS", seconds)
    watch, metrics = player(episodes=episodes, repeatable=repeatable), {}
    watch.validated(10, [], metrics)
    assert metrics == {}
    watch.run.env_setup = None
    watch.validated(10, [], metrics)
