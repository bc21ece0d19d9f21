"""Turns settled tokens into text, piece by piece. Text that has been returned never changes."""

from collections.abc import Sequence

from remask.plan.canvas import Template
from remask.request.sampling_params import SamplingParams
from remask.text.incremental import MAX_CHAR_TOKENS, IncrementalDecoder
from remask.text.tokenizer import Tokenizer


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """The start and end of the stop in `text` that ends first, the longest of those that end there; None without one.

    It is the stop that a character at a time would complete first, so it does not depend on the pieces of the text.
    """
    ends = ((start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0)
    end, start = min(ends, default=(0, -1))
    return None if start < 0 else (start, end)


class Detokenizer:
    """Turns tokens into text as they settle, left to right. The joined pieces equal the text of all tokens.

    Text is held back while it may change: a character whose bytes span tokens until it is complete, and what may become
    one of `stops`. The text ends before the stop text that is complete first, or after it with `include_stop`. Of stop
    texts that end at one place the longest counts. `context` holds the tokens before the first one.

    Attributes:
        length: number of characters of the text so far, held ones included.
        stop: the stop text that ended the text; None without one so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), include_stop: bool = False, context: Sequence[int] = ()
    ) -> None:
        self.length = 0
        self.stop: str | None = None
        self._special_ids = tokenizer.special_ids
        self._decoder = IncrementalDecoder(tokenizer.decode, context)
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""  # the end of the text, which may become a stop text

    def push(self, tokens: Sequence[int]) -> str:
        """Append `tokens`. Returns the text that is final with them."""
        # `decode` omits special tokens. Many of them within a character would count as bytes that never make one.
        ordinary = [token for token in tokens if token not in self._special_ids]
        self._append(self._decoder.push(ordinary))
        if self.stop is not None:
            return self._take(0)
        return self._take(max((_overlap(self._held, stop) for stop in self._stops), default=0))

    def finish(self) -> str:
        """Return the text that was held back. There must be no more tokens."""
        self._append(self._decoder.finish())
        return self._take(0)

    def _append(self, piece: str) -> None:
        """Append a decoded piece to the held text. If a stop is complete, sets `stop` and ends the text there."""
        if self.stop is not None:
            return
        self.length += len(piece)
        self._held += piece
        span = _first_stop(self._held, self._stops)
        if span is not None:
            start, end = span
            self.stop = self._held[start:end]
            text_end = end if self._include_stop else start
            self.length -= len(self._held) - text_end
            self._held = self._held[:text_end]

    def _take(self, held_chars: int) -> str:
        """Return the held text but for its last `held_chars` characters, which remain held."""
        text_end = len(self._held) - held_chars
        text, self._held = self._held[:text_end], self._held[text_end:]
        return text


class ResponseText:
    """Turns the tokens of a response into text as they settle, left to right, by its template.

    The text has no padding, and of a hole nothing after a stop. Every part begins with a new character. `context`
    holds the tokens before the response, if its text continues theirs.

    Attributes:
        holes: the text of each hole so far.
        stop: the first stop text that ended a hole; None without one so far.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: Template, params: SamplingParams, context: Sequence[int] = ()
    ) -> None:
        self.holes = [""] * len(template.holes)
        self.stop: str | None = None
        self._tokenizer = tokenizer
        self._template = template
        self._params = params
        self._stop_ids = frozenset(params.stop_token_ids)
        self._parts = _parts(template)
        self._part_index = 0  # of the part that receives tokens
        self._place = 0  # place of the next token in the response
        self._ended_length = 0  # characters of the parts that have ended
        self._context = list(context)
        self._begin_part()

    @property
    def length(self) -> int:
        """Number of characters of the answer so far, held ones included."""
        return self._ended_length + (self._text.length if self._is_shown else 0)

    @property
    def last_token(self) -> int | None:
        """The last token that made text, or that of the context before the first one; None without either."""
        return self._context[-1] if self._context else None

    def push(self, tokens: Sequence[int]) -> str:
        """Append `tokens`, of which the template must have places left. Returns the text that is final with them."""
        text = ""
        remaining = list(tokens)
        while remaining:
            part_end, _ = self._parts[self._part_index]
            part_tokens = remaining[: part_end - self._place]
            remaining = remaining[len(part_tokens) :]
            self._place += len(part_tokens)
            text += self._add_text(self._text.push(self._take_visible(part_tokens)))
            if self._place == part_end:
                text += self.finish()
                self._ended_length = self.length
                self._part_index += 1
                self._begin_part()
        return text

    def finish(self) -> str:
        """Return the text of the answer that was held back. The current part must have no more tokens."""
        return self._add_text(self._text.finish())

    def _begin_part(self) -> None:
        """Begin the part at `_part_index`; after the last one an empty fixed part."""
        parts = self._parts[self._part_index :]
        self._hole = parts[0][1] if parts else None  # index of the part's hole
        in_hole = self._hole is not None
        stops = self._params.stop if in_hole else ()
        self._text = Detokenizer(self._tokenizer, stops, self._params.include_stop_str_in_output, self._context)
        self._is_shown = in_hole or not self._template.fill_only
        self._has_stop_token = False

    def _take_visible(self, tokens: Sequence[int]) -> list[int]:
        """Note stop tokens, and return those `tokens` of the current part that make text, which extend the context."""
        in_hole = self._hole is not None
        visible: list[int] = []
        for token in tokens:
            if not in_hole or not (self._has_stop_token or token in self._template.padding):
                visible.append(token)
            self._has_stop_token |= in_hole and token in self._stop_ids
        special = self._tokenizer.special_ids
        self._context = [*self._context, *(token for token in visible if token not in special)][-MAX_CHAR_TOKENS:]
        return visible

    def _add_text(self, text: str) -> str:
        """Add text of the current part to its hole. Returns it if the answer shows the part, else nothing."""
        if self._hole is not None:
            self.holes[self._hole] += text
            self.stop = self.stop or self._text.stop
        return text if self._is_shown else ""


def _parts(template: Template) -> list[tuple[int, int | None]]:
    """The parts of a template: the place after the part, and the index of its hole, None of a fixed part."""
    parts: list[tuple[int, int | None]] = []
    end = 0
    for index, hole in enumerate(template.holes):
        if hole.start > end:
            parts.append((hole.start, None))
        parts.append((hole.stop, index))
        end = hole.stop
    return parts if end == len(template) else [*parts, (len(template), None)]


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a proper prefix of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
