"""Answers of `/v1/messages`: Anthropic's message object, and the events of its stream."""

import json
from collections.abc import Sequence
from typing import Any

from remask.answers.answer import Scored
from remask.errors import RemaskError
from remask.server.errors import messages_error
from remask.server.generation import json_event
from remask.server.shapes import Json, usage, work
from remask.server.surfaces.single import SingleAnswer


class MessagesAnswer(SingleAnswer):
    """A message whose content is texts and calls, in the order in which the model wrote them."""

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self.content: list[Json] = []
        self._arguments = ""

    def begun(self) -> list[Json]:
        """See `SingleAnswer`."""
        counted = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
        return [{"type": "message_start", "message": self._message(None, None, counted)}]

    def text_begins(self) -> list[Json]:
        """See `SingleAnswer`."""
        return [self._starts({"type": "text", "text": ""})]

    def text_goes_on(self, text: str, scored: Sequence[Scored]) -> list[Json]:  # noqa: ARG002
        """See `SingleAnswer`. Anthropic's API has no log-probabilities."""
        self.content[-1]["text"] += text
        return [self._delta({"type": "text_delta", "text": text})] if text else []

    def text_ends(self) -> list[Json]:
        """See `SingleAnswer`."""
        return [self._block("content_block_stop")]

    def call_begins(self, name: str, call_id: str) -> list[Json]:
        """See `SingleAnswer`."""
        self._arguments = ""
        return [self._starts({"type": "tool_use", "id": call_id, "name": name, "input": {}})]

    def call_goes_on(self, arguments: str) -> list[Json]:
        """See `SingleAnswer`."""
        self._arguments += arguments
        return [self._delta({"type": "input_json_delta", "partial_json": arguments})]

    def call_ends(self) -> list[Json]:
        """See `SingleAnswer`."""
        self.content[-1]["input"] = json.loads(self._arguments)
        return [self._block("content_block_stop")]

    def ended(self) -> list[Json]:
        """See `SingleAnswer`."""
        reason, text = self._reason
        delta = {"stop_reason": reason, "stop_sequence": text}
        return [
            {"type": "message_delta", "delta": delta, "usage": self._usage(), "remask": work(self.ordered)},
            {"type": "message_stop"},
        ]

    def whole(self) -> Json:
        """See `SingleAnswer`."""
        return {**self._message(*self._reason, self._usage()), "remask": work(self.ordered)}

    @property
    def _reason(self) -> tuple[str, str | None]:
        """Why it has ended, in Anthropic's words, and the stop text that ended it."""
        if self.called:
            return "tool_use", None
        if self.result.finish_reason == "length":
            return "max_tokens", None
        text = self.answers[0].stop_text
        return ("end_turn" if text is None else "stop_sequence"), text

    def _failed(self, error: RemaskError) -> bytes:
        return json_event(messages_error(error), "error")

    def _starts(self, block: Json) -> Json:
        self.content.append(block)
        return self._block("content_block_start", content_block=dict(block))

    def _delta(self, delta: Json) -> Json:
        return self._block("content_block_delta", delta=delta)

    def _block(self, kind: str, **told: Any) -> Json:
        return {"type": kind, "index": len(self.content) - 1, **told}

    def _usage(self) -> Json:
        told = usage(self.ordered, 1)
        cached = told["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": told["prompt_tokens"] - cached,  # Anthropic counts apart what was read from a cache
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": told["completion_tokens"],
        }

    def _message(self, reason: str | None, text: str | None, counted: Json) -> Json:
        return {
            "id": f"msg_{self.names.id}",
            "type": "message",
            "role": "assistant",
            "model": self.names.model,
            "content": list(self.content),
            "stop_reason": reason,
            "stop_sequence": text,
            "usage": counted,
        }
