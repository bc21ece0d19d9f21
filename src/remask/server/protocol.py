"""Request bodies: OpenAI's fields that are understood, and ours. Any other field is refused by its name."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from remask.core.checks import LARGEST
from remask.server.neutral import refuse_unsupported

Count: TypeAlias = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
TokenIds: TypeAlias = list[int]


class Body(BaseModel):
    """JSON types as they are (no text for numbers), no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """`include_usage` adds a last chunk that holds the usage."""

    include_usage: bool = False


class CacheControl(Body):
    """Marks the end of the part of a conversation that is shared with other requests."""

    type: Literal["ephemeral"]


class TextPart(Body):
    """The only kind of content part that a language model reads."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn. With `cache_control` the shared prefix ends at the end of this message."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    cache_control: CacheControl | None = None

    @property
    def rendered(self) -> dict[str, str]:
        """The message as chat templates read it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **named}


class GenerationBody(Body):
    """What chat and text completions have in common."""

    model: str | None = None
    max_tokens: Count | None = None
    n: Count | None = None
    seed: Count | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    user: str | None = None
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = None

    steps: Count | None = None
    block_length: Count | None = None
    remasking: str | None = None
    threshold: float | None = None
    factor: float | None = None
    eps: float | None = None
    cfg_scale: float | None = None
    order: list[list[int]] | None = None
    slowfast: dict[str, Any] | None = None
    steps_per_block: Count | None = None
    fallback: str | None = None
    sub_block_length: Count | None = None
    eb_threshold: float | None = None
    sampler: str | None = None
    tokens_per_step: Count | None = None
    schedule: str | None = None
    canvas_length: Count | None = None
    initial_canvas: TokenIds | None = None
    min_tokens: Count | None = None
    correction_steps: Count | None = None
    correction_temperature: float | None = None
    correction_tokens: Count | None = None

    cache: str | None = None
    cache_config: dict[str, Any] | None = None
    prefix_length: Count | None = None
    cache_salt: str | None = None
    priority: Count | None = None
    deadline_s: float | None = None
    stream_drafts: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, body: Any) -> Any:
        return refuse_unsupported(body, cls.model_fields)

    @property
    def response_tokens(self) -> int | None:
        """How long the response may be, if the request says so."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether each token's log-probability is asked for."""
        raise NotImplementedError

    @property
    def alternatives(self) -> tuple[str, int]:
        """The field that asks for other tokens than the chosen ones, and for how many."""
        raise NotImplementedError


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None

    @property
    def response_tokens(self) -> int | None:
        """`max_completion_tokens`, or its older name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def wants_logprobs(self) -> bool:
        """As OpenAI's `logprobs` says."""
        return bool(self.logprobs)

    @property
    def alternatives(self) -> tuple[str, int]:
        """As OpenAI's `top_logprobs` says."""
        return "top_logprobs", self.top_logprobs or 0


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`. A prompt is text or token ids; a list of prompts gives a choice for each."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    logprobs: Count | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Any number asks for those of the chosen tokens."""
        return self.logprobs is not None

    @property
    def alternatives(self) -> tuple[str, int]:
        """The number is that of other tokens."""
        return "logprobs", self.logprobs or 0


class TokenizeBody(Body):
    """Body of `/tokenize`: a text, or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    add_generation_prompt: bool = True


class DetokenizeBody(Body):
    """Body of `/detokenize`."""

    model: str | None = None
    tokens: TokenIds
