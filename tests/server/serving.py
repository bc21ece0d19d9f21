"""A server for tests: the bundled model behind uvicorn on a free port of 127.0.0.1."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.llm import LLM
from remask.request.result import Event
from remask.server.app import create_app
from remask.server.config import ServerConfig
from remask.server.run import Server
from remask.server.service import Service
from remask.tasks import transit
from remask.tasks.transit import make_workload
from remask.text.tokenizer import Tokenizer
from tests.server.described import Described, described
from tests.waiting import LONGEST_S, eventually

if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

QUESTIONS = make_workload(24, 3, 5)
CHATS = [list(question.messages) for question in QUESTIONS]
LONG = {"max_tokens": 48, "block_length": 1, "steps": 48, "ignore_eos": True}  # some tenths of a second
SLOW = {"max_tokens": 256, "block_length": 1, "steps": 256, "ignore_eos": True}  # seconds: never run to its end
URL = "/v1/chat/completions"

TEMPLATE = (
    "{% if tools %}Tools in <tool_call> marks: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template that tells of tools, and of calls that were made."""

T = TypeVar("T")


@dataclass(frozen=True)
class Running:
    """A running server. What `client` gets of it, as a whole or by `stream`, must be what `document` says."""

    base: str
    service: Service
    client: httpx.Client
    server: Server
    document: Described

    @property
    def llm(self) -> LLM:
        """The server's model over an engine of its own: the server's runs in its thread, audits too."""
        llm, session = copy(self.service.llm), copy(self.service.llm.session)
        llm.session, session.engine = session, session.new_engine()
        return llm

    def openai(self, key: str = "any") -> "OpenAI":
        """OpenAI's own client of it; close it."""
        import openai

        return openai.OpenAI(base_url=f"{self.base}/v1", api_key=key, max_retries=0)

    def anthropic(self, key: str = "any") -> "Anthropic":
        """Anthropic's; close it."""
        import anthropic

        return anthropic.Anthropic(base_url=self.base, api_key=key, max_retries=0)

    def chat(self, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(URL, json=body)

    def answer(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """What a body is answered with, which must be a 200."""
        response = self.client.post(url, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def refusal(self, url: str, body: dict[str, Any], status: int = 400) -> dict[str, Any]:
        """The error that a body is refused with."""
        response = self.client.post(url, json=body)
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        return error

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
        told = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        for event in told:
            self.document.validate(("post", str(self.document.path(url)), 200, "text/event-stream"), event)
        return told

    def cache(self) -> dict[str, Any]:
        told: dict[str, Any] = self.client.get("/v1/cache").json()
        return told

    @property
    def open(self) -> int:
        """Requests that were accepted and have not ended."""
        return self.service.engine.running + self.service.engine.waiting

    def settle(self) -> None:
        """Wait until no request runs or waits, then check that every page and lease has its owner.

        A request of a client that has left may begin meanwhile; then this waits again.
        """
        while True:
            eventually(lambda: not self.open)
            if self.between_steps(lambda engine: not engine.busy and _checked(engine)):
                return

    def between_steps(self, act: Callable[[Engine], T]) -> T:
        """What `act` returns of the engine, on its thread."""
        loop = self.server._loop
        assert loop is not None
        return asyncio.run_coroutine_threadsafe(self.service.engine.call(act), loop).result(LONGEST_S)

    def post(self, url: str, body: dict[str, Any]) -> socket.socket:
        """A connection on which a request has been sent whose answer nobody reads yet."""
        content = json.dumps(body).encode()
        connection = socket.create_connection((self.client.base_url.host, self.client.base_url.port or 80), LONGEST_S)
        head = f"POST {url} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        if key := self.client.headers.get("Authorization"):
            head += f"Authorization: {key}\r\n"
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
        return connection


def _checked(engine: Engine) -> bool:
    """Raises where a page or a lease has no owner; for an engine that is idle."""
    engine.check_integrity()
    assert all(entry.leases == 0 for entry in engine.store.entries)
    return True


class Hold:
    """Stands before an engine's steps: lets some through, and no other until it is told to."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._engine, self._left = engine, steps
        self._standing, self._more = threading.Event(), threading.Condition()

    def __call__(self) -> list[Event]:
        with self._more:
            if not self._left:
                self._standing.set()
                assert self._more.wait_for(lambda: self._left, 10 * LONGEST_S)
            self._left -= 1
        return Engine.step(self._engine)

    def wait(self) -> None:
        """Wait until the engine's thread stands before a step that may not run."""
        assert self._standing.wait(LONGEST_S)

    def let(self, steps: int) -> None:
        """Let so many more steps run; any number where it is negative."""
        with self._more:
            self._standing.clear()
            self._left = steps
            self._more.notify()


@contextmanager
def held(running: Running, steps: int = 0) -> Iterator[Hold]:
    """Let the engine run `steps` more steps, and no other while the block lasts unless the hold lets it.

    The event loop goes on: what it posts to the engine, such as that a client has left, is found when the block ends,
    after one step at most.
    """
    attributes = vars(running.service.llm.engine)
    attributes["step"] = hold = Hold(running.service.llm.engine, steps)
    try:
        yield hold
    finally:
        del attributes["step"]
        hold.let(-1)


def left_alone(running: Running) -> None:
    """Wait until the server knows that a client has left whose request the engine is `held` at."""
    eventually(lambda: running.service.engine._commands)


def text_of(answer: dict[str, Any]) -> str:
    """The content of a chat's first choice."""
    text: str = answer["choices"][0]["message"]["content"]
    return text


def joined(chunks: Iterable[dict[str, Any]]) -> str:
    """The content that the chunks of a chat's only choice come to."""
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def cached_tokens(answer: dict[str, Any]) -> int:
    """Tokens of the prompt that were read from the store."""
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def at_once(*calls: Callable[[], T]) -> list[T]:
    """What the calls return, each of which has a thread."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@contextmanager
def under_template(tokenizer: Tokenizer, template: str) -> Iterator[None]:
    """Another chat template while the block lasts."""
    before = tokenizer.chat_template
    tokenizer.use_chat_template(template)
    try:
        yield
    finally:
        assert before is not None
        tokenizer.use_chat_template(before)


def bundled(name: str, cache: str = "none", template: str | None = None, **settings: Any) -> LLM:
    """A bundled model in float32 on the CPU."""
    llm = LLM(f"bundled-{name}", cache=cache, dtype="float32", device="cpu", **settings)
    if template is not None:
        assert llm.tokenizer is not None
        llm.tokenizer.use_chat_template(template)
    return llm


def make_llm(cache: str = "bicache", depth: int | None = None, **limits: Any) -> LLM:
    """The bundled model; with a `depth` it reads as many layers, and earns none."""
    settings = None if depth is None else {"depth": depth}
    return bundled("transit", cache, cache_config=settings, engine=EngineConfig(**limits))


@contextmanager
def serving(
    llm: LLM | None = None,
    clock: Callable[[], float] = time.monotonic,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Serve until the block ends, in uvicorn's event loop or in one that `loop_factory` makes."""
    config = ServerConfig(**{"model_names": ["bundled-transit"], "sampling": transit.SAMPLING, **settings})
    app = create_app(llm or make_llm(), config, clock=clock)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = Server(app, listener)

    def run() -> None:
        if loop_factory is None:
            server.run()
        else:
            with asyncio.Runner(loop_factory=loop_factory) as runner:
                runner.run(server.serve([listener]))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive())
        assert thread.is_alive()
        base = f"http://127.0.0.1:{listener.getsockname()[1]}"
        headers = {"Authorization": f"Bearer {config.api_keys[0]}"} if config.api_keys else {}
        document = described(app)

        def check(response: httpx.Response) -> None:
            if "event-stream" not in response.headers.get("content-type", ""):
                response.read()
                document.check(response)

        hooks = {"response": [check]}
        with httpx.Client(base_url=base, timeout=LONGEST_S, headers=headers, event_hooks=hooks) as client:
            yield Running(base, app.state.service, client, server, document)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
