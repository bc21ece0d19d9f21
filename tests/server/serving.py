"""A server for tests: the bundled model behind uvicorn on a free port of 127.0.0.1."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from remask.engine.config import EngineConfig
from remask.errors import IntegrityError
from remask.llm import LLM
from remask.server.app import create_app
from remask.server.config import ServerConfig
from remask.server.run import Server
from remask.server.service import Service
from remask.tasks.transit import make_workload
from remask_lab.bench.workload import TRANSIT_SAMPLING

QUESTIONS = make_workload(24, 3, 5)
CHATS = [list(question.messages) for question in QUESTIONS]
LONG = {"max_tokens": 48, "block_length": 1, "steps": 48, "ignore_eos": True}  # some tenths of a second
SLOW = {"max_tokens": 256, "block_length": 1, "steps": 256, "ignore_eos": True}  # seconds: never run to its end
URL = "/v1/chat/completions"


@dataclass(frozen=True)
class Running:
    """A running server."""

    base: str
    service: Service
    client: httpx.Client

    def chat(self, body: dict[str, Any]) -> httpx.Response:
        """POST to the chat endpoint."""
        return self.client.post(URL, json=body)

    def ask(self, number: int = 0, **fields: Any) -> httpx.Response:
        """A question of the bundled task."""
        return self.chat({"messages": CHATS[number], **fields})

    def stream(self, body: dict[str, Any], url: str = URL) -> list[dict[str, Any]]:
        """The objects of a stream, which must end with `[DONE]`."""
        with self.client.stream("POST", url, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def cache(self) -> dict[str, Any]:
        """What `/v1/cache` tells."""
        told: dict[str, Any] = self.client.get("/v1/cache").json()
        return told

    def settle(self, timeout: float = 20.0) -> None:
        """Wait until no request runs or waits, then check that every page and lease has its owner.

        A request of a client that has left may begin while this looks, on the engine's thread; then it looks again.
        """
        end = time.monotonic() + timeout
        while True:
            assert time.monotonic() < end, "requests are still open"
            time.sleep(0.005)
            if self.service.engine.running or self.service.engine.waiting:
                continue
            steps = self.service.llm.engine.stats.steps
            try:
                self.service.llm.engine.check_integrity()
                assert all(entry["leases"] == 0 for entry in self.cache()["entries"])
            except (IntegrityError, AssertionError):
                time.sleep(0.1)
                if self.service.llm.engine.stats.steps == steps and not self.service.engine.running:
                    raise
            else:
                return


def eventually(reached: Callable[[], bool], timeout: float = 10.0) -> None:
    """Wait for a state that other threads bring about."""
    end = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.002)


def make_llm(cache: str = "bicache", **limits: Any) -> LLM:
    """The bundled model."""
    return LLM("bundled-transit", cache=cache, dtype="float32", device="cpu", engine=EngineConfig(**limits))


@contextmanager
def serving(llm: LLM | None = None, **settings: Any) -> Iterator[Running]:
    """Serve until the block ends."""
    config = ServerConfig(**{"model_names": ["bundled-transit"], "sampling": TRANSIT_SAMPLING, **settings})
    app = create_app(llm or make_llm(), config)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = Server(app, listener)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        headers = {"Authorization": f"Bearer {config.api_keys[0]}"} if config.api_keys else {}
        with httpx.Client(base_url=base, timeout=60, headers=headers) as client:
            yield Running(base, app.state.service, client)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
