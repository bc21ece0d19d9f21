"""Where a response ends: stop tokens and stop texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from remask.text.incremental import IncrementalDecoder

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a response.

    Attributes:
        token_ids: tokens that end it and stay part of it.
        texts: texts that end it.
        decode: returns the text of tokens. None where no text ends the response.
    """

    token_ids: frozenset[int]
    texts: tuple[str, ...] = ()
    decode: Decode | None = None

    def scan(self) -> "StopScan":
        """Return a scan of a response that has no tokens yet."""
        return StopScan(self)


class StopScan:
    """Looks for the first stop in a response while its tokens settle. Each token is looked at once.

    Attributes:
        end: length of the response that the first stop leaves, stop token included; None without a stop so far. A stop
            text ends the response with the token that completes it.
    """

    def __init__(self, rule: StopRule) -> None:
        self.end: int | None = None
        self._rule = rule
        self._seen = 0
        self._text = None if rule.decode is None else IncrementalDecoder(rule.decode)
        self._longest = max(map(len, rule.texts), default=0)
        self._tail = ""  # text in which a stop text may have begun

    def push(self, tokens: Sequence[int]) -> None:
        """Append settled tokens. Those after a stop are not looked at."""
        for token in tokens:
            if self.end is not None:
                return
            self._seen += 1
            if token in self._rule.token_ids or (self._text is not None and self._completes(self._text, token)):
                self.end = self._seen

    def _completes(self, decoder: IncrementalDecoder, token: int) -> bool:
        """Whether a stop text ends within the text of `token`."""
        new = decoder.push([token])
        if not new:
            return False
        text = self._tail + new
        self._tail = text[len(text) - min(len(text), self._longest - 1) :]
        return any(stop in text for stop in self._rule.texts)
