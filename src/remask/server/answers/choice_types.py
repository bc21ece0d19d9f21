"""Answers of `/v1/chat/completions` and `/v1/completions`, and the chunks of their streams."""

from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from remask.server.answers.base import Answer, RunningUsage, ScoredToken, Usage, Work, doc
from remask.server.errors import Error

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class TracePart(Answer):
    """A run of prompt tokens that could be shared."""

    start: int
    length: int


class WrittenStep(Answer):
    """What one step wrote. Positions count from the first one of the response; what is empty is left out."""

    step: int
    positions: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    logprobs: NotRequired[list[float]]
    edits: NotRequired[list[int]]


class RunTrace(Answer):
    """A run, as `replay` takes it."""

    model: str
    cache: str
    cache_config: dict[str, Any] | None
    prompt_tokens: int
    prefix_length: int
    segments: list[TracePart]
    sampling: dict[str, Any] | None
    formed: bool
    events: list[WrittenStep]


class Rollout(Answer):
    """What `return_step_maps` and `return_trace` ask for."""

    step_maps: NotRequired[
        Annotated[
            list[int], doc("For each token, the step that first wrote it, counted from 1; 0 for what the request gave.")
        ]
    ]
    trace: NotRequired[RunTrace]


class PromptToken(Answer):
    """A token of a prompt."""

    token_id: int
    text: str


class DraftLayout(Answer):
    """With `stream_drafts`: what the canvases of the choices look like."""

    prompts: list[list[PromptToken]]
    blocks: Annotated[
        list[list[tuple[int, int]]], doc("Of each choice, its blocks as places of the response: from, and to before.")
    ]


class LayerRows(Answer):
    """What a pass did in a run of layers."""

    layers: tuple[int, int]
    rows: int
    reused: int
    leased: int
    restored: int
    refreshed: int


class CanvasPlace(Answer):
    """A place of the response."""

    token_id: int | None
    text: str | None
    settled: Annotated[int | None, doc("The step that wrote it; -1 of what was given, and null while it may change.")]


class DraftStep(Answer):
    """With `stream_drafts`: the canvas of a choice after a step."""

    index: int
    step: int
    passes: list[list[LayerRows]]
    canvas: list[CanvasPlace]


class CallFunction(Answer):
    """A function that the model calls. `arguments` are the text of a JSON object."""

    name: str
    arguments: str


class FunctionCall(Answer):
    """A call."""

    id: str
    type: Literal["function"]
    function: CallFunction


class CallDelta(Answer):
    """What a step adds to the function of a call."""

    name: NotRequired[str]
    arguments: str


class FunctionCallDelta(Answer):
    """What a step adds to a call."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CallDelta


class ChatLogprobs(Answer):
    """Log-probabilities of the tokens of a text."""

    content: list[ScoredToken]
    refusal: None


class AssistantMessage(Answer):
    """The answer's turn."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[FunctionCall]]


class AssistantDelta(Answer):
    """What a step adds to it."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    tool_calls: NotRequired[list[FunctionCallDelta]]


class _Choice(Answer):
    index: int
    token_ids: NotRequired[Annotated[list[int], doc("With `return_token_ids`.")]]
    holes: NotRequired[Annotated[list[str], doc("The texts of the holes of a `canvas`, once the choice has ended.")]]
    remask: NotRequired[Rollout]


class ChatChoice(_Choice):
    """A choice."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatChunkChoice(_Choice):
    """What a step adds to a choice."""

    delta: AssistantDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class CompletionLogprobs(Answer):
    """Log-probabilities of the tokens of a text, list by list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]
    steps: Annotated[list[int], doc("The steps that wrote them, counted from 0.")]


class CompletionChoice(_Choice):
    """A choice, or what a step adds to it."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    prompt_token_ids: NotRequired[Annotated[list[int], doc("With `return_token_ids`.")]]


class _Told(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatAnswer(_Told):
    """An answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    remask: Work
    prompt_token_ids: NotRequired[Annotated[list[int], doc("With `return_token_ids`.")]]


class CompletionAnswer(_Told):
    """An answer."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    remask: Work


class ChatChunk(_Told):
    """An event. With `include_usage` the last one has the usage and the work, and no choices; with
    `continuous_usage_stats` the others have the usage so far.
    """

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | RunningUsage | None]
    remask: NotRequired[Work | DraftLayout | DraftStep]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChunk(_Told):
    """An event. With `include_usage` the last one has the usage and the work, and no choices; with
    `continuous_usage_stats` the others have the usage so far.
    """

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | RunningUsage | None]
    remask: NotRequired[Work | DraftLayout | DraftStep]


ChatEvent: TypeAlias = ChatChunk | Error
CompletionEvent: TypeAlias = CompletionChunk | Error
