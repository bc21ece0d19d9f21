"""Events of exact pages that were stored and removed, as vLLM publishes them over ZeroMQ, for routers of fleets.

A message has three parts: the topic, the number of the message (8 bytes, the most significant first), and in msgpack
`[seconds, events, rank]`. An event is an array that begins with its name: `BlockStored` with hashes, the parent's
hash or null, token ids, tokens per block, null in place of an adapter's number, and the medium; `BlockRemoved` with
hashes and the medium; `AllBlocksCleared`. A subscriber that missed messages sends the number of the first one: it gets
those that are still buffered, each as number and content, and then the number -1.

Pages of requests with an adapter or a `cache_salt` are not published, as a router knows prompts by their tokens alone.
"""

import queue
import re
import threading
import time
from collections import deque
from typing import Any

from remask.checks.plugins import install_command
from remask.errors import ConfigError
from remask.server.config import KvEventsConfig
from remask.store.chain import Page

_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_LINGER_MS = 1000  # in which the last events may reach subscribers once the thread stops
_POLL_S = 0.05  # seconds that a request for missed messages may wait if there are no events
_PUBLIC_SALT = re.compile(r"\d+\+0:")  # of pages that every prompt of the same tokens may read
MEDIUM = "GPU"  # vLLM's name of the memory that passes read, whatever the device is


class KvEvents:
    """Publishes the events of a chain of pages (a `PageListener`), on a thread of its own.

    The constructor raises `ConfigError` if pyzmq or msgspec is missing, or an address cannot be bound.
    """

    def __init__(self, config: KvEventsConfig, page_size: int) -> None:
        try:
            import msgspec
            import zmq
        except ModuleNotFoundError as error:
            raise ConfigError(f"kv_events_config needs {error.name}: {install_command('events')}") from error
        self._encode = msgspec.msgpack.Encoder().encode
        self._page_size = page_size
        self._topic = config.topic.encode()
        self._buffer = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)  # numbers and contents
        self._events: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._messages = self._context.socket(zmq.PUB)
        self._messages.set_hwm(config.hwm)
        self._requests = self._context.socket(zmq.ROUTER)
        name, address = "endpoint", config.endpoint
        try:
            self._messages.bind(address)
            if config.replay_endpoint is not None:
                name, address = "replay_endpoint", config.replay_endpoint
                self._requests.bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_events_config: {name}={address!r} cannot be bound: {error}; give another address, "
                "such as tcp://127.0.0.1:5557"
            ) from error
        # Without requests to answer, the thread sleeps until there is an event.
        self._poll_s = None if config.replay_endpoint is None else _POLL_S
        self._thread = threading.Thread(target=self._run, name="remask-kv-events", daemon=True)
        self._thread.start()

    def on_stored(self, page: Page) -> None:
        """See `PageListener`."""
        if _PUBLIC_SALT.fullmatch(page.salt):
            tokens = list(page.tokens[: self._page_size])
            self._events.put(["BlockStored", [page.key], page.parent, tokens, self._page_size, None, MEDIUM])

    def on_removed(self, page: Page) -> None:
        """See `PageListener`."""
        if _PUBLIC_SALT.fullmatch(page.salt):
            self._events.put(["BlockRemoved", [page.key], MEDIUM])

    def on_cleared(self) -> None:
        """See `PageListener`."""
        self._events.put(["AllBlocksCleared"])

    def close(self) -> None:
        """Publish the remaining events, and stop the thread."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Publish events and answer requests for missed messages, until the queue holds None."""
        number = 0
        is_open = True
        while is_open:
            events: list[list[Any]] = []
            try:
                first = self._events.get(timeout=self._poll_s)
                pending = [first, *(self._events.get_nowait() for _ in range(self._events.qsize()))]
                is_open = None not in pending
                events = [event for event in pending if event is not None]
            except queue.Empty:
                pass
            if events:
                content = self._encode([time.time(), events, 0])
                self._buffer.append((number.to_bytes(_NUMBER_BYTES, "big"), content))
                self._messages.send_multipart([self._topic, *self._buffer[-1]])
                number += 1
            while self._requests.poll(0):
                self._replay(self._requests.recv_multipart())
        self._context.destroy(linger=_LINGER_MS)

    def _replay(self, request: list[bytes]) -> None:
        """Send the buffered messages from the number on that `request` ends with, and then `_END`.

        Ignores a request that is not the client's identity, a delimiter and a number.
        """
        if len(request) != 3 or len(request[2]) != _NUMBER_BYTES:
            return
        client, delimiter, first = request
        for number, content in self._buffer:
            if number >= first:
                self._requests.send_multipart([client, delimiter, number, content])
        self._requests.send_multipart([client, delimiter, _END, b""])
