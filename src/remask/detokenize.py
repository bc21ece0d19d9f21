"""Turns settled tokens into text, piece by piece. Text that has been returned never changes."""

from collections.abc import Sequence

from remask.models.incremental import IncrementalDecoder
from remask.models.tokenizer import Tokenizer


def stop_at(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first of `stops` begins in `text`; None if `text` contains none of them."""
    found = _first_stop(text, stops)
    return None if found is None else found[0]


def cut_at_stop(text: str, stops: Sequence[str], included: bool) -> str:
    """Return `text` up to the first of `stops`, with it where it is `included`; all of `text` without any."""
    found = _first_stop(text, stops)
    return text if found is None else text[: found[included]]


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Return where the first of `stops` begins and ends; of those that begin there, the shortest."""
    found = [(place, place + len(stop)) for stop in stops if (place := text.find(stop)) >= 0]
    return min(found, default=None)


class Detokenizer:
    """Turns tokens into text as they settle, left to right. The joined pieces equal the text of all tokens.

    Holds back a character whose bytes span tokens until it is complete, and text that may become one of `stops`. The
    text ends before the first stop text, or with it where stops are `included`. Each character is compared with the
    stops once.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), included: bool = False) -> None:
        self._special_ids = tokenizer.special_ids
        self._decoder = IncrementalDecoder(tokenizer.decode)
        self._stops, self._included = tuple(stops), included
        self._held = ""  # text that may become a stop text
        self.length = 0  # decoded characters, held ones included
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """Append `tokens`. Returns the text that is final with them."""
        # `decode` omits special tokens. Many of them within a character would count as bytes that never make one.
        shown = [token for token in tokens if token not in self._special_ids]
        return self._certain(self._decoder.push(shown), final=False)

    def finish(self) -> str:
        """Return the text that was held back. There must be no more tokens."""
        return self._certain(self._decoder.finish(), final=True)

    def _certain(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        self.length += len(new)
        if _first_stop(text, self._stops) is not None:
            self.stopped = True
            self._held = ""
            return cut_at_stop(text, self._stops, self._included)
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
