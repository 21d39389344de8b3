"""Rows with images in verl's form are read, and what is wrong with one is said with its file and row."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch

from configs.errors import ConfigError
from configs.extras import FOLDER
from configs.schema import DataConfig, ModelConfig, RolloutConfig
from data.padding import collate, repeats_prompt
from data.pretrained import load_model_config, load_tokenizer
from data.rl_dataset import OverlongPrompt, RLHFDataset
from data.types import Request, Sample, SamplingParams
from extras.images.media import read_image
from extras.images.tests.conftest import ROWS, picture, row
from extras.images.tests.test_scores import prompts_of
from workers.models import load_causal_lm
from workers.rollout import Rollout

SEEN = "<image>how many?"


def png(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def written(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return file


def read(folder: Path, file: Path, **settings: Any) -> RLHFDataset:
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    return RLHFDataset(str(file), tokenizer, DataConfig(max_prompt_length=64, **settings))


def test_every_form_of_an_image_is_the_same_image(tmp_path: Path):
    image, file = picture(0), f"{tmp_path}/one.png"
    Path(file).write_bytes(png(image))
    coded = base64.b64encode(png(image)).decode()
    forms = [image, np.asarray(image), png(image), {"bytes": png(image)}, {"bytes": coded}, {"image": image}]
    forms += [file, f"file://{file}", {"image": file}, {"bytes": None, "path": file}]
    forms += [{"url": f"data:image/png;base64,{coded}"}]
    assert all(read_image(form).tobytes() == image.tobytes() for form in forms)


def test_rows_of_a_parquet_file_of_datasets_are_read(folders, tmp_path: Path):
    """Rows in the form of geo3k are read: a list of images, which `datasets` writes as bytes."""
    rows = [row(SEEN) | {"images": [{"bytes": png(picture(seed)), "path": None}]} for seed in (0, 1)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    dataset = read(folders["qwen2_vl"], tmp_path / "rows.parquet")
    first, second = dataset[0]["raw_prompt_ids"], dataset[1]["raw_prompt_ids"]
    assert list(first) == list(second) and first != second and len(first.media.images) == 1
    assert dataset[0]["raw_prompt_ids"] == first and hash(dataset[0]["raw_prompt_ids"]) == hash(first)
    assert dataset[0]["raw_prompt"][0]["content"] == SEEN, "what the user wrote stays"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"images": []}, r"1 <image> in chat messages, and images has 0"),
        ({"images": [{"path": "a.png"}, {"path": "b.png"}]}, r"images\[0\] cannot be read \(FileNotFoundError"),
        ({"images": [{"bytes": base64.b64encode(b"no image").decode()}]}, r"images\[0\] cannot be read \(Unidentified"),
        ({"images": [7]}, r"images\[0\] is 7: give bytes"),
        ({"prompt": "<image>?", "images": []}, None),
        ({"images": [], "videos": ["a.mp4"]}, "'videos' is filled, and the model reads text, and images of"),
    ],
)
def test_a_bad_row_is_named(folders, tmp_path: Path, bad: dict[str, Any], words: str | None):
    file = written(tmp_path, {"prompt": "1", "images": None}, row(SEEN) | bad)
    if words is None:  # a text is a text
        assert len(read(folders["qwen2_vl"], file)) == 2
        return
    with pytest.raises(ValueError, match=f"rows.jsonl, row 1: .*{words}"):
        read(folders["qwen2_vl"], file)
    assert len(read(folders["qwen2_vl"], file, max_bad_fraction=0.5)) == 1


def test_a_prompt_is_measured_with_its_images_and_never_cut(folders, tmp_path: Path):
    coded = {"bytes": base64.b64encode(png(picture(0, 32, 32))).decode()}  # 64 tokens
    file = written(tmp_path, {"prompt": "1", "images": None}, row(SEEN) | {"images": [coded]})
    dataset = read(folders["qwen2_vl"], file)
    assert len(dataset) == 1 and dataset.num_filtered == 1
    with pytest.raises(OverlongPrompt, match=r"rows.jsonl, row 1: the prompt has 78 tokens.*without images"):
        read(folders["qwen2_vl"], file, filter_overlong_prompts=False, truncation="left")


def test_a_text_model_refuses_images(tiny_model: Path, tmp_path: Path):
    file = written(tmp_path, row(SEEN) | {"images": [{"path": "a.png"}]})
    with pytest.raises(ValueError, match=r"row 0: the column 'images' is filled, and the model reads text alone"):
        read(tiny_model, file)


def test_without_the_extra_such_a_model_is_refused_by_name(folders, monkeypatch, tmp_path: Path):
    monkeypatch.setattr("configs.extras.FOLDER", tmp_path)
    with pytest.raises(ConfigError, match=r"model.path=qwen2_vl: images is not in this copy; extras/images was"):
        load_model_config(ModelConfig(), str(folders["qwen2_vl"]), "model.path")
    assert FOLDER.name == "extras"


def test_an_engine_that_reads_text_alone_refuses_images(folders):
    class Blind(Rollout):
        def generate(self, requests):
            return []

    tokenizer = load_tokenizer(ModelConfig(path=str(folders["qwen2_vl"])))
    engine = Blind(RolloutConfig(name="blind.py"), tokenizer, None)
    request = Request(0, prompts_of(folders["qwen2_vl"])[0], SamplingParams(True, 1.0, -1, 1.0, 3), 0)
    with pytest.raises(ValueError, match=r"rollout.name=blind.py reads no images"):
        engine.add(request)


def test_equal_texts_with_other_images_are_other_prompts(folders):
    prompts = prompts_of(folders["qwen2_vl"])
    batch = collate([Sample(prompts[index]) for index in (0, 0, 1, 1, 3)], 64, 1, 0)
    assert repeats_prompt(batch).tolist() == [False, True, False, True, False]
    assert "media" not in collate([Sample([1, 2])], 4, 1, 0)


def test_ids_collapse_to_what_they_were_expanded_from(folders):
    for family in folders:
        for ids in prompts_of(folders[family], ROWS):
            assert ids.media.expand(ids.media.collapse(ids)) == list(ids)


def test_a_frozen_tower_is_not_trained(folders):
    for family in folders:
        model = load_causal_lm(ModelConfig(path=str(folders[family])), longest=80)
        model.vision.freeze()
        frozen = {name.split(".")[1] for name, weight in model.named_parameters() if not weight.requires_grad}
        assert frozen == ({"visual"} if "idefics" not in family else {"vision_model", "connector"})
    assert torch.is_tensor(model.lm_head.bias)
