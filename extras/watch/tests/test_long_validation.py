from argparse import Namespace

import pytest

from extras.watch.health import Watch
from tests.runs import compose

TURNS = ["env.mode=episode", "env.history=turns"]


@pytest.mark.parametrize(
    ("turns", "overrides", "words"),
    [
        (12, ["data.max_response_length=512"], "plays 6 episodes of up to 12 answers of up to 512 tokens each, and"),
        (2000, ["data.max_response_length=1"], "of up to 2000 answers of up to 1 token each"),
        (12, ["data.max_response_length=512", *TURNS], "of up to 12 answers of up to 512 tokens"),
        (12, ["data.max_response_length=8"], None),
        (12, ["data.max_response_length=512", "env.val_episodes=0"], None),
        (12, ["data.max_response_length=512", "env.mode=episode"], None),  # a transcript is one response
        (None, ["data.max_response_length=512"], None),  # an environment of the user's that does not say
    ],
)
def test_the_start_says_if_the_episodes_of_a_validation_may_be_long(capsys, turns, overrides, words):
    environment = Namespace() if turns is None else Namespace(max_turns=turns)
    config = compose("env.val_episodes=6", *overrides)
    run = Namespace(config=config, tokenizer=None, reward=None, env_setup=Namespace(environment=environment))
    Watch(run).started(0)
    said = capsys.readouterr().err
    assert words in said if words else "a validation" not in said
