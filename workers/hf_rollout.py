"""Rollouts by the Hugging Face model itself: no second copy of the weights, nothing to synchronise.

A sampling loop of our own in place of `generate`: each distinct prompt is prefilled once whatever the number of its
samples, finished rows leave the batch at once, and the log-prob comes out of the softmax that is sampled from.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import RolloutConfig
from training.roles import SamplingParams
from workers.rollout import Completion, Rollout


class HFRollout(Rollout):
    """Samples from `module`, which is the actor's own."""

    def __init__(self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, module: PreTrainedModel) -> None:
        super().__init__(config, tokenizer, module.generation_config)
        self.module = module

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], sampling: SamplingParams, seed: int) -> list[Completion]:
        generator = torch.Generator(self.module.device).manual_seed(seed)
        self.module.eval()
        completions = []
        for start in range(0, len(prompts), self.config.max_num_seqs):
            completions += self._generate(prompts[start : start + self.config.max_num_seqs], sampling, generator)
        self.module.train()
        return completions

    def _generate(
        self, prompts: list[list[int]], sampling: SamplingParams, generator: torch.Generator
    ) -> list[Completion]:
        logits, cache, mask, source = self._prefill(prompts)  # of the distinct prompts, and which of them each row has
        logits, mask = logits[source], mask[source]  # [b, V], [b, p]
        stops = torch.tensor(sorted(self.stop_ids), dtype=torch.long, device=logits.device)
        alive = torch.arange(len(prompts), device=logits.device)  # rows still generating
        tokens: list[list[int]] = [[] for _ in prompts]
        log_probs: list[list[float]] = [[] for _ in prompts]
        stopped = [False] * len(prompts)
        for position in range(sampling.max_tokens):
            sampled, scores = sample(logits, sampling, generator)
            done = torch.isin(sampled, stops)
            for row, token, score, ended in zip(*map(Tensor.tolist, (alive, sampled, scores, done)), strict=True):
                tokens[row].append(token)
                log_probs[row].append(score)
                stopped[row] = ended
            keep = (~done).nonzero()[:, 0]
            if len(keep) == 0 or position == sampling.max_tokens - 1:
                break
            if position == 0 or len(keep) < len(alive):  # the first time, every row also gets a cache of its own
                cache.batch_select_indices(source[keep])
                source = torch.arange(len(keep), device=logits.device)
                alive, sampled, mask = alive[keep], sampled[keep], mask[keep]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            logits = self._forward(sampled[:, None], mask, cache)
        reasons = ["stop" if ended else "length" for ended in stopped]
        return [Completion(*row, self.weight_version) for row in zip(tokens, log_probs, reasons, strict=True)]

    def _prefill(self, prompts: list[list[int]]) -> tuple[Tensor, DynamicCache, Tensor, Tensor]:
        """Runs the d distinct prompts, left-padded: logits [d, V], cache, mask [d, p], and each prompt's place [b]."""
        distinct = {tuple(prompt): place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        width = max(map(len, distinct))
        ids = torch.tensor([[self.pad_token_id] * (width - len(ids)) + list(ids) for ids in distinct])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in distinct])
        cache = DynamicCache(config=self.module.config)
        source = torch.tensor([distinct[tuple(prompt)] for prompt in prompts])
        ids, mask, source = (tensor.to(self.module.device) for tensor in (ids, mask, source))
        return self._forward(ids, mask, cache), cache, mask, source

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Logits after the last of `ids` [b, q]: [b, V] float32. `mask` [b, cached + q] covers the whole sequence."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output = self.module(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1].float()


def sample(logits: Tensor, sampling: SamplingParams, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """One token per row of `logits` [b, V], and its log-prob under the distribution it was drawn from: both [b]."""
    if not sampling.do_sample:
        chosen = logits.argmax(-1)
        return chosen, logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
    scaled = keep_top_p(keep_top_k(logits / sampling.temperature, sampling.top_k), sampling.top_p)
    log_probs = scaled.log_softmax(-1)
    chosen = torch.multinomial(log_probs.exp(), 1, generator=generator)
    return chosen[:, 0], log_probs.gather(-1, chosen)[:, 0]


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """The k largest logits of each row, the others −∞; k < 1 or k ≥ V keeps all. Ties with the k-th stay."""
    if k < 1 or k >= logits.shape[-1]:
        return logits
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """The smallest set of most likely tokens whose probability reaches p, the others −∞ (nucleus, arXiv:1904.09751)."""
    if p >= 1:
        return logits
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    beyond = ordered.cumsum(-1) - ordered >= p  # the mass before this token already reaches p
    return logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
