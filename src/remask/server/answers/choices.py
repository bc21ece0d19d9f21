"""Answers of `/v1/chat/completions` and `/v1/completions`: choices, whole or in the chunks of a stream."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NotRequired, TypeAlias

from remask.answers.answer import Delta, SettledToken, trace_of
from remask.errors import RemaskError
from remask.request.trace import TokenLogprob, step_map
from remask.server.answers.base import Answer, Json, RunningUsage, ScoredToken, Usage, Work, doc
from remask.server.answers.generation import DONE, Generation, failed_stream, json_event, running_usage, usage
from remask.server.errors import Error
from remask.server.tools import join_pieces

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


class WrittenStep(Answer):
    """What one step wrote. Positions count from the first one of the response; what is empty is left out."""

    step: int
    positions: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    logprobs: NotRequired[list[float]]
    edits: NotRequired[list[int]]


class RunTrace(Answer):
    """A run of one request, with all that it depended on."""

    model: str
    cache: str
    cache_config: dict[str, Any] | None
    prompt_tokens: int
    prefix_length: int
    sampling: dict[str, Any] | None
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
    """Log-probabilities of the tokens of the text of a message; calls have none."""

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


class _AnswerHead(Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str


class ChatAnswer(_AnswerHead):
    """An answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    remask: Work
    prompt_token_ids: NotRequired[Annotated[list[int], doc("With `return_token_ids`.")]]


