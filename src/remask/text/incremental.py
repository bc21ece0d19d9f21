"""The text of tokens as they settle, piece by piece, and the end of a response."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # the text of an incomplete character
MAX_CHAR_TOKENS = 4  # a character has at most four bytes, and a token at least one
MAX_PENDING = 16  # tokens that may wait for the end of a character

Decode = Callable[[Sequence[int]], str]
"""Returns the text of tokens."""


class IncrementalDecoder:
    """Decodes tokens piece by piece. The joined pieces equal the text of all tokens; what was returned never changes.

    A character whose bytes span tokens is held back until it is complete, bytes that never make a character for at most
    `MAX_PENDING` tokens. `context` holds the tokens before the first one.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context = list(context)  # tokens of the last piece, as spaces depend on the token before
        self._pending: list[int] = []  # tokens without text so far

    def push(self, tokens: Sequence[int]) -> str:
        """Append `tokens`. Returns the text that is final with them."""
        if not tokens:
            return ""
        # Together if they end with a complete character, otherwise one after the other.
        count = len(self._pending)
        self._pending += tokens
        text = self._read()
        if text or len(tokens) == 1:
            return text or self._force()
        del self._pending[count:]
        return "".join(self.push([token]) for token in tokens)

    def finish(self) -> str:
        """Return the text that is held back, incomplete characters included. There must be no more tokens."""
        return self._read(final=True)

    def _read(self, *, final: bool = False) -> str:
        """Return the text of all pending tokens if it ends with a complete character or is `final`, else nothing."""
        context_text = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        if len(text) <= len(context_text) or (text.endswith(INCOMPLETE) and not final):
            return ""
        self._context = self._pending
        self._pending = []
        return text[len(context_text) :]

    def _force(self) -> str:
        """Return the text of all pending tokens but the last few if `MAX_PENDING` are pending, else nothing."""
        if len(self._pending) < MAX_PENDING:
            return ""
        context_text = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        last_end = len(self._pending) - MAX_CHAR_TOKENS
        # Of `MAX_CHAR_TOKENS` neighbouring ends, one at least is not within a character.
        for end in range(last_end, last_end - MAX_CHAR_TOKENS, -1):
            leading_text = self._decode(self._context + self._pending[:end])
            if text.startswith(leading_text):
                break
        piece = leading_text[len(context_text) :]
        if piece:
            self._context = self._pending[:end]
        del self._pending[:end]  # tokens without text are of no use as context
        return piece


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a response."""

    token_ids: frozenset[int]  # tokens that end it and stay part of it
    texts: tuple[str, ...] = ()  # texts that end it
    decode: Decode | None = None  # needed if texts end the response
    cut_ids: frozenset[int] = frozenset()  # tokens that end it and are no part of it

    @property
    def stop_ids(self) -> frozenset[int]:
        """All tokens that end a response."""
        return self.token_ids | self.cut_ids


class StopScan:
    """Finds the first stop of a response while its tokens settle. Each token is read once.

    Attributes:
        end: number of tokens up to the first stop, including a stop token that is not cut and the token that completes
            a stop text; None without a stop so far.
    """

    def __init__(self, rule: StopRule) -> None:
        self.end: int | None = None
        self._rule = rule
        self._count = 0  # tokens so far
        self._decoder = None if rule.decode is None else IncrementalDecoder(rule.decode)
        self._max_tail = max(map(len, rule.texts), default=1) - 1
        self._tail = ""  # text in which a stop text may have begun

    def push(self, tokens: Sequence[int]) -> None:
        """Append settled tokens. Those after a stop are ignored."""
        for token in tokens:
            if self.end is not None:
                return
            self._count += 1
            if token in self._rule.token_ids or self._completes_text(token):
                self.end = self._count
            elif token in self._rule.cut_ids:
                self.end = self._count - 1

    def _completes_text(self, token: int) -> bool:
        """Append `token` to the text. Returns whether a stop text ends within its text."""
        piece = "" if self._decoder is None else self._decoder.push([token])
        if not piece:
            return False
        text = self._tail + piece
        self._tail = text[max(0, len(text) - self._max_tail) :]
        return any(stop in text for stop in self._rule.texts)
