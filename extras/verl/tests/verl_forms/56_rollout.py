import torch
from tensordict import TensorDict

from verl import DataProto
from verl.utils.torch_functional import get_response_mask
from verl.workers.rollout.base import BaseRollout


class Sevens(BaseRollout):
    def __init__(self, module=None, config=None, **kwargs):
        super().__init__()
        self.config, self.module = config, module

    @torch.no_grad()
    def generate_sequences(self, prompts: DataProto) -> DataProto:
        ids = prompts.batch["input_ids"]
        eos = prompts.meta_info["eos_token_id"]
        answers = torch.full((len(ids), self.config.response_length), 7)
        answers[:, 1:] = eos if isinstance(eos, int) else eos[0]
        mask = get_response_mask(answers, eos_token=eos, dtype=prompts.batch["attention_mask"].dtype)
        steps = torch.arange(1, answers.shape[1] + 1)
        places = torch.cat([prompts.batch["position_ids"], prompts.batch["position_ids"][:, -1:] + steps], dim=-1)
        batch = TensorDict(
            {
                "prompts": ids, "responses": answers, "input_ids": torch.cat([ids, answers], -1), "position_ids": places,
                "attention_mask": torch.cat([prompts.batch["attention_mask"], mask], -1),
            },
            batch_size=len(ids),
        )
        return DataProto(batch=batch)
