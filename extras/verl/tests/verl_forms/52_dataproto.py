import numpy as np
import torch
from tensordict import TensorDict

from verl import DataProto
from verl.protocol import DataProtoItem, collate_fn, pad_dataproto_to_divisor, union_tensor_dict, unpad_dataproto

data = DataProto.from_dict(
    tensors={"obs": torch.arange(6).reshape(6, 1)}, non_tensors={"label": list("abcdef")}, meta_info={"name": "x"}
)
assert len(data) == 6 and isinstance(data[0], DataProtoItem) and data[0].non_tensor_batch["label"] == "a"
assert data[1:3].non_tensor_batch["label"].tolist() == ["b", "c"] and data[[0, 5]].batch["obs"].flatten().tolist() == [0, 5]
assert data.repeat(2, interleave=False).batch["obs"].flatten().tolist() == [*range(6)] * 2
assert data.sample_level_repeat([1, 0, 2, 0, 0, 1]).batch["obs"].flatten().tolist() == [0, 2, 2, 5]
assert [len(part) for part in data.chunk(3)] == [2, 2, 2] and len(DataProto.concat(data.chunk(2))) == 6
other = DataProto.from_single_dict({"act": torch.ones(6), "more": np.array(list("uvwxyz"), dtype=object)})
both = data.select(["obs"]).union(other)
assert set(both.batch.keys()) == {"obs", "act"} and both.pop(batch_keys=["act"]).batch["act"].sum() == 6
padded, size = pad_dataproto_to_divisor(data, 4)
assert len(padded) == 8 and size == 2 and len(unpad_dataproto(padded, size)) == 6
chunks = DataProto.from_dict({"a": torch.arange(8).reshape(2, 4)}).unfold_column_chunks(2, split_keys=["a"])
assert chunks.batch["a"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
as_td = data.to_tensordict()
assert isinstance(as_td, TensorDict) and DataProto.from_tensordict(as_td).meta_info["name"] == "x"
padded = DataProto.from_dict({"a": torch.zeros(2)}, auto_padding=True)
assert padded.is_padding_enabled() and [len(part) for part in DataProto.from_dict({"a": torch.zeros(4)}).split(3)] == [3, 1]
data.padding(2, "first")
assert len(data) == 8 and "batch" in data.get_data_info()
assert [len(part) for part in data.make_iterator(mini_batch_size=4, epochs=1, seed=1, dataloader_kwargs={"shuffle": True})] == [4, 4]
