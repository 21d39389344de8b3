"""Servers on loopback, for tests: one of a tiny model, whose fixtures are in conftest.py, and one that answers by a
function."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

from transformers import AutoTokenizer

from configs.loader import Arguments, load_config, yaml_folder
from configs.schema import ModelConfig, RolloutConfig
from extras.evaluation.settings import ServerConfig
from extras.openai.rollout import OpenAIRollout
from extras.server.__main__ import bind_socket
from extras.server.app import Served, http_server
from workers.load_rollout import build_rollout
from workers.models import load_causal_lm

KEY = "a secret"


def compose(model: Path, *overrides: str) -> ServerConfig:
    settings = [f"model.path={model}", "server.port=0", "server.served_model_name=tiny", *overrides]
    lengths = ["data.max_prompt_length=40", "data.max_response_length=24"]
    arguments = Arguments("server", yaml_folder(ServerConfig), settings + lengths, print_config=False)
    return load_config(arguments, ServerConfig)


@contextmanager
def serving(served: Served, config: ServerConfig) -> Iterator[str]:
    """A server in a thread of this process; its address."""
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


def engine_for(url: str, folder: Path, max_num_seqs: int = 8, **settings: Any) -> OpenAIRollout:
    """The engine of the server at `url`, with the model in `folder`; `settings` are of engine_kwargs.openai."""
    own = {"openai": {"base_url": f"{url.removesuffix('/v1')}/v1", "timeout": 60.0, **settings}}
    lengths = {"prompt_length": 40, "response_length": 24}
    config = RolloutConfig(name="openai", max_num_seqs=max_num_seqs, engine_kwargs=own, **lengths)
    module = load_causal_lm(ModelConfig(path=str(folder)))
    return build_rollout(OpenAIRollout, config, AutoTokenizer.from_pretrained(folder), module)


@contextmanager
def answering(
    answer: Callable[[str, str, dict | None], tuple[int, dict | str]], key: str | None = None, **headers: str
) -> Iterator[str]:
    """The address of a server that answers by `answer(method, path, JSON or None) -> (status, JSON or text)`, with
    `headers`, in which _ stands for -. Whoever does not send the `key`, if there is one, is refused."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.say(*answer("GET", self.path, None))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            self.say(*answer("POST", self.path, json.loads(body) if body else None))

        def say(self, status: int, content: dict | str) -> None:
            if key is not None and self.headers["Authorization"] != f"Bearer {key}":
                status, content = 401, "another key"
            data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"content_length": str(len(data)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # waited for at the end: what they print is of this test
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
