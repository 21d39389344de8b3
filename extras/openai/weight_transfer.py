"""Weights that go from the trainer's process to vLLM's server: through files in shared memory, or by NCCL.

Both ways take the routes that vLLM's server has with VLLM_SERVER_DEV_MODE=1: an update is started, the server is told
what comes, and the update is finished. `nccl` is vLLM's own trainer engine over them, for a server on other GPUs. On a
CPU all of it is tried but NCCL itself (extras/openai/tests/store_transfer.py); on GPUs it has not been run.
"""

import asyncio
import fcntl
import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.errors import ConfigError
from data.seqlen_balancing import fill_groups
from extras.http.http import Json, RequestRefused, ServerError, api_root, ask_once
from extras.openai.settings import KEY, OpenAISettings
from workers.agents.user_code import in_thread
from workers.vllm_setup import vllm_process

BACKEND = "shared_memory_or_nccl"  # what vLLM's weight_transfer_config calls the server's way to take weights
BUCKET_BYTES = 512 << 20  # of weights that are handed over together
LOOK_SECONDS = 10  # between two health checks of a server that does not answer
HOW_TO_START = (
    "`python -m extras.server model.path=… rollout.name=vllm server.takes_weights=true` starts one that takes them"
)


def weight_transfer(settings: OpenAISettings) -> "WeightTransfer":
    """Returns the weight transfer of these settings; nothing is connected before the first weights are sent."""
    return {"shared_memory": SharedMemory, "nccl": NCCL}[settings.weight_transfer](settings)


def check_weight_transfer(settings: OpenAISettings, gpus: int) -> None:
    """Raises ConfigError if weights are to go by NCCL and there is no GPU, or no vLLM; `gpus`: those of a worker."""
    if settings.weight_transfer != "nccl":
        return
    missing = [] if gpus else ["a GPU for each worker, and this run has none (trainer.n_gpus_per_node)"]
    if find_spec("vllm") is None:
        missing.append("vLLM, which is not installed here (make setup-vllm)")
    if missing:
        raise ConfigError(f"{KEY}.weight_transfer=nccl needs {'; and '.join(missing)}. Set it to shared_memory.")


def buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups neighbouring weights by buckets."""
    detached = ((name, tensor.detach()) for name, tensor in weights)
    return fill_groups(detached, lambda item: item[1].nbytes, BUCKET_BYTES)


class WeightTransfer(ABC):
    """A way to hand weights over to a server, which belongs to one trainer at a time."""

    def __init__(self, settings: OpenAISettings) -> None:
        self.settings = settings

    def ask(self, method: str, path: str, body: Json | None = None) -> Json:
        """Returns the server's answer, in any thread. A failure is not tried again: an update would begin twice.

        vLLM's server stops answering once its engine has died in an update, and the wait would last weights_timeout:
        so its health is checked meanwhile.
        """
        root, options = api_root(self.settings.base_url), {"api_key": self.settings.api_key, "retries": 0}

        async def answer() -> Json:
            request = asyncio.ensure_future(
                ask_once(method, root + path, body, timeout=self.settings.weights_timeout, **options)
            )
            try:
                while not (await asyncio.wait([request], timeout=LOOK_SECONDS))[0]:
                    with suppress(RequestRefused):  # not every server has it
                        await ask_once("GET", root + "/health", None, timeout=LOOK_SECONDS, **options)
                return request.result()
            finally:
                request.cancel()

        with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
            return runner.run(answer())

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Makes the server sample from `weights`, (name, tensor) as in a checkpoint, from now on; drops its caches.

        Raises, with the server's message, ValueError if it refuses them, ServerError (which may pass) if they do not
        arrive in time.
        """
        try:
            self.hand_over(weights, version)
        except (RequestRefused, ServerError) as error:
            kind = ServerError if isinstance(error, ServerError) else ValueError
            raise kind(
                f"{self.settings.base_url} does not take the actor's weights of version {version} by {KEY}."
                f"weight_transfer={self.settings.weight_transfer}: {error} {HOW_TO_START}."
            ) from error

    def held_weights(self) -> tuple[torch.dtype, dict[str, int]] | None:
        """Returns the checksums of the server's weights; None if it is not a server of ours, which has none."""
        try:
            workers = self.ask("POST", "/collective_rpc", {"method": "held_checksums"})["results"]
        except (RequestRefused, ServerError):
            return None
        if None in workers:
            return None
        sums = {f"{index}.{name}": total for index, part in enumerate(workers) for name, total in part["sums"].items()}
        return getattr(torch, workers[0]["dtype"]), sums

    @abstractmethod
    def hand_over(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Sends at least one weight, within `update`."""

    @contextmanager
    def update(self, version: int) -> Iterator[None]:
        """Lets the server take weights within the block; afterwards it samples by them, without old caches."""
        self.ask("POST", "/start_weight_update")
        yield
        self.ask("POST", "/finish_weight_update", {"weight_version": str(version)})
        if not self.ask("POST", "/reset_prefix_cache?reset_running_requests=true")["success"]:
            raise ServerError("its cache of the old ones is still in use.")

    def close(self) -> None:  # noqa: B027  (files leave nothing open)
        """Closes connections that `send` has left open."""


class SharedMemory(WeightTransfer):
    """Files in memory that the trainer's and the server's processes share: one node."""

    def hand_over(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Writes all weights to shared memory until the server has them; this process holds one at a time."""
        shared = self.settings.weights_folder
        try:
            with passing_folder(shared, "nano_verl_weights_") as folder:
                write_weights(weights, folder)
                with self.update(version):
                    self.ask("POST", "/update_weights", {"update_info": {"folder": str(folder)}})
        except ServerError:  # an OSError too
            raise
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"the weights of version {version} cannot be written to {shared} ({error}): make room for all of them "
                f"(docker run --shm-size), or set {KEY}.weights_folder."
            ) from error


