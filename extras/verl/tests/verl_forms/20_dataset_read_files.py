import datasets

from verl.utils.dataset import RLHFDataset


class Mapped(RLHFDataset):
    calls = 0

    def _read_files_and_tokenize(self):
        type(self).calls += 1
        parts = [datasets.load_dataset("json", data_files=file)["train"] for file in self.data_files]
        whole = datasets.concatenate_datasets(parts)
        self.dataframe = whole.map(
            lambda row: {
                "prompt": [{"role": "user", "content": row["question"]}],
                "reward_model": {"style": "rule", "ground_truth": row["truth"]},
                "data_source": "my/sums",
                "extra_info": {"index": 0},
            },
            remove_columns=whole.column_names,
        )
