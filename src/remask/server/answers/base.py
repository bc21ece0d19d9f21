"""Objects that the answers of several endpoints are made of."""

from typing import Annotated, Any, NotRequired, TypeAlias

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

Json: TypeAlias = dict[str, Any]


def doc(text: str) -> Any:
    """What the OpenAPI document says of a key."""
    return Field(description=text)


class Answer(TypedDict):
    """An object of an answer, which is a plain dictionary. It has no other keys than these."""


Answer.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined] # also of subclasses


class RunningUsage(Answer):
    """Tokens of an answer so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CachedTokens(Answer):
    """What was read from the prefix store."""

    cached_tokens: int


class Usage(RunningUsage):
    """Tokens of an answer. The prompt counts once, whatever the number of choices."""

    prompt_tokens_details: CachedTokens


class Work(Answer):
    """The work of an answer, all of its choices together."""

    steps: Annotated[int, doc("Denoising steps.")]
    forwards: Annotated[int, doc("Forward passes.")]
    row_layers: Annotated[int, doc("Rows times layers that these passes computed.")]
    prefix_row_layers: Annotated[int, doc("Rows times layers of the passes over a shared prefix that was not stored.")]
    correction_steps: NotRequired[Annotated[int, doc("Steps of a correction, where the request asked for one.")]]
    prefix_depth: Annotated[int, doc("Leading layers that read K/V of a shared prefix from the store.")]
    prefix_tokens: Annotated[int, doc("Length of that prefix.")]
    prefix_note: NotRequired[Annotated[str, doc("Why no shared prefix was read.")]]
    left_out: NotRequired[
        Annotated[list[str], doc("Types of tools and of their calls that were left out, as another server runs them.")]
    ]
    approximation: NotRequired[
        Annotated[str, doc("The cache policy that ran, where what it keeps may make other tokens than `none` would.")]
    ]


class TokenScore(Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: Annotated[
        list[int] | None,
        doc(
            "What the token adds to the text behind the one before it, which may be a part of a character; null where "
            "the tokenizer does not tell it."
        ),
    ]


class ScoredToken(TokenScore):
    """A token of the answer, and the most probable ones in its place."""

    top_logprobs: list[TokenScore]
    step: Annotated[int, doc("The step that wrote it, counted from 0.")]
