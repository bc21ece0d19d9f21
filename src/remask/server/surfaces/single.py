"""An answer of one choice, told as a sequence of parts: texts, and calls of tools."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from remask.answers.answer import Delta, Scored
from remask.request.result import Result
from remask.server.generation import Generation, json_event
from remask.server.shapes import Json


class SingleAnswer(Generation):
    """Tells one choice part by part. The whole answer is what the events of its stream make up.

    A part begins when the one before it has ended. White space alone is told where nothing else comes.
    """

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self._part: Literal["text", "call"] | None = None
        self._parts = self._calls = 0
        self._held, self._scored = "", list[Scored]()

    @abstractmethod
    def begun(self) -> list[Json]:
        """The events before the first part."""

    @abstractmethod
    def text_begins(self) -> list[Json]:
        """The events that begin a text."""

    @abstractmethod
    def text_goes_on(self, text: str, scored: Sequence[Scored]) -> list[Json]:
        """The events that add to it."""

    @abstractmethod
    def text_ends(self) -> list[Json]:
        """The events that end it."""

    @abstractmethod
    def call_begins(self, name: str, call_id: str) -> list[Json]:
        """The events that begin a call."""

    @abstractmethod
    def call_goes_on(self, arguments: str) -> list[Json]:
        """The events that add to its arguments."""

    @abstractmethod
    def call_ends(self) -> list[Json]:
        """The events that end it."""

    @abstractmethod
    def ended(self) -> list[Json]:
        """The events behind the last part."""

    @abstractmethod
    def whole(self) -> Json:
        """The answer, once it has ended."""

    async def response(self) -> Json:
        """See `Generation`."""
        self.begun()
        async for deltas in self._steps():
            for delta in deltas:
                self._events(delta)
        return self.whole()

    @property
    def result(self) -> Result:
        """How the choice has ended."""
        return self.results[0]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of its prompt."""
        return len(self.answers[0].request.prompt_token_ids)

    @property
    def called(self) -> bool:
        """Whether it has called a tool."""
        return self._calls > 0

    def _opening(self) -> list[bytes]:
        return [self._encoded(each) for each in self.begun()]

    def _chunks(self, delta: Delta) -> list[bytes]:
        return [self._encoded(each) for each in self._events(delta)]

    def _closing(self) -> list[bytes]:
        return []

    def _encoded(self, event: Json) -> bytes:
        return json_event(event, event["type"])

    def _events(self, delta: Delta) -> list[Json]:
        self._held += delta.text
        self._scored += delta.scored
        told = self._told_text() if self._part == "text" or self._held.strip() else []
        for piece in delta.calls:
            self._held = ""
            if piece.id is not None:
                told += self._end_part()
                self._part, self._parts, self._calls = "call", self._parts + 1, self._calls + 1
                told += self.call_begins(str(piece.name), piece.id)
            if piece.arguments:
                told += self.call_goes_on(piece.arguments)
        if delta.result is not None:
            told += (self._told_text() if not self._parts else []) + self._end_part() + self.ended()
        return told

    def _told_text(self) -> list[Json]:
        told: list[Json] = []
        if self._part != "text":
            told += self._end_part()
            self._part, self._parts = "text", self._parts + 1
            told += self.text_begins()
        if self._held or self._scored:
            told += self.text_goes_on(self._held, self._scored)
        self._held, self._scored = "", []
        return told

    def _end_part(self) -> list[Json]:
        part, self._part = self._part, None
        return [] if part is None else self.text_ends() if part == "text" else self.call_ends()
