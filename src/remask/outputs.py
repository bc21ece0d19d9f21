"""The outputs of requests: the response as tokens and text, and how it ended."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from remask.answers.decided import Decision
from remask.engine.request import Request
from remask.readers.logprobs import Logprobs
from remask.request.result import FinishReason, Result, Transfer, Usage
from remask.request.trace import TokenLogprob, token_logprobs
from remask.text.detokenize import ResponseText
from remask.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Output:
    """The response to one prompt."""

    id: str
    token_ids: tuple[int, ...]  # of the answer, padding of holes included
    text: str | None  # of the answer, without padding; None without a tokenizer
    finish_reason: FinishReason
    usage: Usage
    trace: tuple[Transfer, ...] | None  # None if not requested
    first_settled_s: float | None  # see `Result`
    elapsed_s: float  # see `Result`
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None  # None if not requested
    holes: tuple[str, ...] | None = None  # the texts of a canvas' holes; None without a canvas
    reads: Mapping[str, Any] = field(default_factory=dict)  # results of its readers; see `Result`

    @classmethod
    def of(cls, request: Request, result: Result, tokenizer: Tokenizer | None, *, trace: bool) -> "Output":
        """Return the output of a `request` that has ended. If its tokens cannot be decoded, it has an error."""
        text = None
        holes = None
        error = result.error
        template = request.response
        if tokenizer is not None:
            try:
                response = ResponseText(tokenizer, template, request.params, request.context)
                text = response.push(result.token_ids) + response.finish()
                holes = None if request.template is None else tuple(response.holes)
            # Tokenizers of checkpoints may raise anything, which must not lose the outputs of other requests.
            except Exception as failure:
                log.error("request %s: its tokens could not be decoded: %s", result.id, failure, exc_info=True)
                error = f"its tokens could not be decoded: {failure}"
        return cls(
            id=result.id,
            token_ids=tuple(result.token_ids[place] for place in template.answer_places(len(result.token_ids))),
            text=text,
            finish_reason=result.finish_reason,
            usage=result.usage,
            trace=result.trace if trace else None,
            first_settled_s=result.first_settled_s,
            elapsed_s=result.elapsed_s,
            error=error,
            reads=result.reads,
            logprobs=None
            if request.reader(Logprobs) is None
            else token_logprobs(result.trace, len(request.prompt_token_ids), len(result.token_ids)),
            holes=holes,
        )


@dataclass(frozen=True, slots=True)
class StreamedOutput:
    """What a step added to an answer: the text `delta` and its tokens. The last one has the whole `output`."""

    delta: str
    token_ids: tuple[int, ...] = ()
    output: Output | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """Decisions by the ids of their questions, and the work of all questions together."""

    answers: Mapping[str, Decision]
    usage: Usage
