import json

from torch.utils.data import Dataset


class ListedPrompts(Dataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        files = [data_files] if isinstance(data_files, str) else list(data_files)
        self.rows = [json.loads(line) for file in files for line in open(file)][: max_samples if max_samples > 0 else None]
        self.before = config.custom_cls.get("before", "")
        self.key = config.get("prompt_key", "prompt")

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, item):
        row = dict(self.rows[item])
        messages = row.pop(self.key)
        return {
            **row,
            "raw_prompt": [{**messages[0], "content": self.before + messages[0]["content"]}, *messages[1:]],
            "index": item, "tools_kwargs": {}, "interaction_kwargs": {},
        }
