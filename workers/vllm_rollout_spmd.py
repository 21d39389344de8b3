"""Generates by vLLM, in the worker's own process: requests join at any step, and equal prompts share their cache.

Its weights are a copy, in vLLM's layout: the engine starts from the model's config alone, and samples from what
`load_weights` brought last. Every worker has an engine of its own, or, with tensor_model_parallel_size, a part of one:
then all parts must do the same things in the same order, so the first of them, which alone has rows to answer,
announces each thing to the others (`Lockstep`). vLLM is imported lazily: this module loads where it is not installed.
What vLLM changes in the process when it starts or ends is put back (workers/vllm_setup.py).
"""

import copy
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from configs.errors import ConfigError
from configs.schema import RolloutConfig
from data.padding import media_of
from data.types import Completion, Request
from workers.collectives import gather, group_size, new_group, rank
from workers.rollout import KEY, Rollout, check_request, check_temperature
from workers.upstream import memory_of_vllm
from workers.vllm_setup import engine_settings, process_as_it_is, vllm_process
from workers.weight_sync import sync_class

logger = logging.getLogger(__name__)


class vLLMRollout(Rollout):
    """Samples by vLLM, with the log-probs of the very distribution that is drawn from.

    Raises:
        ValueError: vLLM cannot run such a model here, or an entry of engine_kwargs.vllm is unknown to it.
    """

    own_weights = takes_media = True

    @classmethod
    def check(cls, config: RolloutConfig, workers: int, gpus: int) -> None:
        if find_spec("vllm") is None:
            raise ConfigError(
                f"{KEY}.name={config.name}: vLLM is not installed here. `make setup-vllm`, or set {KEY}.name=hf."
            )
        if workers % (parts := config.tensor_model_parallel_size):
            raise ConfigError(
                f"{KEY}.tensor_model_parallel_size={parts} does not divide the {workers} workers of a machine: take 1."
            )
        super().check(config, workers, gpus)

    @classmethod
    def workers_per_engine(cls, config: RolloutConfig) -> int:
        return config.tensor_model_parallel_size

    def __init__(self, config: RolloutConfig, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
        super().__init__(config, tokenizer, model)
        self.device = model.device
        self.vision = vars(model).get("vision")  # of a model that reads images
        self.so_far: dict[int, Any] = {}  # by request that is asked for piecewise, what is drawn
        self.asleep: set[str] = set()  # of "weights" and "kv_cache"
        self.lockstep = Lockstep(config.tensor_model_parallel_size)
        self.engine = start_engine(config, model, self.lockstep.index)
        self.takes_adapter = self.lost_weights = model.adapter.is_sent_alone(config)
        self.adapter: Any = None  # vLLM's LoRARequest, where it takes one

    def add(self, request: Request) -> None:
        check_request(request, self.vocab_size, self.longest, "the engine's max_model_len")
        check_temperature(request)
        super().add(request)

    def step(self) -> list[Completion]:
        """Hands waiting requests over and has vLLM draw a token of every row that has its place."""
        if not self.has_unfinished_requests():
            return []
        joining = [*self.waiting.values()]
        self.waiting.clear()
        self.lockstep.broadcast(("step", joining))
        return self._step(joining)

    def _step(self, joining: Iterable[Request]) -> list[Completion]:
        self.wake_up()
        with self._alone():
            for request in joining:
                media, prompt = media_of(request.prompt_ids), {"prompt_token_ids": request.prompt_ids}
                prompt |= media.for_engine(request.prompt_ids) if media else {}
                self.engine.add_request(
                    str(request.id), prompt, self._sampling_params(request), lora_request=self.adapter
                )
                self.running[request.id] = request
            outputs = self.engine.step()
        self.so_far |= {int(output.request_id): output.outputs[0] for output in outputs if not output.finished}
        return [self._pop_completion(output) for output in outputs if output.finished]

    def tokens_so_far(self, seen: Mapping[int, int]) -> dict[int, tuple[list[int], list[float]]]:
        running = {number: self.so_far[number] for number in seen if number in self.so_far}
        return {
            number: ([*answer.token_ids][seen[number] :], log_probs_of(answer)[seen[number] :])
            for number, answer in running.items()
        }

    def _abort_running(self, ids: Sequence[int]) -> None:
        self.lockstep.broadcast(("abort", ids))
        self._abort(ids)

    def _abort(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            del self.running[request_id]
            self.so_far.pop(request_id, None)
        self.engine.abort_request([*map(str, ids)])

    @contextmanager
    def together(self) -> Iterator[bool]:
        """Has the leader ask within the block, where a model is split; the others do the same before it."""
        leads = self.lockstep.index == 0
        if not leads:
            verbs = {"step": self._step, "abort": self._abort}
            for verb, argument in self.lockstep.receive():
                verbs[verb](argument)
        try:
            yield leads
        finally:
            if leads:
                self.lockstep.broadcast(None)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies `weights`, named as in a checkpoint, tied ones under each of their names, and drops the caches.

        Raises:
            ValueError: there are none, or vLLM's model has no place for one.
        """
        super().load_weights(weights, version)
        self._wake("weights")
        arguments = {"weights_iterator": self._at_least_one(weights), "is_checkpoint_format": True}
        with self._alone():
            self.engine.collective_rpc("reload_weights", kwargs=arguments)
        self._drop_caches()
        self.lost_weights = False

    def load_adapter(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Adds LoRA's matrices to the weights that are there from now on, instead of those before, through a folder;
        raises ValueError if there are none."""
        super().load_weights(weights, version)
        self._wake("weights")
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory() as folder, self._alone():
            self.module.adapter.save_alone(self.module, dict(self._at_least_one(weights)), Path(folder))
            self.adapter = LoRARequest("adapter", 1, folder)
            # It replaces the one before under the same id, by load_inplace.
            assert self.engine.add_lora(LoRARequest("adapter", 1, folder, load_inplace=True)), "vLLM refuses an adapter"
        self._drop_caches()

    def _drop_caches(self) -> None:
        assert self.engine.reset_prefix_cache(), "vLLM keeps a cache of the old weights: some row still uses it"
        self.engine.reset_encoder_cache()  # of images

    def held_weights(self) -> tuple[torch.dtype, dict[str, int]] | None:
        [weights] = self.engine.collective_rpc(sync_class().held_by_vllm)
        return weights

    def sleep(self) -> None:
        """Drops weights and cache: the trainer has the weights. On a CPU nothing is to be gained."""
        if self.device.type == "cuda" and self.config.free_cache_engine and not self.asleep:
            assert not self.has_unfinished_requests(), "requests are in flight, whose cache would be lost"
            self.engine.reset_prefix_cache()
            self.engine.sleep(level=2)
            self.asleep, self.lost_weights = {"weights", "kv_cache"}, True
            logger.info("vllm sleeps: weights and kv_cache left the GPU")

    def wake_up(self) -> None:
        assert not self.lost_weights, "the weights were dropped: load_weights has to come first"
        self._wake("weights", "kv_cache")

    def _wake(self, *parts: str) -> None:
        for part in parts:
            if part in self.asleep:
                self.engine.wake_up(tags=[part])
                self.asleep.remove(part)
                logger.info("vllm wakes up: %s", part)

    def close(self) -> None:
        with process_as_it_is():
            self.engine.engine_core.shutdown()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keeps the trainer's autocast out of the block, and restores the global generators, from which vLLM draws for
        rows whose own generators then decide."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.autocast(self.device.type, enabled=False):
            yield

    def _sampling_params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.CUMULATIVE if request.piecewise else RequestOutputKind.FINAL_ONLY
        fields = self._sampling_fields(request) | {"output_kind": kind}
        fields |= self.vision.sampling() if self.vision else {}
        return SamplingParams(**fields, flat_logprobs=True, detokenize=False)

    def _pop_completion(self, output: Any) -> Completion:
        [answer] = output.outputs
        request = self.running.pop(int(output.request_id))
        self.so_far.pop(request.id, None)
        if media_of(request.prompt_ids):
            self.vision.check_read(request.prompt_ids, output.prompt_token_ids)
        return self._completion(request, [*answer.token_ids], log_probs_of(answer), answer.finish_reason)


VLLMRolloutSPMD = vLLMRollout


def log_probs_of(answer: Any) -> list[float]:
    """Lists the log-probs of the tokens that vLLM has drawn."""
    return [answer.logprobs.logprobs[index] for index in answer.logprobs.start_indices]


def start_engine(config: RolloutConfig, model: PreTrainedModel, index: int) -> Any:
    """Starts a vllm.LLMEngine with the architecture of `model`, without its weights; what it changes here is put back.

    `index`: which part of the model it has, where that is split over several workers.
    """
    with ExitStack() as contexts:
        contexts.enter_context(vllm_process(model.device.type))
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
        if config.tensor_model_parallel_size > 1:  # a worker sees no GPU but its own
            os.environ |= {"RANK": str(rank()), "LOCAL_RANK": "0" if model.device.type == "cuda" else str(index)}
        settings = engine_settings(config, model)
        if "vision" in vars(model):  # vLLM reads tokenizer and processor in the model's own folder
            settings = {"mm_processor_cache_gb": 0} | settings | {"skip_tokenizer_init": False}
        elif settings["load_format"] == "dummy":
            settings["model"] = str(config_folder(model))
        from vllm import EngineArgs, LLMEngine
        from vllm.model_executor.layers.linear import UnquantizedLinearMethod

        sync_class().prepare_vllm(UnquantizedLinearMethod)
        try:
            arguments = EngineArgs(**settings)
        except TypeError as error:
            value = config.engine_kwargs.get("vllm")
            raise ValueError(f"{KEY}.engine_kwargs.vllm={value}: {error}. The keys are vllm.EngineArgs'.") from error
        with torch.autocast(model.device.type, enabled=False):
            split_on_cpu = config.tensor_model_parallel_size > 1 and model.device.type == "cpu"
            with segments_of_this_run() if split_on_cpu else nullcontext():
                return LLMEngine.from_engine_args(arguments)


@contextmanager
def segments_of_this_run() -> Iterator[None]:
    """Names the memory that the parts of a split engine share on a CPU after this run alone, and removes the names when
    the block ends, as all parts have it by then; all ranks enter it together.

    By itself vLLM has the same names in every run, and one that is killed leaves them, so that no later run starts.
    """
    from vllm.distributed.parallel_state import get_tp_group

    memory = memory_of_vllm()
    run, group_name = gather(f"nano_verl_{uuid4().hex}")[0], memory.make_group_name

    def name_after_run(communicator: Any) -> str:
        os.environ["VLLM_DIST_IDENT"] = run  # vLLM's worker has set the name that all runs share
        return group_name(communicator)

    memory.make_group_name = staticmethod(name_after_run)
    try:
        yield
        messages = get_tp_group().mq_broadcaster.buffer
        if messages.is_creator:
            messages.shared_memory.unlink()
            messages.is_creator = False  # so that its end does not remove it again
    finally:
        memory.make_group_name = staticmethod(group_name)
        for segment in Path("/dev/shm").glob(f"{run}*"):
            segment.unlink(missing_ok=True)


def config_folder(model: PreTrainedModel) -> Path:
    """Writes the config that vLLM builds the model from into a folder beside vLLM's caches, named after its content: by
    that name vLLM looks up what it has compiled."""
    root = Path(os.environ.get("VLLM_CACHE_ROOT") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vllm")
    try:
        root.expanduser().mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix="nano_verl_new_", dir=root.expanduser()))
    except OSError as error:
        raise ValueError(f"vLLM's caches cannot be written ({error}): set VLLM_CACHE_ROOT to a folder.") from None
    save_config(model, str(new))
    content = b"".join(path.read_bytes() for path in sorted(new.rglob("*")) if path.is_file())
    final = new.with_name(f"nano_verl_{hashlib.sha256(content).hexdigest()[:16]}")
    try:
        new.rename(final)
    except OSError:  # an earlier run's, or another worker's
        shutil.rmtree(new)
    return final


def save_config(model: PreTrainedModel, folder: str) -> None:
    """Writes the config that vLLM builds the model from; the model's `save_pretrained` would write on rank 0 alone."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)


class Lockstep:
    """A part among `size` workers with neighbouring ranks; every worker of the run makes one at the same time.

    Orders go by gloo, which ends a wait for a leader that is gone; vLLM's queue in shared memory would wait for ever.

    Attributes:
        index: among them, from 0; the leader's is 0.
    """

    def __init__(self, size: int) -> None:
        assert group_size() % size == 0, f"{group_size()} workers cannot be dealt out to engines of {size}"
        self.size, self.index = size, rank() % size
        self.leader, self.group = rank() - self.index, None
        for first in range(0, group_size(), size) if size > 1 else ():
            group = new_group([*range(first, first + size)])
            if first == self.leader:
                self.group = group

    def broadcast(self, order: Any) -> None:
        """Sends what the leader is about to do to the others, who `receive` it, if there are any."""
        if self.size > 1:
            assert self.index == 0, "only the leader broadcasts"
            dist.broadcast_object_list([order], src=self.leader, group=self.group)

    def receive(self) -> Iterator[Any]:
        """Yields what the leader broadcasts, until that is None."""
        while True:
            order = [None]
            dist.broadcast_object_list(order, src=self.leader, group=self.group)
            if order[0] is None:
                return
            yield order[0]
