import datasets

from verl.experimental.dynamic_dataset.dynamicgen_dataset import AbstractDataGenerator


class Harder(AbstractDataGenerator):
    def __init__(self, config):
        super().__init__(config)
        self.step = config.get("step", 1)

    def generate(self, dataset):
        first = dataset.dataframe[0]
        first["extra_info"] = {"index": len(dataset.dataframe)}
        return datasets.Dataset.from_list([first] * self.step)
