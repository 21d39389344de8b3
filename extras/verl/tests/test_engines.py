"""Engines that define generate_sequences themselves: the columns of a rollout are made of what they return."""

import pytest
import torch

from configs.schema import RolloutConfig
from custom.tiny_model import build_tokenizer
from data.protocol import DataProto
from tests.test_rollout_contract import GREEDY, PROMPTS
from workers.rollout import Rollout, build_rollout, generate_batch

TOKENIZER = build_tokenizer()


def answers(columns: dict[str, list]) -> DataProto:
    """The batch that an engine of whole batches returns."""
    return DataProto.from_dict({name: torch.tensor(values) for name, values in columns.items()})


IDS, MASK = [[70, 71, 0], [72, 0, 0]], [[1, 1, 0], [1, 0, 0]]
ANOTHER_PROMPT = {
    "responses": IDS,
    "input_ids": [[0, 0, 0, 9, *IDS[0]], [0, 5, 6, 0, *IDS[1]]],
    "attention_mask": [[0, 0, 0, 1, *MASK[0]], [0, 1, 1, 1, *MASK[1]]],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_an_engine_of_the_users_by_hand(dtype: torch.dtype):
    """The engine's columns are narrower than P = 4, R = 5; row 0 has an observation, row 1 stops. Log-probs may come
    in bfloat16, and are float32 from there on."""
    stop = TOKENIZER.eos_token_id
    given = {
        "responses": [[70, 71, 73], [72, stop, 0]],
        "attention_mask": [[1, 1, 1, 1], [0, 1, 1, 0]],
        "response_mask": [[1, 0, 1], [1, 1, 0]],
        "rollout_log_probs": [[-1.0, 9.0, -3.0], [-4.0, -5.0, 9.0]],
        "own": [[1], [2]],
    }
    result = answers(given)
    result.batch["rollout_log_probs"] = result.batch["rollout_log_probs"].to(dtype)
    engine_class = type("Mine", (Rollout,), {"generate_sequences": lambda self, prompts: result})
    engine = build_rollout(engine_class, RolloutConfig(prompt_length=4, response_length=5), TOKENIZER, None)
    prompts = DataProto.from_single_dict({"raw_prompt_ids": PROMPTS[:2], "size": torch.tensor([[1.0], [3.0]])})
    batch = generate_batch(engine, prompts, GREEDY, seed=3, first_row=0)
    wanted = {
        "prompts": [[0, 0, 0, 9], [0, 5, 0, 6]],
        "responses": [[70, 71, 73, 0, 0], [72, stop, 0, 0, 0]],
        "attention_mask": [[0, 0, 0, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 0, 0, 0]],
        "position_ids": [[0, 0, 0, 0, 1, 2, 3, 3, 3], [0, 0, 1, 2, 3, 4, 4, 4, 4]],
        "response_mask": [[1, 0, 1, 0, 0], [1, 1, 0, 0, 0]],
        "rollout_log_probs": [[-1, 0, -3, 0, 0], [-4, -5, 0, 0, 0]],
        "own": [[1], [2]],
        "size": [[1], [3]],
    }
    assert {name: batch.batch[name].tolist() for name in wanted} == wanted
    assert batch.batch["rollout_log_probs"].dtype == torch.float32
    assert batch.end_reason.tolist() == ["max_tokens", "terminated"]
    assert generate_batch(engine, prompts[:0], GREEDY, 3, 0).batch["responses"].shape == (0, 5), "it is not asked"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (None, "returned None: generate_sequences must return a DataProto"),
        ({"responses": IDS[:1], "response_mask": MASK[:1]}, "returned 1 rows for 2 prompts"),
        ({"responses": IDS}, r"returned the tensors {'responses': \[2, 3\]}"),
        ({"response_mask": MASK}, r"returned the tensors {'response_mask': \[2, 3\]}"),
        ({"responses": [7, 8], "response_mask": [1, 1]}, r"{'responses': \[2\], 'resp"),
        ({"responses": [[0.5], [1]], "response_mask": [[1], [1]]}, "the tensors {'responses"),
        ({"responses": IDS, "response_mask": [[1, 1]] * 2}, r"\[2, 3\] and response_mask \[2, 2\]"),
        ({"responses": [[70, -1, 0], IDS[1]], "response_mask": MASK}, "the token id -1 for request 0"),
        ({"responses": IDS, "response_mask": MASK, "rollout_log_probs": [[3.0] * 3] * 2}, "the log-prob 3.0"),
        ({"responses": [[7] * 6] * 2, "response_mask": [[1] * 6] * 2}, "6 tokens: at most .*=5"),
        (ANOTHER_PROMPT, "another prompt in row 1 of input_ids"),
    ],
)
def test_what_an_engine_of_whole_batches_gets_wrong_is_named(columns, words):
    class Mine(Rollout):
        def generate_sequences(self, prompts: DataProto) -> DataProto:
            return columns and answers(columns)

    engine = build_rollout(Mine, RolloutConfig(prompt_length=4, response_length=5), TOKENIZER, None)
    prompts = DataProto.from_single_dict({"raw_prompt_ids": PROMPTS[:2]})
    with pytest.raises(ValueError, match=rf"the engine .*Mine \({__file__}\) .*{words}"):
        generate_batch(engine, prompts, GREEDY, seed=3, first_row=0)
