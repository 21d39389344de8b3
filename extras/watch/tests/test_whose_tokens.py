"""The first step of an episode run says if its transcripts are the environment's own text."""

from argparse import Namespace

import pytest
import torch

from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from extras.watch.health import Watch
from tests.runs import compose

STEP = {"num_turns/mean": 10.0, "invalid_actions/mean": 9.0}
STEP |= {"critic/score/max": 1.0, "critic/score/min": 0.0, "critic/advantages/max": 1.0, "critic/advantages/min": -1.0}


@pytest.mark.parametrize(
    ("told", "said", "invalid", "words"),
    [
        (291.0, 9.0, 9.0, "97% of the tokens of this step are the environment's, as 90% of the"),
        (291.0, 9.0, 9.0, "no legal action; 78% are what it says of these. Train on single"),
        (80.0, 20.0, 9.0, None),
        (291.0, 9.0, 5.0, None),  # long observations
        (0.0, 9.0, 9.0, None),  # env.history=turns
    ],
)
def test_the_first_step_says_once_if_most_tokens_are_the_environments(capsys, told, said, invalid, words):
    game = Namespace(environment=Namespace(max_turns=3, invalid_feedback="That was no legal action."))
    config = compose("env.mode=episode", "trainer.no_signal_steps=0")
    watch = Watch(Namespace(config=config, tokenizer=build_tokenizer(), reward=None, env_setup=game))
    batch = DataProto.from_single_dict({"uid": ["a"]})
    batch.batch["advantages"] = batch.batch["response_mask"] = torch.ones(1, 1)
    metrics = STEP | {"episode/tokens/observation/mean": told, "episode/tokens/policy/mean": said}
    for step in (0, 1, 2):
        watch.stepped(step, batch if step else None, metrics | {"invalid_actions/mean": invalid})
    printed = capsys.readouterr().err
    assert (printed.count(words) == 1) if words else "tokens of this step" not in printed
