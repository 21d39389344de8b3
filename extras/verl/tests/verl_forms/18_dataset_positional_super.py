from verl.utils.dataset.rl_dataset import RLHFDataset


class Positional(RLHFDataset):
    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        super().__init__(data_files, tokenizer, config, processor)
        assert self.processor is None and self.max_prompt_length == config.max_prompt_length
