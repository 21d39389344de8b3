"""An engine with the model of a folder, for commands that generate and do not train."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedTokenizerBase

from configs.import_utils import find, load_modules
from configs.process import worker_threads
from configs.schema import ModelConfig, RolloutConfig
from data.pretrained import check_model
from workers.engine import compute_dtype
from workers.models import load_causal_lm, training_device
from workers.rollout import build_rollout, load_rollout_class


class StandaloneRollout:
    """The engine that `rollout.name` names, around the model at `model.path`, or, if it is a server, around the
    server's; raises ValueError for no such model or engine, or lengths that the model was not made for.

    Attributes:
        engine: the engine; call it within `precision`.
        vocab_size: token ids of the model are 0 to this number − 1.
    """

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, n_threads: int | None
    ) -> None:
        torch.set_num_threads(worker_threads(n_threads).number)
        load_modules(model.external_lib)
        self.device = training_device(n_gpus=None)
        engine_class = load_rollout_class(rollout.name)
        engine_class.check(rollout, workers=1, gpus=int(self.device.type == "cuda"))
        longest = rollout.prompt_length + rollout.response_length
        model_config = check_model(model, "model.path", longest)
        find("adapter", model.adapter).check_settings(model, "model")
        self.vocab_size = model_config.get_text_config().vocab_size
        self.dtype = compute_dtype("auto", self.device)
        module = load_causal_lm(model, self.device, self.dtype, longest)
        with self.precision():  # an engine may try itself out in the precision of the run
            self.engine = build_rollout(engine_class, rollout, tokenizer, module)
        if not engine_class.elsewhere:
            self.engine.load_weights(module.adapter.weights(module), version=0)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Computes the block in the precision of a run on this device, in the thread that enters it."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            yield
