"""The scores of a micro-batch by the packed forward: no padding, each prompt once, and no logits in memory."""

from collections.abc import Collection

from torch import Tensor, nn
from transformers import PreTrainedModel

from workers.kernels.packed_attention import Packed
from workers.kernels.token_head import score_tokens
from workers.micro_batches import WHOLE_SEQUENCE, MicroBatch, TokenScores


def packed_scores(
    model: PreTrainedModel, micro: MicroBatch, temperature: float, ask: Collection[str] = ("log_probs",)
) -> TokenScores:
    """Scores of a micro-batch's responses, as `workers.scoring_model.padded_scores` has them.

    Raises:
        AttributeError: a value model whose head is not called `score`.
        TypeError: a head that is not a linear layer, an adapter's say, which does more than its weight tells.
    """
    packed = Packed.of(*(micro.columns[name] for name in WHOLE_SEQUENCE), micro.response_width)
    hidden = hidden_states(model, packed)[packed.predictors[micro.is_scored[micro.is_real]]]
    if "values" in ask:
        return TokenScores(values=micro.spread(model.score(hidden)[:, 0].float()))
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise TypeError(f"its head is a {type(head).__name__}, not a linear layer")
    scores = score_tokens(
        hidden,
        head.weight,
        micro.columns["responses"][micro.is_scored],
        bias=head.bias,
        temperature=temperature,
        softcap=model.config.to_dict().get("final_logit_softcapping"),
        with_entropy="entropy" in ask,
        with_sum_pi_squared="sum_pi_squared" in ask,
    )
    return TokenScores(*(None if values is None else micro.spread(values) for values in scores))


def hidden_states(model: PreTrainedModel, packed: Packed) -> Tensor:
    """The last hidden states of all tokens, [T, d]; the attention of `model` is the packed one."""
    output = model.base_model(
        input_ids=packed.input_ids.unsqueeze(0),
        position_ids=packed.position_ids.unsqueeze(0),
        attention_mask=packed.input_ids.new_zeros(1, 1, 1, 1),  # four dimensions: transformers makes no mask of its own
        use_cache=False,
        packed=packed,
    )
    return output.last_hidden_state.squeeze(0)
