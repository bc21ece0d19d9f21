"""Events of exact pages that were stored and removed, as vLLM publishes them over ZeroMQ, for routers of fleets.

A message has three parts: the topic, the number of the message (8 bytes, the most significant first), and in msgpack
`[seconds, events, rank]`. An event is an array that begins with its name: `BlockStored` with hashes, the parent's
hash or null, token ids, tokens a block, null in place of an adapter's number, and the medium; `BlockRemoved` with
hashes and the medium; `AllBlocksCleared`. Who missed messages asks for them with the number of the first: those that
are still kept come, each as number and content, and then the number -1.

Pages of requests with an adapter or a `cache_salt` are not told of, as a router knows prompts by their tokens alone.
"""

import queue
import re
import threading
import time
from collections import deque
from typing import Any

from remask.checks.plugins import install_line
from remask.errors import ConfigError
from remask.server.config import KvEventsConfig
from remask.store.chain import Page

_END = (-1).to_bytes(8, "big", signed=True)
_TICK_S = 0.05  # how long a request for missed messages may wait behind an idle queue
_PLAIN = re.compile(r"\d+\+0:")  # the salt of pages that every prompt of the same tokens reads
MEDIUM = "GPU"  # vLLM's name of the memory that passes read, whatever the device is


class KvEvents:
    """Publishes what a chain of pages tells, on a thread of its own.

    Raises `ConfigError` where pyzmq or msgspec is missing, or an address cannot be bound.
    """

    def __init__(self, config: KvEventsConfig, page_size: int) -> None:
        try:
            import msgspec
            import zmq
        except ModuleNotFoundError as error:
            raise ConfigError(f"kv_events_config needs {error.name}: {install_line('events')}") from error
        self._zmq, self._encode = zmq, msgspec.msgpack.Encoder().encode
        self._page_size, self._topic = page_size, config.topic.encode()
        self._buffer = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps)  # numbers and contents
        self._events: queue.SimpleQueue[list[Any] | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._messages = self._context.socket(zmq.PUB)
        self._messages.set_hwm(config.hwm)
        self._requests = self._context.socket(zmq.ROUTER)
        try:
            for name, socket in (("endpoint", self._messages), ("replay_endpoint", self._requests)):
                address = getattr(config, name)
                if address is not None:
                    try:
                        socket.bind(address)
                    except zmq.ZMQError as error:
                        raise ConfigError(
                            f"kv_events_config: {name}={address!r} cannot be bound: {error}; give another address, "
                            "such as tcp://127.0.0.1:5557"
                        ) from error
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        # Without requests to answer it sleeps until something is told.
        self._tick_s = None if config.replay_endpoint is None else _TICK_S
        self._thread = threading.Thread(target=self._run, name="remask-kv-events", daemon=True)
        self._thread.start()

    def on_stored(self, page: Page) -> None:
        """See `PageListener`."""
        if _PLAIN.fullmatch(page.salt):
            tokens = list(page.tokens[: self._page_size])
            self._events.put(["BlockStored", [page.key], page.parent, tokens, self._page_size, None, MEDIUM])

    def on_removed(self, page: Page) -> None:
        """See `PageListener`."""
        if _PLAIN.fullmatch(page.salt):
            self._events.put(["BlockRemoved", [page.key], MEDIUM])

    def on_cleared(self) -> None:
        """See `PageListener`."""
        self._events.put(["AllBlocksCleared"])

    def close(self) -> None:
        """Send what is left, and end the thread."""
        self._events.put(None)
        self._thread.join()

    def _run(self) -> None:
        number, going = 0, True
        while going:
            events = list[list[Any]]()
            try:
                first = self._events.get(timeout=self._tick_s)
                waiting = [first, *(self._events.get_nowait() for _ in range(self._events.qsize()))]
                going = None not in waiting
                events = [event for event in waiting if event is not None]
            except queue.Empty:
                pass
            if events:
                content = self._encode([time.time(), events, 0])
                self._buffer.append((number.to_bytes(8, "big"), content))
                self._messages.send_multipart([self._topic, *self._buffer[-1]])
                number += 1
            while self._requests.poll(0):
                self._answer(self._requests.recv_multipart())
        self._context.destroy(linger=1000)

    def _answer(self, parts: list[bytes]) -> None:
        """Send the messages of the buffer from the one on that a request names."""
        if len(parts) != 3 or len(parts[2]) != 8:
            return  # of another protocol
        client, between, first = parts
        for number, content in self._buffer:
            if number >= first:
                self._requests.send_multipart([client, between, number, content])
        self._requests.send_multipart([client, between, _END, b""])
