"""Tokens as they come: their text, piece by piece, and where a response ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a tokenizer decodes an incomplete character to this
MAX_CHAR_TOKENS = 4  # a character has at most four bytes, and a token at least one
MAX_PENDING = 16  # tokens that may wait for the end of a character

Decode = Callable[[Sequence[int]], str]


class IncrementalDecoder:
    """Decodes tokens as they come. The joined pieces equal the text of all tokens; what was returned never changes.

    `decode` returns the text of tokens. A character whose bytes span tokens is held back until it is complete. Bytes
    that never make a character are held back for `MAX_PENDING` tokens at most. `context` holds tokens that stand before
    the first one.
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
        waiting = len(self._pending)
        self._pending += tokens
        text = self._read()
        if text or len(tokens) == 1:
            return text or self._force()
        del self._pending[waiting:]
        return "".join(self.push([token]) for token in tokens)

    def finish(self) -> str:
        """Return the text that is held back, incomplete characters included. There must be no more tokens."""
        return self._read(final=True)

    def _read(self, *, final: bool = False) -> str:
        before, text = self._decode(self._context), self._decode(self._context + self._pending)
        if len(text) <= len(before) or (text.endswith(INCOMPLETE) and not final):
            return ""
        self._context, self._pending = self._pending, []
        return text[len(before) :]

    def _force(self) -> str:
        """Return the text of all pending tokens but the last few, where too many are pending."""
        if len(self._pending) < MAX_PENDING:
            return ""
        before, text = self._decode(self._context), self._decode(self._context + self._pending)
        cut = len(self._pending) - MAX_CHAR_TOKENS
        # One of so many neighbouring cuts is no cut through a character.
        for end in range(cut, cut - MAX_CHAR_TOKENS, -1):
            decided = self._decode(self._context + self._pending[:end])
            if text.startswith(decided):
                break
        decided = decided[len(before) :]
        if decided:
            self._context = self._pending[:end]
        del self._pending[:end]  # without text they are of no use as context
        return decided


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a response."""

    token_ids: frozenset[int]  # tokens that end it and stay part of it
    texts: tuple[str, ...] = ()  # texts that end it
    decode: Decode | None = None  # returns the text of tokens. None where no text ends the response.
    cut: frozenset[int] = frozenset()  # tokens that end it and are no part of it

    @property
    def every(self) -> frozenset[int]:
        """All tokens that end a response."""
        return self.token_ids | self.cut

    def scan(self) -> "StopScan":
        """A scan of a response that has no tokens yet."""
        return StopScan(self)


class StopScan:
    """Looks for the first stop in a response while its tokens settle. Each token is looked at once.

    Attributes:
        end: length of the response that the first stop leaves, a stop token included that stays; None without a stop
            so far. A stop text ends the response with the token that completes it.
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
            elif token in self._rule.cut:
                self.end = self._seen - 1

    def _completes(self, decoder: IncrementalDecoder, token: int) -> bool:
        """Whether a stop text ends within the text of `token`."""
        new = decoder.push([token])
        if not new:
            return False
        text = self._tail + new
        self._tail = text[len(text) - min(len(text), self._longest - 1) :]
        return any(stop in text for stop in self._rule.texts)
