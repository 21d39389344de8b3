import argparse
import os

import datasets

from verl.utils.hdfs_io import copy, makedirs
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed


def make_row(row, index):
    return {
        "data_source": "lighteval/MATH",
        "prompt": [{"role": "user", "content": row["problem"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": remove_boxed(last_boxed_only_string(row["solution"]))},
        "extra_info": {"split": "train", "index": index},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_save_dir", default="~/data/sums")
    parser.add_argument("--hdfs_dir", default=None)
    args = parser.parse_args()
    rows = datasets.Dataset.from_list([{"problem": "2+2?", "solution": r"It is \boxed{4}."}]).map(make_row, with_indices=True)
    folder = os.path.expanduser(args.local_save_dir)
    os.makedirs(folder, exist_ok=True)
    rows.to_parquet(os.path.join(folder, "train.parquet"))
    if args.hdfs_dir is not None:
        makedirs(args.hdfs_dir)
        copy(src=folder, dst=args.hdfs_dir)
