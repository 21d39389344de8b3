from verl.utils.dataset.rl_dataset import RLHFDataset


class Filtered(RLHFDataset):
    def maybe_filter_out_long_prompts(self, dataframe=None):
        kept = super().maybe_filter_out_long_prompts(dataframe)
        return kept.select(range(0, len(kept), 2))
