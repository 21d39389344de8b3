from verl import DataProto
from verl.experimental.dataset.sampler import AbstractCurriculumSampler


class EasyFirst(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.data_source = data_source
        self.scores = {}

    def __iter__(self):
        yield from sorted(range(len(self.data_source)), key=lambda place: -self.scores.get(place, 0.0))

    def __len__(self):
        return len(self.data_source)

    def update(self, batch: DataProto) -> None:
        totals = batch.batch["token_level_scores"].sum(-1).tolist()
        for info, score in zip(batch.non_tensor_batch["extra_info"], totals):
            self.scores[info["index"]] = score
