"""A rollout engine with the model of a folder, in this process: for commands that generate and do not train."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedTokenizerBase

from configs.schema import ModelConfig, RolloutConfig
from configs.threads import worker_threads
from data.import_utils import load_modules
from data.pretrained import check_is_decoder, check_positions, load_model_config
from workers.batch_rollout import build_rollout, load_rollout_class
from workers.engine import compute_dtype
from workers.models import load_causal_lm, training_device


class StandaloneRollout:
    """The engine that `rollout.name` names, around the model at `model.path`, or, if it is a server, around the
    server's, which should be the same.

    Args:
        n_threads: CPU threads; None: OMP_NUM_THREADS, else the cores.

    Attributes:
        engine: the engine; call it within `precision`.
        vocab_size: token ids of the model are 0 to this number − 1.

    Raises:
        ValueError: no such model or engine, or lengths that the model was not made for.
    """

    def __init__(
        self, model: ModelConfig, rollout: RolloutConfig, tokenizer: PreTrainedTokenizerBase, n_threads: int | None
    ) -> None:
        torch.set_num_threads(worker_threads(n_threads).number)
        load_modules(model.external_lib)
        engine_class = load_rollout_class(rollout.name)
        longest = rollout.prompt_length + rollout.response_length
        model_config = load_model_config(model, model.path, "model.path")
        check_is_decoder(model_config, "model.path")
        check_positions(model_config, longest, "model.path", "data.max_prompt_length + max_response_length")
        self.vocab_size = model_config.get_text_config().vocab_size
        self.device = training_device(n_gpus=None)
        self.dtype = compute_dtype("auto", self.device)
        module = load_causal_lm(model, self.device, self.dtype, longest)
        with self.precision():  # an engine may try what it can do, in the precision that it will do it in
            self.engine = build_rollout(engine_class, rollout, tokenizer, module)
        if not engine_class.elsewhere:
            self.engine.load_weights(iter(module.state_dict().items()), version=0)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The compute precision of a run on this device, for the thread that enters it."""
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            yield