class CompletionAnswer(_AnswerHead):
    """An answer."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage
    remask: Work


class _Chunk(_AnswerHead):
    usage: NotRequired[Usage | RunningUsage | None]
    remask: NotRequired[Work | DraftLayout | DraftStep]


class ChatChunk(_Chunk):
    """An event. With `include_usage` the last one has the usage and the work, and no choices; with
    `continuous_usage_stats` the others have the usage so far.
    """

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_token_ids: NotRequired[list[int]]


class CompletionChunk(_Chunk):
    """An event. With `include_usage` the last one has the usage and the work, and no choices; with
    `continuous_usage_stats` the others have the usage so far.
    """

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


ChatEvent: TypeAlias = ChatChunk | Error
CompletionEvent: TypeAlias = CompletionChunk | Error


class Choices(Generation):
    """What answers of chat and text completions have in common."""

    prefix: ClassVar[str]  # of the ids of answers
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._generated = [0] * len(self.answers)  # tokens of each choice so far
        self._echo = self.body.continued if self.body.echo else ""

    @abstractmethod
    def _chunk_choice(
        self, delta: Delta, scored_tokens: Sequence[SettledToken] | None = None, finish: str | None = None
    ) -> Json:
        """Return a choice of a chunk. `finish` is why it ended; `scored_tokens` is None without log-probabilities."""

    @abstractmethod
    def _whole_choice(self, delta: Delta, scored_tokens: Sequence[SettledToken] | None, finish: str) -> Json:
        """Return a choice of an answer that is not streamed; `delta` holds all of it."""

    @abstractmethod
    def _add_prompts(self, answer: Json, prompts: list[list[int]]) -> None:
        """Put the token ids of each choice's prompt where vLLM puts them."""

    async def response(self) -> Json:
        """Return the whole answer. Raises `RemaskError` if a choice fails."""
        totals = [Delta(index, self._echo) for index in range(len(self.answers))]
        async for deltas in self._steps():
            for delta in deltas:
                total = totals[delta.index]
                total.text += delta.text
                total.scored_tokens += delta.scored_tokens
                total.calls += delta.calls
        choices = []
        for total in totals:
            scored_tokens = total.scored_tokens if self.has_logprobs else None
            choice = self._whole_choice(total, scored_tokens, self._finish_reason(total.index))
            choices.append(choice | self._extras(total.index))
        if self.body.return_token_ids:
            for choice, answer, result in zip(choices, self.answers, self.all_results, strict=True):
                indices = answer.request.response.answer_places(len(result.token_ids))
                choice["token_ids"] = [result.token_ids[index] for index in indices]
        content = self._with_prompts(self._answer(choices, self.whole_object))
        return {**content, "usage": self._usage(), "remask": self.work}

    def _first_events(self) -> list[bytes]:
        """The chunks of the prompts' token ids and of the layout of drafts, if the request asks for them."""
        chunks = []
        if self.body.return_token_ids:
            empty = [self._chunk_choice(Delta(answer.index)) for answer in self.answers]
            chunks.append(self._with_prompts(self._chunk(empty)))
        if self.body.stream_drafts:
            layout = {
                "prompts": [answer.prompt for answer in self.answers],
                "blocks": [answer.blocks for answer in self.answers],
            }
            chunks.append(self._chunk([]) | {"remask": layout})
        return [self._encode(chunk) for chunk in chunks]

    def _delta_events(self, delta: Delta) -> list[bytes]:
        """Count the tokens of `delta`. Returns a chunk if it adds anything, and another one if the choice has ended."""
        chunks = []
        self._generated[delta.index] = self.answers[delta.index].counts.generated
        has_tokens = bool(delta.scored_tokens) or (bool(delta.tokens) and bool(self.body.return_token_ids))
        if delta.text or delta.calls or has_tokens or delta.canvas is not None:
            choice = self._chunk_choice(delta, delta.scored_tokens if self.has_logprobs else None)
            if self.body.return_token_ids:
                choice["token_ids"] = delta.tokens
            draft = {} if delta.canvas is None else {"remask": {"index": delta.index, **delta.canvas}}
            chunks.append(self._chunk([choice]) | draft)
        if delta.result is not None:
            end = self._chunk_choice(Delta(delta.index), finish=self._finish_reason(delta.index))
            chunks.append(self._chunk([end | self._extras(delta.index)]))
        return [self._encode(chunk) for chunk in chunks]

    def _last_events(self) -> list[bytes]:
        if not self._include_usage:
            return [DONE]
        return [json_event(self._chunk([]) | {"usage": self._usage(), "remask": self.work}), DONE]

    def _error_event(self, error: RemaskError) -> bytes:
        return failed_stream(error)

    def _finish_reason(self, index: int) -> str:
        """Why a choice has ended, in the words of OpenAI's chat completions."""
        reason = self.results[index].finish_reason
        return self._readers[index].finish_reason(reason) if self._readers else reason

    def _extras(self, index: int) -> Json:
        """The keys of a choice that has ended which OpenAI's API does not have."""
        request = self.answers[index].request
        result = self.results[index]
        rollout: Json = {}
        if self.terms.return_step_maps:
            steps = step_map(result.trace, len(request.prompt_token_ids), len(result.token_ids))
            rollout["step_maps"] = [steps[i] for i in request.response.answer_places(len(steps))]
        if self.terms.return_trace:
            rollout["trace"] = trace_of(request, result.trace, result.usage, self.fingerprint).content
        extras: Json = {"remask": rollout} if rollout else {}
        holes = self.answers[index].holes
        return extras if holes is None else {"holes": holes, **extras}

    def _with_prompts(self, answer: Json) -> Json:
        """Add the prompts' token ids to `answer`, or to the first chunk of a stream, if the request asks for them."""
        if self.body.return_token_ids:
            self._add_prompts(answer, [list(choice.request.prompt_token_ids) for choice in self.answers])
        return answer

    @property
    def _include_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def _usage(self) -> Usage:
        return usage(self.all_results, self.body.choices)

    def _usage_so_far(self) -> RunningUsage | None:
        if self.body.stream_options is None or not self.body.stream_options.continuous_usage_stats:
            return None
        prompts = sum(answer.counts.given for answer in self.answers[:: self.body.choices])
        return running_usage(prompts, sum(self._generated))

    def _answer(self, choices: list[Json], kind: str) -> Json:
        """An answer, or a chunk of a stream, without its usage and work."""
        context = self.context
        return {
            "id": f"{self.prefix}-{context.id}",
            "object": kind,
            "created": context.created,
            "model": context.model,
            "system_fingerprint": context.fingerprint,
            "choices": choices,
        }

    def _chunk(self, choices: list[Json]) -> Json:
        return self._answer(choices, self.chunk_object)

    def _encode(self, chunk: Mapping[str, Any]) -> bytes:
        # With `include_usage` all chunks have the key `usage`, null but for the last one, or vLLM's
        # `continuous_usage_stats`.
        return json_event({**chunk, "usage": self._usage_so_far()} if self._include_usage else chunk)


