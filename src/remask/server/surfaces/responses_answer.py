"""Answers of `/v1/responses`: OpenAI's response object, and the events of its stream."""

import time
from collections.abc import Sequence
from typing import Any

from remask.answers.answer import Scored
from remask.errors import RemaskError
from remask.server.errors import error_object
from remask.server.shapes import Json, scored_token, usage, work
from remask.server.surfaces.responses_body import NamedFunction, ResponsesBody
from remask.server.surfaces.single import SingleAnswer


class ResponsesAnswer(SingleAnswer):
    """A response whose output is messages and calls, in the order in which the model wrote them.

    The other arguments are those of `Generation`.
    """

    def __init__(self, *told: Any, asked: ResponsesBody) -> None:
        super().__init__(*told)
        self.asked = asked
        self.output: list[Json] = []
        self._number = 0

    def begun(self) -> list[Json]:
        """See `SingleAnswer`."""
        return [
            {"type": f"response.{name}", "response": self._response("in_progress")}
            for name in ("created", "in_progress")
        ]

    def text_begins(self) -> list[Json]:
        """See `SingleAnswer`."""
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item: Json = {"id": self._item_id("msg"), "type": "message", "status": "in_progress", "role": "assistant"}
        added = self._added({**item, "content": []})
        self.output[-1]["content"] = [part]
        return [added, self._of_part("response.content_part.added", part=dict(part))]

    def text_goes_on(self, text: str, scored: Sequence[Scored]) -> list[Json]:
        """See `SingleAnswer`."""
        part = self.output[-1]["content"][0]
        wanted = self.terms.top_logprobs is not None
        logprobs = [scored_token(each, self.names.token_text) for each in scored] if wanted else []
        part["text"] += text
        part["logprobs"] += logprobs
        return [self._of_part("response.output_text.delta", delta=text, logprobs=logprobs)]

    def text_ends(self) -> list[Json]:
        """See `SingleAnswer`."""
        part = self.output[-1]["content"][0]
        return [
            self._of_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"]),
            self._of_part("response.content_part.done", part=part),
            self._done(),
        ]

    def call_begins(self, name: str, call_id: str) -> list[Json]:
        """See `SingleAnswer`."""
        item: Json = {"id": self._item_id("fc"), "type": "function_call", "status": "in_progress"}
        return [self._added({**item, "call_id": call_id, "name": name, "arguments": ""})]

    def call_goes_on(self, arguments: str) -> list[Json]:
        """See `SingleAnswer`."""
        self.output[-1]["arguments"] += arguments
        return [self._of_item("response.function_call_arguments.delta", delta=arguments)]

    def call_ends(self) -> list[Json]:
        """See `SingleAnswer`."""
        call = self.output[-1]
        told = {"arguments": call["arguments"], "name": call["name"]}
        return [self._of_item("response.function_call_arguments.done", **told), self._done()]

    def ended(self) -> list[Json]:
        """See `SingleAnswer`."""
        whole = self.whole()
        return [{"type": f"response.{whole['status']}", "response": whole}]

    def whole(self) -> Json:
        """See `SingleAnswer`."""
        response = self._response("incomplete" if self._cut else "completed")
        if self._cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        return {**response, "usage": self._usage(), "remask": work(self.ordered)}

    @property
    def _cut(self) -> bool:
        """Whether the length ended it, and no call did."""
        return self.result.finish_reason == "length" and not self.called

    def _encoded(self, event: Json) -> bytes:
        self._number += 1
        return super()._encoded({**event, "sequence_number": self._number - 1})

    def _failed(self, error: RemaskError) -> bytes:
        told = error_object(error)["error"]
        flat = {"code": told["code"] or told["type"], "message": told["message"], "param": told["param"]}
        # The official client raises what it finds under `error`, and would pass on anything else as an event.
        return self._encoded({"type": "error", **flat, "error": told})

    def _item_id(self, kind: str) -> str:
        return f"{kind}_{self.names.id}-{len(self.output)}"

    def _added(self, item: Json) -> Json:
        self.output.append(item)
        return {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": dict(item)}

    def _done(self) -> Json:
        item = self.output[-1]
        item["status"] = "completed"
        return {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": item}

    def _of_item(self, kind: str, **told: Any) -> Json:
        return {"type": kind, "item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, **told}

    def _of_part(self, kind: str, **told: Any) -> Json:
        return self._of_item(kind, content_index=0, **told)

    def _usage(self) -> Json:
        told = usage(self.ordered, 1)
        cached = told["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": told["total_tokens"],
        }

    def _response(self, status: str) -> Json:
        """The response object, in which what the request left open says what holds."""
        asked, params = self.asked, self.answers[0].request.params
        form = None if asked.text is None else asked.text.format
        choice = asked.tool_choice
        tools = [{"strict": True, "parameters": None, **tool.model_dump()} for tool in asked.tools or ()]
        return {
            "id": f"resp_{self.names.id}",
            "object": "response",
            "created_at": self.names.created,
            "completed_at": None if status == "in_progress" else int(time.time()),
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": params.max_tokens,
            "max_tool_calls": None,
            "model": self.names.model,
            "output": list(self.output),
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedFunction) else choice or "auto",
            "tools": tools,
            "top_logprobs": self.terms.top_logprobs or 0,
            "top_p": 1.0 if params.top_p is None else params.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": asked.user,
            "metadata": {},
        }
