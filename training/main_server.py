"""Serves a model behind an OpenAI-compatible API: python -m training.main_server model.path=…

Any client of that API works with base_url=http://127.0.0.1:8000/v1. rollout.name=vllm starts vLLM's own server.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as a file it runs like as a module
    from configs.process import end_on_interrupt, set_environment

    end_on_interrupt()
    set_environment()  # before torch is loaded

import os
import socket
from importlib.util import find_spec

import uvicorn

from configs.errors import ConfigError, refusals
from configs.loader import load_config, parse_arguments
from configs.paths import ROOT
from configs.serving import ServerConfig, ServerSettings, check_server
from data.model_config import load_model_config
from data.tokenizer import check_model_path, load_tokenizer
from workers.engine import compute_dtype
from workers.engine_pump import EnginePump
from workers.models import training_device
from workers.server import Served, build_app
from workers.standalone_rollout import StandaloneRollout
from workers.vllm_rollout_spmd import BLOCK, NO_COMPILATION, VARIABLES, cpu_cache_bytes

WEIGHTS_READER = "workers.shared_weights.SharedWeights"
PATIENCE = 5  # seconds that open requests get when the server is stopped


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv, "server", __doc__)
    with refusals():
        config = load_config(arguments, ServerConfig)
        check_server(config)
        if config.rollout.name == "vllm":
            command = vllm_command(config)
            os.execve(command[0], command, vllm_environment(config))
        listener = bound_socket(config.server)
        served = load_served(config)
    listener.listen()  # whoever reads the address below may connect at once
    host, port = listener.getsockname()[:2]
    settings = uvicorn.Config(build_app(served), log_level="warning", timeout_graceful_shutdown=PATIENCE)
    print(f"serving {served.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
    uvicorn.Server(settings).run(sockets=[listener])


def load_served(config: ServerConfig) -> Served:
    """The model of the config, ready to answer."""
    rollout = config.rollout
    tokenizer = load_tokenizer(config.model, "model")
    standalone = StandaloneRollout(config.model, rollout, tokenizer, config.trainer.n_threads)
    return Served(
        name=config.server.served_model_name or config.model.path,
        tokenizer=tokenizer,
        pump=EnginePump(standalone.engine, standalone.precision),
        vocab_size=standalone.vocab_size,
        context=rollout.prompt_length + rollout.response_length,
        max_tokens=rollout.response_length,
        api_key=config.server.api_key,
    )


def bound_socket(server: ServerSettings) -> socket.socket:
    """A socket that has the port, and does not listen yet: nobody connects before the model is loaded.

    Raises:
        ConfigError: the port cannot be had.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"server.host={server.host} server.port={server.port} cannot be listened at ({error.strerror}): name "
            "another port, or 0 for any free one."
        ) from error
    return listener


def vllm_command(config: ServerConfig) -> list[str]:
    """The command of vLLM's server for the same settings.

    Raises:
        ConfigError: vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "rollout.name=vllm: vLLM is not installed here (pip install -r requirements-vllm.txt): install it, or "
            "serve by rollout.name=hf."
        )
    model, server, rollout = config.model, config.server, config.rollout
    path = check_model_path(model.path, "model.path")
    options = {
        "--model": path,
        "--tokenizer": model.tokenizer_path or path,
        "--served-model-name": server.served_model_name or model.path,
        "--host": server.host,
        "--port": str(server.port),
        "--max-model-len": str(rollout.prompt_length + rollout.response_length),
        "--max-num-seqs": str(rollout.max_num_seqs),
        "--seed": str(config.trainer.seed),
        "--generation-config": "vllm",  # nothing of sampling comes from the model's files, as here
        "--logprobs-mode": "processed_logprobs",  # after temperature, as here
    }
    if server.api_key:
        options["--api-key"] = server.api_key
    if server.takes_weights:
        options["--worker-extension-cls"] = WEIGHTS_READER
    flags = ["--trust-remote-code"] if model.trust_remote_code else []
    device = training_device(n_gpus=None)
    dtype = compute_dtype("auto", device)  # a trainer's
    options["--dtype"] = str(dtype).removeprefix("torch.")
    if device.type == "cpu":  # where vLLM would take most of the memory, and compile for half a minute
        text = load_model_config(model, path, "model.path").get_text_config()
        cache = cpu_cache_bytes(rollout, text, dtype.itemsize)
        options |= {"--kv-cache-memory-bytes": str(cache), "--block-size": str(BLOCK)}
        flags.append("--enforce-eager")
    arguments = [word for option in options.items() for word in option]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments, *flags]


def vllm_environment(config: ServerConfig) -> dict[str, str]:
    """The variables of vLLM's server: the user's, and what it takes from nowhere else. To take weights it needs its
    /collective_rpc, and a module of ours."""
    variables = {name: value for name, value in VARIABLES.items() if name.startswith("VLLM_CPU")}
    if training_device(n_gpus=None).type == "cpu":
        variables |= NO_COMPILATION
    variables |= os.environ
    if config.server.takes_weights:
        paths = [str(ROOT), *variables.get("PYTHONPATH", "").split(os.pathsep)]
        variables |= {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return variables


if __name__ == "__main__":
    main()