class NCCL(WeightTransfer):
    """vLLM's own trainer engine: broadcasts from this process's GPU to those of all the server's workers.

    The engine and its group of GPUs are made when the first weights are sent, a bucket at a time. A transfer that has
    not ended after weights_timeout is given up: a collective whose peer is gone waits forever, and so does the server's
    worker, which must then be restarted.
    """

    def __init__(self, settings: OpenAISettings) -> None:
        super().__init__(settings)
        self.bucket, self.client = Bucket(), Client(self.ask)
        self.engine: Any = None  # vLLM's TrainerWeightTransferEngine

    def hand_over(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        engine, self.engine = self.engine or self.connect(), None  # useless if the transfer fails
        with self.update(version):
            for bucket in buckets(weights):
                self.bucket[:] = bucket
                self.in_time(engine.send_weights, f"{bucket[0][0]} … {bucket[-1][0]} were sent")
        self.bucket.clear()
        self.engine = engine

    def connect(self) -> Any:
        """Returns the trainer engine, its group of GPUs joined by all of the server's workers."""
        workers = self.ask("GET", "/get_world_size")["world_size"]
        with vllm_process("cuda"):
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            join = partial(WeightTransferTrainerFactory.trainer_init, client=self.client, source=self.bucket)
            host = self.settings.weights_address or own_address(self.settings.base_url)
            with socket.socket() as free:
                free.bind((host, 0))
                port = free.getsockname()[1]
            info = NCCLTrainerInitInfo(host, port, 1 + workers, rank=0)
            return self.in_time(partial(join, info), f"{workers} workers of the server were to join at {host}:{port}")

    def in_time(self, work: Callable[[], Any], meanwhile: str) -> Any:
        """Returns the result of `work`, in a thread that is abandoned if it is late or the server refuses.

        Raises RequestRefused or ServerError as the server refuses, and ServerError if `work` is late or fails.
        """
        device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

        def on_this_device() -> Any:  # a thread begins on the first one
            with torch.accelerator.device_index(device):
                torch.accelerator.synchronize()  # vLLM sends on streams of its own, and weights may be on their way
                return work()

        try:
            return asyncio.run(self.unless_refused(on_this_device))
        except (RuntimeError, OSError) as error:
            raise ServerError(f"while {meanwhile}: {type(error).__name__}: {error}.") from error

    async def unless_refused(self, work: Callable[[], Any]) -> Any:
        self.client.refusal = Future()
        refusal = asyncio.wrap_future(self.client.refusal)
        done = asyncio.ensure_future(in_thread(work, deadline=self.settings.weights_timeout))
        await asyncio.wait([done, refusal], return_when=asyncio.FIRST_COMPLETED)
        if refusal.done():
            done.cancel()
            return refusal.result()
        return done.result()

    def close(self) -> None:
        """Leaves the group of GPUs, so that the next trainer can form one with this server."""
        if self.engine is not None:
            with suppress(RequestRefused, ServerError):  # it may be gone
                self.ask("POST", "/shutdown_weight_transfer_engine")
            self.engine.shutdown()


class Client:
    """Asks the server for vLLM's trainer engine; `refusal` fails where the server refuses what is being sent."""

    def __init__(self, ask: Callable[[str, str, Json], Json]) -> None:
        self.ask = ask
        self.refusal: Future[None] = Future()

    def init_weight_transfer_engine(self, init_info: Json) -> None:
        self.ask("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def update_weights(self, update_info: Json) -> None:
        try:
            self.ask("POST", "/update_weights", {"update_info": update_info})
        except (RequestRefused, ServerError) as error:
            self.refusal.set_exception(error)
            raise

    def start_weight_update(self) -> None:
        """Does nothing: the engine would start an update for each bucket (WeightTransfer.update)."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Does nothing, as `start_weight_update`."""


class Meta(NamedTuple):
    """Name, type and shape of a weight, sent before it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Metas(list[Meta]):
    """Lists what a bucket holds; vLLM 0.32 calls it, and 0.33 reads it."""

    def __call__(self) -> "Metas":
        return self


class Bucket(list[tuple[str, Tensor]]):
    """Weights that are sent together, as vLLM's trainer engine reads a source of them."""

    @property
    def metadata(self) -> Metas:
        return Metas(Meta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self)

    def implements_iter_full(self) -> bool:
        return True

    iter_full = list.__iter__  # 0.33's word for it


def own_address(url: str) -> str:
    """Returns this node's address on the way to `url`; nothing is sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return probe.getsockname()[0]


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Writes (name, tensor) pairs into `folder`, a file each: tied weights too, and one at a time is in memory."""
    for number, (name, tensor) in enumerate(weights):
        save_file({name: tensor.detach().cpu().contiguous()}, folder / f"{number:08}.safetensors")


def read_weights(folder: str) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) as they were written, without a copy. Raises FileNotFoundError if there are none."""
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"there are no weights in {folder}, as this process sees it")
    for file in files:
        yield from load_file(file).items()


@contextmanager
def passing_folder(place: str | PathLike, prefix: str) -> Iterator[Path]:
    """Makes a folder in `place` for the time of the block, and removes those that killed processes have left."""
    alone = fcntl.LOCK_EX | fcntl.LOCK_NB
    for left in Path(place).glob(f"{prefix}*"):
        with suppress(OSError), open_folder(left) as descriptor:
            if any(left.iterdir()):  # else it may be another process's, which has not locked it yet
                fcntl.flock(descriptor, alone)  # raises where a process has it
                shutil.rmtree(left)
    with TemporaryDirectory(prefix=prefix, dir=place) as folder, open_folder(folder) as descriptor:
        with suppress(OSError):  # a file system without locks: nothing is removed there either
            fcntl.flock(descriptor, alone)
        yield Path(folder)


@contextmanager
def open_folder(path: str | PathLike) -> Iterator[int]:
    """Opens a folder, which can then be locked."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
