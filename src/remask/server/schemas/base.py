"""What the answers of several endpoints are made of, and their errors."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class Answer(BaseModel):
    """An object of an answer. It has no other keys than these."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, defer_build=True)


def left_out() -> Any:
    """Mark a key that an answer may lack. It is not null then, and the document tells no default."""
    return Field(default_factory=lambda: None)


class ErrorDetail(Answer):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field of the body that caused it, where one did."""
    code: str | None


class Error(Answer):
    """An error, in OpenAI's form. In a stream that has begun it is the last event."""

    error: ErrorDetail


class CachedTokens(Answer):
    """What was read from the prefix store."""

    cached_tokens: int


class Usage(Answer):
    """Tokens of an answer. The prompt counts once, whatever the number of choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Work(Answer):
    """The work of an answer, all of its choices together."""

    steps: int
    """Denoising steps."""
    forwards: int
    """Forward passes. Several steps may take one, with `speculate`."""
    row_layers: int
    """Rows times layers that these passes computed."""
    correction_steps: int = left_out()
    """Steps of a correction, where the request asked for one."""
    accepted: int = left_out()
    """Steps that took no pass of their own, where the request asked for `speculate`."""
    prefix_depth: int
    """Leading layers that read K/V of a shared prefix from the store."""
    prefix_tokens: int
    """Length of that prefix."""
    prefix_note: str = left_out()
    """Why no shared prefix was read, although the request named one."""


class TokenScore(Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Null where the token is a part of a character."""


class ScoredToken(TokenScore):
    """A token of the answer, and the most probable ones in its place."""

    top_logprobs: list[TokenScore]
    step: int
    """The step that wrote it, counted from 0."""
