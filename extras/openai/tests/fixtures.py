"""An engine that asks a server, for tests."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from configs.schema import ModelConfig, RolloutConfig
from extras.openai.rollout import OpenAIRollout
from tests.servers import KEY
from workers.models import load_causal_lm
from workers.rollout import build_rollout


@pytest.fixture(scope="session")
def openai_kwargs(vllm_address: str) -> dict[str, Any]:
    """The engine's settings in tests/test_engine_contract.py."""
    return {"base_url": vllm_address, "api_key": KEY}


def engine_for(url: str, folder: Path, max_num_seqs: int = 8, **settings: Any) -> OpenAIRollout:
    """The engine of the server at `url`, with the model in `folder`; `settings` are of engine_kwargs.openai."""
    own = {"openai": {"base_url": f"{url.removesuffix('/v1')}/v1", "timeout": 60.0, **settings}}
    lengths = {"prompt_length": 40, "response_length": 24}
    config = RolloutConfig(name="openai", max_num_seqs=max_num_seqs, engine_kwargs=own, **lengths)
    module = load_causal_lm(ModelConfig(path=str(folder)))
    return build_rollout(OpenAIRollout, config, AutoTokenizer.from_pretrained(folder), module)