class ChatChoices(Choices):
    """Answers of `/v1/chat/completions`."""

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _first_events(self) -> list[bytes]:
        role = {"role": "assistant", "content": self._echo}
        first = [self._encode(self._chunk([self._delta(answer.index, role)])) for answer in self.answers]
        return first + super()._first_events()

    def _chunk_choice(
        self, delta: Delta, scored_tokens: Sequence[SettledToken] | None = None, finish: str | None = None
    ) -> Json:
        content: Json = {"tool_calls": [call.openai_delta for call in delta.calls]} if delta.calls else {}
        if delta.text or not (delta.calls or finish):
            content["content"] = delta.text
        return self._delta(delta.index, content, None if delta.calls else scored_tokens, finish)

    def _whole_choice(self, delta: Delta, scored_tokens: Sequence[SettledToken] | None, finish: str) -> Json:
        message: Json = {"role": "assistant", "content": delta.text, "refusal": None}
        logprobs = self._logprobs(scored_tokens)
        if delta.calls:
            message["tool_calls"] = join_pieces(delta.calls)
            if not delta.text.strip():  # line breaks that formats of calls have around these say nothing
                message["content"] = None
                logprobs = None
        return {"index": delta.index, "message": message, "logprobs": logprobs, "finish_reason": finish}

    def _add_prompts(self, answer: Json, prompts: list[list[int]]) -> None:
        answer["prompt_token_ids"] = prompts[0]  # all choices have one prompt, which stands beside them

    def _delta(
        self, index: int, delta: Json, scored_tokens: Sequence[SettledToken] | None = None, finish: str | None = None
    ) -> Json:
        return {"index": index, "delta": delta, "logprobs": self._logprobs(scored_tokens), "finish_reason": finish}

    def _logprobs(self, scored_tokens: Sequence[SettledToken] | None) -> ChatLogprobs | None:
        if scored_tokens is None:
            return None
        return {"content": [self.context.logprobs_entry(token) for token in scored_tokens], "refusal": None}


class CompletionChoices(Choices):
    """Answers of `/v1/completions`."""

    prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def _chunk_choice(
        self, delta: Delta, scored_tokens: Sequence[SettledToken] | None = None, finish: str | None = None
    ) -> Json:
        logprobs = None if scored_tokens is None else self._logprobs(scored_tokens)
        return {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": finish}

    _whole_choice = _chunk_choice

    def _add_prompts(self, answer: Json, prompts: list[list[int]]) -> None:
        for choice in answer["choices"]:
            choice["prompt_token_ids"] = prompts[choice["index"]]

    def _logprobs(self, scored_tokens: Sequence[SettledToken]) -> CompletionLogprobs:
        """The log-probabilities in OpenAI's form: lists of one entry for each token."""
        tokens = [settled.token for settled in scored_tokens]
        texts_by_id = [self.context.unique_texts(settled) for settled in scored_tokens]
        has_top = any(token.top for token in tokens)
        return {
            "tokens": [texts[token.token_id] for token, texts in zip(tokens, texts_by_id, strict=True)],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": list(map(_top_logprobs, tokens, texts_by_id)) if has_top else None,
            "text_offset": [settled.offset for settled in scored_tokens],
            "steps": [token.step for token in tokens],
        }


def _top_logprobs(token: TokenLogprob, texts: Mapping[int, str]) -> dict[str, float]:
    """Log-probabilities of the most probable tokens and the chosen one by their `texts`, the highest first."""
    logprobs = {**dict(token.top), token.token_id: token.logprob}
    return {texts[token_id]: logprobs[token_id] for token_id in sorted(logprobs, key=lambda key: -logprobs[key])}
