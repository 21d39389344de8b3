"""After a sync of weights: does the engine sample by the probabilities that the trainer has?

An engine with a copy of the weights may go on with old ones, or with a part of the new, and nothing would fail: it
would only learn from the wrong policy. So each sync is followed by a few tokens of one row, which the trainer scores.
"""

import torch

from data.padding import collate
from data.types import Request, SamplingParams
from workers.engine import TrainEngine
from workers.rollout import Rollout, answered
from workers.trial import trained_log_probs

PROMPT_TOKENS, TOKENS = 16, 8  # of the probe: at most
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2}  # mean |Δ log-prob|; what rounding does is far below


def probe_distance(engine: Rollout, policy: TrainEngine) -> float:
    """Mean |Δ log-prob| between engine and trainer over the tokens that the engine draws for the probe."""
    vocab_size, config = policy.module.config.get_text_config().vocab_size, engine.config
    prompt = [7 * place % vocab_size for place in range(min(PROMPT_TOKENS, config.prompt_length))]
    most = min(TOKENS, config.response_length)
    request = Request(0, prompt, SamplingParams(True, 1.0, -1, 1.0, most), seed=0)
    [done] = engine.generate([request])
    batch = collate([answered(request, done)], len(prompt), most, engine.pad_token_id)
    with policy.autocast():
        wanted = trained_log_probs(policy.module, batch)
    difference = (batch.batch["rollout_log_probs"] - wanted)[batch.batch["response_mask"].bool()]
    return difference.abs().mean().item()


def check_weights(engine: Rollout, policy: TrainEngine) -> None:
    """Raises RuntimeError if the engine's probabilities are not those of the policy."""
    distance, limit = probe_distance(engine, policy), TOLERANCES[policy.dtype]
    if not distance < limit:
        raise RuntimeError(
            f"after the sync of weights {engine.weight_version}, the log-probs of {type(engine).__name__} differ from "
            f"the trainer's by {distance:.2g} in the mean of a probe, and {limit:g} is the most that rounding may do: "
            "the engine does not have the actor's weights, or computes something else with them. Set "
            "actor_rollout_ref.rollout.name=hf, which samples from the actor itself, and report the model."
        )
