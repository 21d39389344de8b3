"""Serves a model behind an OpenAI-compatible API: python -m extras.server model.path=…

Any client of that API works with base_url=http://127.0.0.1:8000/v1. rollout.name=vllm starts vLLM's own server.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # as a file it runs like as a module

from configs.checks import check_model_early
from configs.loader import command
from extras.server.settings import ServerConfig, ServerSettings, check_server

main = command("server", ServerConfig, check_server, __doc__, "extras.server.__main__.serve", check_model_early)
if __name__ == "__main__":
    raise SystemExit(main())  # before the imports below, which take seconds

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NoReturn

from configs.errors import ConfigError, refusals
from configs.paths import ROOT, check_model_path
from configs.process import read_key, worker_threads
from data.pretrained import load_model_config, load_tokenizer
from extras.server.app import Served, http_server
from extras.server.streaming import StreamingEngine
from extras.standalone.rollout import StandaloneRollout
from extras.tools.parsers import ToolParser
from workers.engine import compute_dtype
from workers.models import training_device
from workers.vllm_setup import shared_settings, vllm_environment

TAKES_WEIGHTS = {
    "worker_extension_cls": "extras.openai.vllm_weights.WorkerExtension",
    "weight_transfer_config": {"backend": "shared_memory_or_nccl"},
}
GRACE_SECONDS = 5  # for open requests when the server is stopped


def serve(config: ServerConfig) -> None:
    """Serves the model until the process is stopped."""
    with refusals():
        listener = bind_socket(config.server)
        if config.rollout.name == "vllm":
            become_vllm(config, listener)
        served = load_served(config)
        with refuses_address(config.server):  # of two servers that bound it while they loaded, the second to be ready
            listener.listen()  # before the address is printed: a reader of it may connect at once
    host, port = listener.getsockname()[:2]
    print(f"serving {served.name} at {address(host, port)}", flush=True)
    http_server(served, log_level="warning", timeout_graceful_shutdown=GRACE_SECONDS).run(sockets=[listener])


def address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def served_name(config: ServerConfig) -> str:
    return config.server.served_model_name or config.model.path


def load_served(config: ServerConfig) -> Served:
    """Loads the model of the config, ready to answer requests."""
    rollout, tokenizer = config.rollout, load_tokenizer(config.model, "model")
    standalone = StandaloneRollout(config.model, rollout, tokenizer, config.trainer.n_threads)
    return Served(
        name=served_name(config),
        tokenizer=tokenizer,
        pump=StreamingEngine(standalone.engine, standalone.precision, ThreadPoolExecutor(1, "engine")),
        vocab_size=standalone.vocab_size,
        context=rollout.prompt_length + rollout.response_length,
        max_tokens=rollout.response_length,
        api_key=read_key(vars(config.server), "server"),
        parser=ToolParser.get_tool_parser(rollout.multi_turn.format, tokenizer),
    )


def bind_socket(server: ServerSettings) -> socket.socket:
    """Binds a socket to the port, and does not listen before the model is loaded. Raises ConfigError if it is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in server.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    with refuses_address(server):
        listener.bind((server.host, server.port))
    return listener


@contextmanager
def refuses_address(server: ServerSettings) -> Iterator[None]:
    """Raises ConfigError where the block cannot have the server's address."""
    try:
        yield
    except OSError as error:
        address = f"server.host={server.host} server.port={server.port}"
        raise ConfigError(f"{address} cannot be listened at ({error.strerror}): set another, or 0 for any.") from error


def become_vllm(config: ServerConfig, listener: socket.socket) -> NoReturn:
    """Replaces this process by vLLM's own server, at the address of `listener`, which vLLM binds again."""
    host, port = listener.getsockname()[:2]
    command = vllm_command(config, port)
    print(f"vLLM's server starts, to serve {served_name(config)} at {address(host, port)}", flush=True)
    listener.close()
    os.execve(command[0], command, server_environment(config))


def vllm_command(config: ServerConfig, port: int) -> list[str]:
    """Builds the command line of vLLM's server for the same settings. Raises ConfigError if it is not installed."""
    if find_spec("vllm") is None:
        remedy = "pip install -c constraints.txt -r requirements-vllm.txt"
        raise ConfigError(f"rollout.name=vllm: {remedy}, or serve by rollout.name=hf.")
    model, server = config.model, config.server
    path, device = check_model_path(model.path, "model.path"), training_device(n_gpus=None)
    text = load_model_config(model, path, "model.path").get_text_config()
    options = {
        "model": path,
        "tokenizer": model.tokenizer_path or path,
        "served_model_name": served_name(config),
        "host": server.host,
        "port": port,
        "seed": config.trainer.seed,
        "disable_uvicorn_access_log": True,
        **(TAKES_WEIGHTS if server.takes_weights else {}),
        **shared_settings(config.rollout, text, device.type, compute_dtype("auto", device)),
    }
    if model.trust_remote_code:
        options["trust_remote_code"] = True
    words = [word for name, value in options.items() for word in option(name.replace("_", "-"), value)]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]


def option(name: str, value: Any) -> list[str]:
    """Writes `name`=`value` as words of vLLM's command line."""
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}", value if isinstance(value, str) else json.dumps(value)]


def server_environment(config: ServerConfig) -> dict[str, str]:
    """Returns the environment variables of vLLM's server; to take weights it needs its development routes."""
    variables = vllm_environment(training_device(n_gpus=None).type)
    if key := read_key(vars(config.server), "server"):
        variables["VLLM_API_KEY"] = key  # a command can be read by whoever lists processes
    variables["OMP_NUM_THREADS"] = str(worker_threads(config.trainer.n_threads).number)
    if config.server.takes_weights:
        paths = [str(ROOT), *variables.get("PYTHONPATH", "").split(os.pathsep)]
        variables |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return variables
