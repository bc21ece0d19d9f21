"""Threads that render and tokenize texts, away from the event loop."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

SHORT = 16_384  # characters that are tokenized in some milliseconds
LONG = SHORT + 1  # what takes as long as a long text counts as many characters
ITEM = 64  # characters that a further text counts as, however short it is


class Turns:
    """So many places, for which owners wait in turn: each gets one before another gets its next, whoever asks most."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # who is next stands first

    async def acquire(self, owner: str) -> None:
        """Wait for a place."""
        if self._free:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it got its place in the same moment
                self.release()
            raise

    def release(self) -> None:
        """Give a place to the next owner."""
        while self._waiting:
            owner, line = self._waiting.popitem(last=False)
            while line and line[0].done():  # who has left
                line.popleft()
            if not line:
                continue
            turn = line.popleft()
            if line:
                self._waiting[owner] = line
            turn.set_result(None)
            return
        self._free += 1

    async def run(self, owner: str, pool: ThreadPoolExecutor, call: Callable[..., T], *args: Any) -> T:
        """Return what `call` returns on a thread of `pool`, which holds a place until it has ended."""
        await self.acquire(owner)
        loop = asyncio.get_running_loop()
        work = pool.submit(call, *args)
        work.add_done_callback(lambda _: loop.call_soon_threadsafe(self.release))
        return await asyncio.wrap_future(work)


class TextWorkers:
    """`threads` threads, two at least. Long texts never hold all of them, so short ones do not wait for long ones.

    Long ones of several owners take turns.

    Tokenizers release the interpreter's lock while they work.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="remask-text")
        self._long = Turns(threads - 1)

    async def run(self, owner: str, size: int, call: Callable[..., T], *args: Any) -> T:
        """Return what `call` returns, and raise what it raises. `size` is about how many characters it works on.

        A call whose caller is cancelled does not begin; once begun it runs to its end, and holds its thread so long.
        """
        if size <= SHORT:
            return await asyncio.wrap_future(self._pool.submit(call, *args))
        return await self._long.run(owner, self._pool, call, *args)

    def close(self) -> None:
        """End the threads once they have done what they were given."""
        self._pool.shutdown()
