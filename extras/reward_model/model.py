"""Scores rows by a learned reward model: a sequence classifier with one output reads prompt and response.

If it has the policy's tokenizer and chat template it is shown the very tokens that the policy saw and produced;
otherwise the conversation is written again in its own template, by its own tokenizer.
"""

from collections.abc import Sequence
from itertools import count

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from configs.schema import PretrainedModelConfig
from data.pretrained import load_model_config, position_count
from data.protocol import DataProto
from data.seqlen_balancing import padded_parts
from extras.reward_model.settings import RewardModelConfig
from extras.reward_model.stage import RM_KEY, encode_conversation, reward_tokenizer
from workers.collectives import gather
from workers.engine import compute_dtype
from workers.model_worker import ModelWorker
from workers.models import WHOLE, Report, load_pretrained, no_dropout, plain_matrices
from workers.parallel import Replicas


class LearnedReward:
    """Scores responses by the model at reward.reward_model.model.path.

    Args:
        tokenizer: the policy's.
        parallel: how it is spread over the workers.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        parallel: Replicas = WHOLE,
    ) -> None:
        self.config = config
        self.device = device
        self.dtype = compute_dtype(config.fsdp_config.dtype, device)
        self.model = load_reward_model(config.model, parallel)
        if not parallel.lockstep:
            for matrix in plain_matrices(self.model):
                matrix.data = matrix.to(self.dtype)
            self.model.to(device)
        self.on_device = parallel.on_device(self.model)
        self.longest = config.max_length or position_count(self.model.config.get_text_config())
        self.tokenizer = tokenizer
        self.own_tokenizer = reward_tokenizer(config.model, tokenizer)

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        """Computes the model's output for each row's prompt and response: column rm_scores, [B] float32 on the CPU."""
        rows = [ids[-self.longest :] if self.longest else ids for ids in self.conversations(batch)]
        scores = torch.zeros(len(rows))
        parts = self.parts([len(ids) for ids in rows])
        missing = max(gather(len(parts))) - len(parts)  # in each forward the ranks gather sharded weights together
        with self.on_device():
            for part in parts:
                scores[part] = self.forward([rows[row] for row in part])
            for _ in range(missing):
                self.forward([[0]])
        return DataProto.from_dict({"rm_scores": scores})

    def conversations(self, batch: DataProto) -> list[list[int]]:
        """Encodes each row's prompt and response as this model reads them."""
        attended = batch.batch["attention_mask"].bool()
        if self.own_tokenizer is None:
            return [ids[mask].tolist() for ids, mask in zip(batch.batch["input_ids"], attended, strict=True)]
        responses = batch.batch["responses"]
        masks = attended[:, -responses.shape[1] :]
        responses = [ids[mask].tolist() for ids, mask in zip(responses, masks, strict=True)]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        return [
            encode_conversation(prompt, text, self.own_tokenizer)
            for prompt, text in zip(batch.non_tensor_batch["raw_prompt"], texts, strict=True)
        ]

    def parts(self, lengths: Sequence[int]) -> list[list[int]]:
        """Chooses the rows of each forward: fewer than the vocabulary has ids, as `forward` needs one to pad with."""
        most = self.model.config.get_text_config().vocab_size - 1
        if self.config.micro_batch_size_per_gpu is None:
            parts = padded_parts(lengths, self.config.forward_max_token_len_per_gpu)
        else:
            parts = [sorted(range(len(lengths)), key=lambda row: -lengths[row])]
            most = min(most, self.config.micro_batch_size_per_gpu)
        return [part[start : start + most] for part in parts for start in range(0, len(part), most)]

    @torch.no_grad()
    def forward(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Computes the output for each of these token ids, [len(rows)] float32 on the CPU.

        transformers reads it off the last token that is not the pad token, so padding is done by an id that no row
        ends with: the policy's pad token may be its eos.
        """
        ends = {ids[-1] for ids in rows}
        pad = next(token for token in count() if token not in ends)
        self.model.config.pad_token_id = self.model.config.get_text_config().pad_token_id = pad
        width = max(map(len, rows))
        ids = torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in rows], device=self.device)
        mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in rows], device=self.device)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float().cpu()


def load_reward_model(model: PretrainedModelConfig, parallel: Replicas = WHOLE) -> PreTrainedModel:
    """Loads the sequence classifier at `model.path`, float32, without dropout."""
    config = load_model_config(model, model.path, f"{RM_KEY}.path")
    config.update({**no_dropout(config), **model.override_config})
    loaded = load_pretrained(AutoModelForSequenceClassification, model, config, check_is_whole, parallel)
    return loaded.eval().requires_grad_(False)


def check_is_whole(model: PreTrainedModel, report: Report, path: str) -> None:
    """Raises ValueError where the folder of a reward model lacks weights."""
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"{RM_KEY}.path={path}: its weights lack {', '.join(missing[:3])} of "
            f"{type(model).__name__}, so its scores would be noise. Give the folder of a trained reward model, e.g. "
            "one that `python -m scripts.reward_model` writes."
        )


def build_reward_model(worker: ModelWorker) -> LearnedReward:
    return LearnedReward(worker.config.reward.reward_model, worker.tokenizer, worker.device, worker.layouts["rm"])
