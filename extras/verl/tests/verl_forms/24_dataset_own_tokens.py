import verl.utils.torch_functional as verl_F
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.model import compute_position_id_with_mask


class SelfTokenised(RLHFDataset):
    def __getitem__(self, item):
        row = dict(self.dataframe[item])
        messages = self._build_messages(row)
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        ids, mask = verl_F.postprocess_data(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_length=self.max_prompt_length,
            pad_token_id=self.tokenizer.pad_token_id, left_pad=True, truncation=self.truncation,
        )
        positions = compute_position_id_with_mask(mask)
        row |= {"input_ids": ids[0], "attention_mask": mask[0], "position_ids": positions[0]}
        row["raw_prompt_ids"] = self.tokenizer.encode(text, add_special_tokens=False)
        row["raw_prompt"] = messages
        row["index"] = (row.get("extra_info") or {}).get("index", 0)
        return row
