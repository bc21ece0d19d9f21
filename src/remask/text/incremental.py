"""Turns tokens into text piece by piece, at a cost that depends on the new tokens alone."""

from collections.abc import Callable, Sequence

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a tokenizer decodes an incomplete character to this
MAX_CHAR_TOKENS = 4  # a character has at most four bytes, and a token at least one
MAX_PENDING = 16  # tokens that may wait for the end of a character


class IncrementalDecoder:
    """Decodes tokens as they come. The joined pieces equal the text of all tokens; what was returned never changes.

    `decode` returns the text of tokens. A character whose bytes span tokens is held back until it is complete. Bytes
    that never make a character are held back for `MAX_PENDING` tokens at most. `context` holds tokens that stand before
    the first one.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
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
