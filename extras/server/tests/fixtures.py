"""Servers of tiny models: ours in a thread of this process, and vLLM's own in a process. conftest.py loads this file
for all tests, so what needs fastapi and uvicorn is imported by who uses it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from socket import socket
from threading import Thread
from time import sleep
from typing import Any
from urllib.request import urlopen

import pytest

from configs.loader import Arguments, load_config, yaml_folder
from extras.server.settings import ServerConfig
from tests.forked import Run
from tests.servers import KEY


def compose(model: Path, *overrides: str) -> ServerConfig:
    settings = [f"model.path={model}", "server.port=0", "server.served_model_name=tiny", *overrides]
    lengths = ["data.max_prompt_length=40", "data.max_response_length=24"]
    arguments = Arguments("server", yaml_folder(ServerConfig), settings + lengths, print_config=False)
    return load_config(arguments, ServerConfig)


@contextmanager
def serving(served: Any, config: ServerConfig) -> Iterator[str]:
    """A server in a thread of this process; its address."""
    from extras.server.__main__ import bind_socket
    from extras.server.app import http_server

    listener = bind_socket(config.server)
    server = http_server(served, log_level="error", timeout_graceful_shutdown=1)
    thread = Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def vllm_server(model: Path, prompt: int, response: int, *more: str) -> Iterator[str]:
    """The address of vLLM's own server, which takes weights, for prompts and responses of so many tokens. About 30
    seconds to start."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = [f"model.path={model}", "rollout.name=vllm", "server.takes_weights=true", f"server.port={port}", *more]
    settings += [f"data.max_prompt_length={prompt}", f"data.max_response_length={response}", "rollout.max_num_seqs=64"]
    server, url = Run("-m", "extras.server.__main__", *settings), f"http://127.0.0.1:{port}"
    try:
        while not answers(f"{url}/health"):
            if server.is_over():
                raise RuntimeError(f"vLLM's server ended: {server.said()[1][-3000:]}")
            sleep(0.2)
        yield f"{url}/v1"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)  # its engine is another process
        server.wait()


def answers(url: str) -> bool:
    try:
        with urlopen(url):
            return True
    except OSError:
        return False


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Any:
    """The tiny model behind a server's engine, which asks for a key."""
    return pytest.importorskip("extras.server.__main__").load_served(compose(tiny_model, f"server.api_key={KEY}"))


@pytest.fixture(scope="module")
def address(served: Any, tiny_model: Path) -> Iterator[str]:
    """The address of a server of the tiny model, which asks for a key."""
    with serving(served, compose(tiny_model)) as url:
        yield url


@pytest.fixture(scope="session")
def vllm_address(wide_headed_model: Path) -> Iterator[str]:
    """vLLM's own server of `wide_headed_model`, as our command starts it. It asks for a key, takes weights by shared
    memory or by the stand-in for NCCL, and has those that it was sent last."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    settings = [f"server.api_key={KEY}", "server.served_model_name=tiny"]
    stand_in = "extras.openai.tests.store_transfer.WorkerExtension"
    settings += [f"+rollout.engine_kwargs.vllm.worker_extension_cls={stand_in}"]
    with vllm_server(wide_headed_model, 40, 24, *settings) as url:
        yield url
