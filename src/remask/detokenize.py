"""Text of a growing run of settled tokens: what has been said is never taken back."""

from collections.abc import Sequence

from remask.models.tokenizer import Tokenizer

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # how a tokenizer shows bytes that are no whole character yet


def stop_at(text: str, stops: Sequence[str]) -> int | None:
    """Where the first of `stops` begins in `text`; None where none is in it."""
    found = [place for place in (text.find(stop) for stop in stops) if place >= 0]
    return min(found, default=None)


class Detokenizer:
    """Turns tokens into text as they settle, left to right. The pieces join to the text of all tokens at once.

    Characters whose bytes span tokens are held back until they are whole, and so is text that may yet turn into one
    of `stops`; with the first stop text, which is not part of the answer, the text ends.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._tokens: list[int] = []
        self._window = 0  # decoding restarts here: tokens said last, as spaces depend on what stands before
        self._said = 0  # tokens whose text has been read
        self._held = ""  # text that may turn into a stop
        self.length = 0  # characters read, held ones included
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """The text that is certain once `tokens` have settled after all earlier ones."""
        # `decode` leaves special tokens out; a window of nothing else would lose the space before the next word.
        shown = [token for token in tokens if token not in self._tokenizer.special_ids]
        return self._certain(self._take(shown), final=False)

    def finish(self) -> str:
        """What was held back: there are no more tokens."""
        return self._certain(self._read(final=True), final=True)

    def _take(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, all read at once where they end with a whole character, else one after the other."""
        if not tokens:
            return ""
        self._tokens += tokens
        text = self._read(final=False)
        if text or len(tokens) == 1:
            return text
        del self._tokens[-len(tokens) :]
        return "".join(self._take([token]) for token in tokens)

    def _read(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._tokens[self._window : self._said])
        text = self._tokenizer.decode(self._tokens[self._window :])
        if len(text) <= len(before) or (text.endswith(_INCOMPLETE) and not final):
            return ""
        self._window, self._said = self._said, len(self._tokens)
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
    """Length of the longest end of `text` that `stop` begins with, `stop` itself left out."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
