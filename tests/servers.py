"""A server of a tiny model on loopback, for tests; its fixtures are in conftest.py."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from time import sleep

import uvicorn

from configs.loader import CONFIG_DIR, Arguments, load_config
from configs.serving import ServerConfig
from training.main_server import bound_socket
from workers.server import Served, build_app

KEY = "a secret"


def compose(model: Path, *overrides: str) -> ServerConfig:
    settings = [f"model.path={model}", "server.port=0", "server.served_model_name=tiny", *overrides]
    lengths = ["data.max_prompt_length=40", "data.max_response_length=24"]
    return load_config(Arguments("server", CONFIG_DIR, settings + lengths, print_config=False), ServerConfig)


@contextmanager
def serving(served: Served, config: ServerConfig) -> Iterator[str]:
    """A server in a thread of this process; its address."""
    listener = bound_socket(config.server)
    server = uvicorn.Server(uvicorn.Config(build_app(served), log_level="error", timeout_graceful_shutdown=1))
    thread = Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
