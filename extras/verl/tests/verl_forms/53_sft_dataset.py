from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset


class LastAnswer(MultiTurnSFTDataset):
    def __init__(self, parquet_files, tokenizer, config, processor=None, max_samples=-1):
        super().__init__(parquet_files, tokenizer, config, processor=None, max_samples=max_samples)

    def _read_files_and_process(self):
        super()._read_files_and_process()
        self.messages = [list(messages) for messages in self.messages]

    def _build_messages(self, example: dict):
        return [{"role": "system", "content": "Add."}, *super()._build_messages(example)]

    def __getitem__(self, item):
        row = super().__getitem__(item)
        learnt = row["loss_mask"].nonzero().flatten().tolist()
        gaps = [place for place, (a, b) in enumerate(zip(learnt, learnt[1:])) if b > a + 1]
        if gaps:
            row["loss_mask"][: learnt[gaps[-1]] + 1] = 0
        return row
