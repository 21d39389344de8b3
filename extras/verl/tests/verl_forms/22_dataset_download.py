from verl.utils.dataset.rl_dataset import RLHFDataset


class Fetched(RLHFDataset):
    def _download(self, use_origin_parquet=False):
        files = self.original_data_files if use_origin_parquet else self.data_files
        for i, file in enumerate(files):
            self.data_files[i] = file.replace("store://", "")
