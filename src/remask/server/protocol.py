"""Request bodies: OpenAI's fields that are supported, and the declared ones. Any other is refused by its name."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from remask.core.checks import LARGEST
from remask.core.fields import declared
from remask.core.sampling import SamplingParams
from remask.core.terms import Terms
from remask.errors import ConfigError
from remask.server.declared import Checked, given, with_declared
from remask.server.limits import MAX_ITEMS
from remask.server.neutral import refuse_unsupported

_MAX_TOKENS = declared(SamplingParams)["max_tokens"]

MAX_TOKEN_IDS = 1 << 20

# The first item that does not fit ends the check: a list may hold a million of them.
Count: TypeAlias = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
TokenIds: TypeAlias = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Texts: TypeAlias = Annotated[list[str], Field(max_length=MAX_ITEMS, fail_fast=True)]
TokenLists: TypeAlias = Annotated[list[TokenIds], Field(max_length=MAX_ITEMS, fail_fast=True)]


class Body(BaseModel):
    """A body with strict JSON types (no text for numbers), without unknown fields and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """Options of a stream. `include_usage` adds a last chunk that holds the usage."""

    include_usage: bool = False


class CacheControl(Body):
    """Marks the end of the part of a conversation that is shared with other requests."""

    type: Literal["ephemeral"]


class TextPart(Body):
    """A part of a message's content. Texts are the only kind that is supported."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn. With `cache_control` the shared prefix ends at the end of this message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_ITEMS, fail_fast=True)]
    name: str | None = None
    cache_control: CacheControl | None = None

    @property
    def chars(self) -> int:
        """Characters of its text and its name."""
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return len(self.name or "") + sum(map(len, texts))

    @property
    def rendered(self) -> dict[str, str]:
        """The message in the form that chat templates read."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


Messages: TypeAlias = Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


@with_declared(SamplingParams, Terms)
class GenerationBody(Body):
    """What chat and text completions have in common, beside the declared sampling parameters and terms."""

    model: str | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_drafts: bool | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return refuse_unsupported(body, cls.model_fields)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that the request sets, by name."""
        return given(self, SamplingParams)

    @property
    def terms(self) -> Terms:
        """The terms of the request."""
        return Terms(**given(self, Terms))

    @property
    def wants_logprobs(self) -> bool:
        """Whether the request asks for each token's log-probability."""
        raise NotImplementedError

    @property
    def alternatives(self) -> tuple[str, int]:
        """The field that asks for log-probabilities of tokens beside the chosen ones, and their number."""
        raise NotImplementedError


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int | None, Checked("max_completion_tokens", _MAX_TOKENS)] = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """The same, with the newer name of `max_tokens`. Raises `ConfigError` where the two names contradict."""
        own = super().sampling
        length = self.max_completion_tokens
        if length is not None and own.setdefault("max_tokens", length) != length:
            raise ConfigError("max_tokens and max_completion_tokens are two names of one thing; send one of them")
        return own

    @property
    def wants_logprobs(self) -> bool:
        """Whether `logprobs` is true."""
        return bool(self.logprobs)

    @property
    def alternatives(self) -> tuple[str, int]:
        """The field `top_logprobs`."""
        return "top_logprobs", self.top_logprobs or 0


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`. A prompt is text or token ids; a list of prompts gives a choice for each."""

    prompt: str | Texts | TokenIds | TokenLists
    logprobs: Count | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether `logprobs` is set: any number asks for those of the chosen tokens."""
        return self.logprobs is not None

    @property
    def alternatives(self) -> tuple[str, int]:
        """The field `logprobs`, whose number counts tokens beside the chosen ones."""
        return "logprobs", self.logprobs or 0


class TokenizeBody(Body):
    """Body of `/tokenize`, with a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True


class DetokenizeBody(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds
