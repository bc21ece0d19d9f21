"""One streamed request: the times of its text, and its cost."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from remask_lab.load.mix import HttpRequest

CONNECTION, TIMEOUT, STREAM = "connection", "timeout", "stream"
_DATA, _DONE = "data: ", "[DONE]"


@dataclass(slots=True)
class RequestOutcome:
    """The outcome of one request. Times are in seconds, and `started_s` counts from the start of the load.

    Attributes:
        status: the HTTP status. None where no response came.
        error: None for an answer; else the status, `connection`, `timeout`, or `stream` for an incomplete stream.
        ttft_s: from sending to the first text.
        gaps_s: between one chunk of text and the next. A chunk may hold many tokens.
        elapsed_s: from sending to the end of the stream.
        forwards: forward passes that the request took part in. None where the server does not report them.
        correct: whether the answer is right. None where no right answer is known.
    """

    started_s: float
    status: int | None = None
    error: str | None = None
    message: str | None = None
    text: str = ""
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    elapsed_s: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    forwards: int | None = None
    correct: bool | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first text. None below two tokens."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.elapsed_s - self.ttft_s) / (self.output_tokens - 1)


async def send(
    client: httpx.AsyncClient, request: HttpRequest, extra: Mapping[str, Any], origin: float
) -> RequestOutcome:
    """Send a request and read its stream to the end. Errors are reported in the outcome and never raised."""
    body = {**request.body, **extra, "stream": True, "stream_options": {"include_usage": True}}
    start = time.perf_counter()
    outcome = RequestOutcome(start - origin)
    try:
        async with client.stream("POST", request.path, json=body, headers=dict(request.headers)) as response:
            outcome.status = response.status_code
            if response.status_code == 200:
                await _read(response, outcome, start)
            else:
                outcome.error = str(response.status_code)
                outcome.message = (await response.aread()).decode(errors="replace")[:500]
    except httpx.TimeoutException as error:
        outcome.error, outcome.message = TIMEOUT, repr(error)
    except httpx.HTTPError as error:
        outcome.error, outcome.message = CONNECTION, repr(error)
    outcome.elapsed_s = time.perf_counter() - start
    if outcome.error is None and request.answer is not None:
        outcome.correct = request.check(outcome.text, request.answer)
    return outcome


async def send_to(base_url: str, request: HttpRequest) -> RequestOutcome:
    """Send a request to a server over a connection of its own."""
    async with httpx.AsyncClient(base_url=base_url, timeout=60) as client:
        return await send(client, request, {}, 0.0)


async def _read(response: httpx.Response, outcome: RequestOutcome, start: float) -> None:
    last, ended = start, False
    async for line in response.aiter_lines():
        if not line.startswith(_DATA):
            continue
        data = line.removeprefix(_DATA)
        if data == _DONE:
            ended = True
            continue
        try:
            chunk = json.loads(data)
        except ValueError:
            outcome.error, outcome.message = STREAM, f"an event is not JSON: {data[:200]}"
            return
        if "error" in chunk:
            outcome.error, outcome.message = STREAM, json.dumps(chunk["error"])[:500]
            return
        text = "".join(map(_text, chunk.get("choices") or ()))
        if text:
            now = time.perf_counter()
            if outcome.ttft_s is None:
                outcome.ttft_s = now - start
            else:
                outcome.gaps_s.append(now - last)
            last = now
            outcome.text += text
        if chunk.get("usage"):
            _count(chunk, outcome)
    if not ended:
        outcome.error, outcome.message = STREAM, "the stream ended without [DONE]"


def _text(choice: Mapping[str, Any]) -> str:
    return (choice.get("delta") or {}).get("content") or choice.get("text") or ""


def _count(chunk: Mapping[str, Any], outcome: RequestOutcome) -> None:
    usage = chunk["usage"]
    outcome.input_tokens = usage.get("prompt_tokens") or 0
    outcome.output_tokens = usage.get("completion_tokens") or 0
    outcome.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    outcome.forwards = (chunk.get("remask") or {}).get("forwards")
