from verl.utils.dataset.rl_dataset import RLHFDataset


class Tagged(RLHFDataset):
    def __getitem__(self, item):
        row = super().__getitem__(item)
        row["agent_name"] = "single_turn_agent"
        row["tools_kwargs"] = {"lookup": {"create_kwargs": {"level": item % 3}}}
        row["level"] = item % 3
        return row
