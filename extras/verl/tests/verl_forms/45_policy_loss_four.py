import torch

from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss


@register_policy_loss("plain_pg")
def plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None):
    loss = agg_loss(loss_mat=-advantages * log_prob, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)
    zero = torch.tensor(0.0)
    return loss, zero, (old_log_prob - log_prob).mean(), zero
