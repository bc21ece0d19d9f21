"""OpenAI's response objects, key by key."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from remask.answers.answer import Delta, Scored
from remask.request.result import Result
from remask.request.trace import TokenLogprob
from remask.server.tools import CallPiece, whole_calls

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Names:
    """What all objects of one answer repeat."""

    id: str
    created: int
    model: str
    fingerprint: str
    token_text: Callable[[int], str]


class ChatShape:
    """Objects of `/v1/chat/completions`."""

    def __init__(self, names: Names) -> None:
        self.names = names

    def opening(self, index: int) -> Json:
        """The choice that a stream begins with: the role, and no text."""
        return _streamed(index, {"delta": {"role": "assistant", "content": ""}})

    def part(self, delta: Delta, logprobs: bool) -> Json:
        """A choice that carries settled text."""
        said: Json = {"tool_calls": [call.streamed for call in delta.calls]} if delta.calls else {}
        if delta.text or not delta.calls:
            said["content"] = delta.text
        return _streamed(delta.index, {"delta": said}, self._logprobs(delta.scored, logprobs))

    def end(self, index: int, finish: str) -> Json:
        """The choice that says why it ended."""
        return _streamed(index, {"delta": {}}, finish=finish)

    def whole(
        self,
        index: int,
        text: str,
        scored: Sequence[Scored],
        finish: str,
        logprobs: bool,
        calls: Sequence[CallPiece] = (),
    ) -> Json:
        """A choice that is not streamed."""
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": (text.strip() and text) or None, "tool_calls": whole_calls(calls)}
        scores = self._logprobs(scored, logprobs)
        return {"index": index, "message": message, "logprobs": scores, "finish_reason": finish}

    def chunk(self, choices: list[Json]) -> Json:
        """A chunk of a stream."""
        return self._object("chat.completion.chunk", choices)

    def response(self, choices: list[Json]) -> Json:
        """An answer that is not streamed."""
        return self._object("chat.completion", choices)

    def add_prompts(self, answer: Json, prompts: list[list[int]]) -> None:
        """All choices have one prompt, which stands beside them."""
        answer["prompt_token_ids"] = prompts[0]

    def _object(self, kind: str, choices: list[Json]) -> Json:
        names = self.names
        return {
            "id": f"chatcmpl-{names.id}",
            "object": kind,
            "created": names.created,
            "model": names.model,
            "system_fingerprint": names.fingerprint,
            "choices": choices,
        }

    def _logprobs(self, scored: Sequence[Scored], wanted: bool) -> Json | None:
        if not wanted:
            return None
        return {"content": [scored_token(item, self.names.token_text) for item in scored], "refusal": None}


class CompletionShape:
    """Objects of `/v1/completions`."""

    def __init__(self, names: Names) -> None:
        self.names = names

    def opening(self, index: int) -> Json | None:  # noqa: ARG002
        """Text completions begin with their text."""
        return None

    def part(self, delta: Delta, logprobs: bool) -> Json:
        """A choice that carries settled text."""
        return self._choice(delta.index, delta.text, delta.scored, logprobs, None)

    def end(self, index: int, finish: str) -> Json:
        """The choice that says why it ended."""
        return self._choice(index, "", (), False, finish)

    def whole(
        self,
        index: int,
        text: str,
        scored: Sequence[Scored],
        finish: str,
        logprobs: bool,
        calls: Sequence[CallPiece] = (),  # noqa: ARG002 - completions call no tools
    ) -> Json:
        """A choice that is not streamed."""
        return self._choice(index, text, scored, logprobs, finish)

    def chunk(self, choices: list[Json]) -> Json:
        """A chunk of a stream, which has the shape of a response."""
        return self.response(choices)

    def response(self, choices: list[Json]) -> Json:
        """An answer that is not streamed."""
        names = self.names
        return {
            "id": f"cmpl-{names.id}",
            "object": "text_completion",
            "created": names.created,
            "model": names.model,
            "system_fingerprint": names.fingerprint,
            "choices": choices,
        }

    def add_prompts(self, answer: Json, prompts: list[list[int]]) -> None:
        """Each choice carries its own prompt."""
        for choice in answer["choices"]:
            choice["prompt_token_ids"] = prompts[choice["index"]]

    def _choice(self, index: int, text: str, scored: Sequence[Scored], wanted: bool, finish: str | None) -> Json:
        scores = self._logprobs(scored) if wanted else None
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": finish}

    def _logprobs(self, scored: Sequence[Scored]) -> Json:
        reads = [item.read for item in scored]
        return {
            "tokens": [self.names.token_text(read.token_id) for read in reads],
            "token_logprobs": [read.logprob for read in reads],
            "top_logprobs": [self._top(read) for read in reads] if any(read.top for read in reads) else None,
            "text_offset": [item.offset for item in scored],
            "steps": [read.step for read in reads],
        }

    def _top(self, read: TokenLogprob) -> Json:
        """The most probable tokens, and the chosen one; of tokens with one text the most probable."""
        found: Json = {}
        for token, logprob in sorted({*read.top, (read.token_id, read.logprob)}, key=lambda pair: -pair[1]):
            found.setdefault(self.names.token_text(token), logprob)
        return found


def scored_token(item: Scored, token_text: Callable[[int], str]) -> Json:
    """A token with its log-probability, and those of the most probable ones, as chats and responses tell them."""
    top = [_read(token, logprob, token_text) for token, logprob in item.read.top]
    return _read(item.read.token_id, item.read.logprob, token_text) | {"top_logprobs": top, "step": item.read.step}


def _read(token: int, logprob: float, token_text: Callable[[int], str]) -> Json:
    text = token_text(token)
    # The text does not show which bytes an incomplete character has.
    encoded = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": encoded}


def usage(results: Sequence[Result], choices: int) -> Json:
    """OpenAI's usage of one answer; `results` are in order, `choices` of them to a prompt, which counts once."""
    prompts = results[::choices]
    prompt = sum(result.usage.prompt_tokens for result in prompts)
    completion = sum(result.usage.completion_tokens for result in results)
    cached = sum(result.usage.cached_tokens for result in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def work(results: Sequence[Result]) -> Json:
    """The work of an answer, for which OpenAI's API has no fields."""
    fields: Json = {
        name: sum(getattr(result.usage, name) for result in results) for name in ("steps", "forwards", "row_layers")
    }
    for name in ("correction_steps", "accepted"):
        counts = [count for result in results if (count := getattr(result.usage, name)) is not None]
        if counts:
            fields[name] = sum(counts)
    for name in ("prefix_depth", "prefix_tokens"):
        fields[name] = max(getattr(result.usage, name) for result in results)
    notes = dict.fromkeys(r.usage.prefix_note for r in results if r.usage.prefix_note is not None)
    if notes:
        fields["prefix_note"] = "; ".join(notes)
    return fields


def _streamed(index: int, fields: Json, logprobs: Json | None = None, finish: str | None = None) -> Json:
    return {"index": index, **fields, "logprobs": logprobs, "finish_reason": finish}
