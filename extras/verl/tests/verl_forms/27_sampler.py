from collections.abc import Sized

from omegaconf import DictConfig

from verl.experimental.dataset.sampler import AbstractSampler


class Backwards(AbstractSampler):
    def __init__(self, data_source: Sized, data_config: DictConfig):
        self.data_source = data_source
        self.keep = data_config.get("sampler", {}).get("keep", len(data_source))

    def __iter__(self):
        return iter(range(len(self.data_source) - 1, -1, -1)[: self.keep])

    def __len__(self):
        return self.keep
