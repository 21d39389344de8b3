"""Families of models by the kernels: which are packed, and which share prompts."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer

from extras.kernels.generation import LaidOutRows, SharedPrompts
from tests.test_families import FAMILIES, OWN, SHARED, WHOLE, ways_of
from workers.hf_rollout import NoCacheBatch

GENERATION = {SharedPrompts: SHARED, LaidOutRows: OWN, NoCacheBatch: WHOLE}


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_are_those_of_eager_attention_row_by_row(name: str, tiny_model: Path):
    training, generation = ways_of(name, AutoTokenizer.from_pretrained(tiny_model), "auto")
    assert (training, GENERATION[generation]) == (FAMILIES[name].training, FAMILIES[name].generation)
