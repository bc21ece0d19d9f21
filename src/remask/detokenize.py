"""Turns settled tokens into text, piece by piece. Text that has been returned never changes."""

from collections.abc import Sequence

from remask.models.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a tokenizer decodes an incomplete character to this


def stop_at(text: str, stops: Sequence[str]) -> int | None:
    """Return where the first of `stops` begins in `text`; None if `text` contains none of them."""
    found = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return min(found, default=None)


class Detokenizer:
    """Turns tokens into text as they settle, left to right. The joined pieces equal the text of all tokens.

    Holds back a character whose bytes span tokens until it is complete, and text that may become one of `stops`. The
    text ends before the first stop text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._window = 0  # decoding starts here: one piece earlier, as spaces depend on the token before
        self._decoded = 0  # tokens whose text has been decoded
        self._held = ""  # text that may become a stop text
        self.length = 0  # decoded characters, held ones included
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """Append `tokens`. Returns the text that is final with them."""
        # `decode` omits special tokens. A window of only those would lose the space before the next word.
        shown = [token for token in tokens if token not in self._tokenizer.special_ids]
        return self._certain(self._take(shown), final=False)

    def finish(self) -> str:
        """Return the text that was held back. There must be no more tokens."""
        return self._certain(self._read(final=True), final=True)

    def _take(self, tokens: Sequence[int]) -> str:
        """Decode `tokens`: together if they end with a complete character, otherwise one after the other."""
        if not tokens:
            return ""
        self._tokens += tokens
        text = self._read(final=False)
        if text or len(tokens) == 1:
            return text
        del self._tokens[-len(tokens) :]
        return "".join(self._take([token]) for token in tokens)

    def _read(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._window : self._decoded])
        text = self._tokenizer.decode(self._tokens[self._window :])
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        self._window, self._decoded = self._decoded, len(self._tokens)
        return text[len(before) :]

    def _certain(self, new: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + new
        self.length += len(new)
        end = stop_at(text, self._stops)
        if end is not None:
            self.stopped = True
            self._held = ""
            return text[:end]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
