"""Turns settled tokens into text, piece by piece. Text that has been returned never changes."""

from collections.abc import Sequence

from remask.plan.canvas import Template
from remask.request.sampling_params import SamplingParams
from remask.text.incremental import MAX_CHAR_TOKENS, IncrementalDecoder
from remask.text.tokenizer import Tokenizer


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """Where the first of `stops` begins and ends; of those that begin there, the shortest."""
    return min(((place, place + len(stop)) for stop in stops if (place := text.find(stop)) >= 0), default=None)


class Detokenizer:
    """Turns tokens into text as they settle, left to right. The joined pieces equal the text of all tokens.

    Holds back a character whose bytes span tokens until it is complete, and text that may become one of `stops`. The
    text ends before the first stop text, or with it where stops are `included`. Each character is compared with the
    stops once. `context` holds tokens that stand before the first one.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), included: bool = False, context: Sequence[int] = ()
    ) -> None:
        self._special_ids = tokenizer.special_ids
        self._decoder = IncrementalDecoder(tokenizer.decode, context)
        self._stops, self._included = tuple(stops), included
        self._tail = ""  # text that may become a stop text
        self.length = 0  # decoded characters, the tail included
        self.stopped: str | None = None  # the stop text that ended it

    def push(self, tokens: Sequence[int]) -> str:
        """Append `tokens`. Returns the text that is final with them."""
        # `decode` omits special tokens. Many of them within a character would count as bytes that never make one.
        ordinary = [token for token in tokens if token not in self._special_ids]
        return self._certain(self._decoder.push(ordinary), final=False)

    def finish(self) -> str:
        """Return the text that was held back. There must be no more tokens."""
        return self._certain(self._decoder.finish(), final=True)

    def _certain(self, new: str, *, final: bool) -> str:
        if self.stopped is not None:
            return ""
        text = self._tail + new
        self.length += len(new)
        if (span := _first_stop(text, self._stops)) is not None:
            self.stopped, self._tail = text[slice(*span)], ""
            return text[: span[self._included]]
        end = len(text) - (0 if final else max((_overlap(text, stop) for stop in self._stops), default=0))
        self._tail = text[end:]
        return text[:end]


class ResponseText:
    """Turns the tokens of a response into text as they settle, left to right, by its template.

    Padding, and what stands behind a stop in its hole, is no part of the text. A part ends with a whole character.
    `context` holds tokens that stand before the response, where its text goes on from theirs.

    Attributes:
        holes: the text of each hole so far.
        length: decoded characters of the answer, held ones included.
        stop: the stop text that ended a hole, if one did.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template, params: SamplingParams, context: Sequence[int] = ()
    ) -> None:
        self.holes = [""] * len(template.holes)
        self.stop: str | None = None
        self._tokenizer, self._template, self._params = tokenizer, template, params
        self._parts = _parts(template)
        self._padding, self._stop_ids = frozenset(template.padding), frozenset(params.stop_token_ids)
        self._place = self._part = self._before = 0
        self._context = list(context)
        self._begin()

    @property
    def length(self) -> int:
        """See the class."""
        return self._before + (self._text.length if self._shown else 0)

    @property
    def last(self) -> int | None:
        """The last token that made text, its context's before the first one; None where there is none."""
        return self._context[-1] if self._context else None

    def push(self, tokens: Sequence[int]) -> str:
        """Append `tokens`. Returns the text of the answer that is final with them."""
        text, rest = "", list(tokens)
        while rest:
            count = self._parts[self._part][0] - self._place
            text += self._add(self._text.push(self._visible(rest[:count])))
            self._place += len(rest[:count])
            rest = rest[count:]
            if self._place == self._parts[self._part][0]:
                text += self.finish()
                self._before = self.length
                self._part += 1
                self._begin()
        return text

    def finish(self) -> str:
        """Return the text of the answer that was held back. There must be no more tokens of this part."""
        return self._add(self._text.finish())

    def _begin(self) -> None:
        """Begin with the next part, or with nothing behind the last one."""
        self._hole = self._parts[self._part][1] if self._part < len(self._parts) else None
        params, inside = self._params, self._hole is not None
        stops = params.stop if inside else ()
        self._text = Detokenizer(self._tokenizer, stops, params.include_stop_str_in_output, self._context)
        self._shown = inside or not self._template.fill_only
        self._stopped = False

    def _visible(self, tokens: Sequence[int]) -> list[int]:
        """Those of `tokens` of one part that make text."""
        visible: list[int] = []
        for token in tokens:
            if self._hole is None or not (self._stopped or token in self._padding):
                visible.append(token)
            self._stopped |= self._hole is not None and token in self._stop_ids
        special = self._tokenizer.special_ids
        self._context = [*self._context, *(token for token in visible if token not in special)][-MAX_CHAR_TOKENS:]
        return visible

    def _add(self, text: str) -> str:
        if self._hole is not None:
            self.holes[self._hole] += text
            self.stop = self.stop or self._text.stopped
        return text if self._shown else ""


def _parts(template: Template) -> list[tuple[int, int | None]]:
    """Where each part ends, and which hole it is; None for a fixed part."""
    parts: list[tuple[int, int | None]] = []
    place = 0
    for number, hole in enumerate(template.holes):
        if hole.start > place:
            parts.append((hole.start, None))
        parts.append((hole.stop, number))
        place = hole.stop
    return parts if place == len(template) else [*parts, (len(template), None)]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
