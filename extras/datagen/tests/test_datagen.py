"""A dataset that grows while a run goes on."""

import pytest

from configs.schema import DataConfig
from data.rl_dataset import collate_fn, create_rl_dataset
from extras.datagen.settings import DatagenConfig
from tests.test_chat import tokenizer_with

GENERATOR = """
from extras.datagen.dataset import AbstractDataGenerator

class Counting(AbstractDataGenerator):
    def generate(self, dataset, batch=None):
        return [{"instruction": f"{batch} {len(dataset.rows)}", "level": 1}, {"prompt": "x" * 99}]

class Quiet(AbstractDataGenerator):
    def generate(self, dataset):
        return []

class Other:
    pass
"""


def test_a_generator_adds_rows_at_the_start_and_after_every_step_and_the_checkpoint_holds_them(tmp_path):
    (tmp_path / "generator.py").write_text(GENERATOR)
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "file", "reward_model": {"ground_truth": "4"}}')

    tokenizer = tokenizer_with("{{ messages }}", "</s>")

    def fresh(name="Counting"):
        chosen = DatagenConfig(str(tmp_path / "generator.py"), name)
        return create_rl_dataset(path, DataConfig(datagen=chosen, max_prompt_length=20), tokenizer)

    rows = fresh()
    rows.on_batch_end("step")
    assert [row["prompt"] for row in rows] == ["file", "None 1", "step 2"]
    assert rows.num_filtered == 2, "too long prompts are left out"
    batch = collate_fn(list(rows))
    assert batch["level"].tolist() == [None, 1, 1]
    assert [label["ground_truth"] for label in batch["reward_model"]] == ["4", None, None]
    resumed = fresh()
    resumed.load_state_dict(rows.state_dict())
    assert list(resumed) == list(rows)
    quiet = fresh("Quiet")
    quiet.on_batch_end("step")
    assert len(quiet) == 1
    with pytest.raises(TypeError, match=r"data.datagen.name=Other.* must be a subclass of"):
        fresh("Other")
