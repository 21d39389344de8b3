from verl.utils.dataset.sft_dataset import SFTDataset


class Alpaca(SFTDataset):
    def __getitem__(self, item):
        row = super().__getitem__(item)
        assert set(row) == {"input_ids", "attention_mask", "position_ids", "loss_mask"}
        return row
