"""The sessions of the playground: limited in number and age, each known only to the client that opened it."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable

from remask.server.errors import ApiError
from remask.server.playground.sandbox import Sandbox

MAX_SESSIONS = 256
IDLE_S = 1800.0


class Sessions:
    """Sandboxes by session name. Names cannot be guessed. Above `limit` sessions the least recently used one ends."""

    def __init__(
        self, limit: int = MAX_SESSIONS, idle_s: float = IDLE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit, self.idle_s, self._clock = limit, idle_s, clock
        self._held: OrderedDict[str, tuple[float, Sandbox]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def open(self) -> tuple[str, Sandbox]:
        """Begin a session. Returns its name and its sandbox."""
        self._expire()
        while len(self._held) >= self.limit:
            self._held.popitem(last=False)
        name, sandbox = secrets.token_urlsafe(16), Sandbox()
        self._held[name] = (self._clock(), sandbox)
        return name, sandbox

    def find(self, name: str) -> Sandbox:
        """Return the sandbox of a session. Raises a 404 if the session does not exist or has ended."""
        self._expire()
        if name not in self._held:
            raise ApiError(404, "there is no such session, or it has ended; POST /playground/pages begins a new one")
        sandbox = self._held[name][1]
        self._held[name] = (self._clock(), sandbox)
        self._held.move_to_end(name)
        return sandbox

    def close(self, name: str) -> None:
        """End a session. Raises a 404 if it does not exist or has ended."""
        self.find(name)
        del self._held[name]

    def _expire(self) -> None:
        oldest = self._clock() - self.idle_s
        while self._held and next(iter(self._held.values()))[0] < oldest:
            self._held.popitem(last=False)
