from verl.utils.dataset.rl_dataset import RLHFDataset


class WithSystem(RLHFDataset):
    calls = 0

    def _build_messages(self, example: dict, key=None):
        type(self).calls += 1
        messages = example[key or self.prompt_key]
        return [{"role": "system", "content": "Add."}, *messages]
