"""One choice of an answer: turns the engine's events of its request into settled text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from remask.engine.request import Request
from remask.plan.canvas import OPEN
from remask.policies.registry import name_of, settings_of
from remask.request.result import Draft, Event, Result, Transfer, Usage
from remask.request.trace import TokenLogprob, Trace, iterate_tokens, trace_events
from remask.text.detokenize import ResponseText
from remask.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SettledToken:
    """A settled token with its log-probability in the step that wrote it.

    Attributes:
        offset: where its text begins in the answer, in characters.
        end: where it ends; the same where the token adds no text, or the beginning of a character.
        predecessor: the token before it in the same text, or None if a text begins with it.
    """

    token: TokenLogprob
    offset: int
    end: int
    predecessor: int | None


@dataclass(slots=True)
class Delta:
    """What one engine step added to a choice. `canvas` is None unless the request asked for drafts.

    `scored_tokens` are the tokens of `text`, if the request asked for log-probabilities, and `calls` the pieces of
    calls of tools that were read from the text.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scored_tokens: list[SettledToken] = field(default_factory=list)
    canvas: dict[str, Any] | None = None
    result: Result | None = None
    calls: list[Any] = field(default_factory=list)


class TokenCounts(NamedTuple):
    """Tokens of a request: those that it gives, in prompt and response, and those that were generated."""

    given: int
    generated: int


class ResponseCollector:
    """Collects the response of one request, left to right. Text that it has returned never changes.

    Args:
        index: number of the choice in the answer.
        stop_ids: the model's own end tokens.
        token_text: returns the text of a token id; None if the request did not ask for drafts.
        blocks: canvas positions of each block, for drafts; the last one may reach beyond the response.
        rewrites: tokens may change after they were written, as those of uniform models until their block, or its
            correction, is done.
        with_logprobs: report each token with its log-probability. The request must have asked for them.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        *,
        token_text: Callable[[int], str] | None = None,
        blocks: Sequence[range] = (),
        rewrites: bool = False,
        with_logprobs: bool = False,
    ) -> None:
        params = request.params
        self.index = index
        self.request = request
        self._response = request.response  # also of requests without a template, unlike `request.template`
        self._prompt_length = len(request.prompt_token_ids)
        # The tokens of the response. Until a token is written, its latest draft, or None before the first one.
        self._tokens: list[int | None] = [None if token == OPEN else token for token in self._response.tokens]
        # The step that wrote each token: -1 for a token of the request, None for one that is not written yet.
        self._steps: list[int | None] = [None if token == OPEN else -1 for token in self._response.tokens]
        self._logprobs: list[TokenLogprob | None] = [None] * params.max_tokens
        self._final: list[int] = []  # the leading tokens that are final
        self._text_tokens = 0  # how many of `_final` are in the text
        self._rewrites = rewrites
        self._with_logprobs = with_logprobs
        self._stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self._stop_ids |= frozenset(stop_ids)
        self._has_stopped = False
        self._text = ResponseText(tokenizer, self._response, params, request.context)
        self._token_text = token_text
        self._blocks = blocks

    @property
    def holes(self) -> list[str] | None:
        """The text of each hole so far. None unless the request has a template that the answer shows as a whole."""
        template = self.request.template
        return None if template is None or template.fill_only else self._text.holes

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended the response, or None."""
        return self._text.stop

    @property
    def counts(self) -> TokenCounts:
        """The tokens so far, as `Usage` counts them."""
        response = self._response
        given_tokens = self._prompt_length + len(response) - response.open_places
        return TokenCounts(given_tokens, response.tokens[: self._text_tokens].count(OPEN))

    @property
    def prompt(self) -> list[Mapping[str, Any]]:
        """The prompt's tokens with their texts, for drafts."""
        assert self._token_text is not None
        return [{"token_id": token, "text": self._token_text(token)} for token in self.request.prompt_token_ids]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The blocks as ranges `(start, stop)` of the response, in order and without gaps.

        Fixed tokens between, before or after the blocks are a range of their own.
        """
        length = len(self._tokens)
        blocks: list[tuple[int, int]] = []
        end = 0
        for block in self._blocks:
            start = max(0, block.start - self._prompt_length)  # the first block may begin within the prompt
            stop = min(length, block.stop - self._prompt_length)
            if start >= length:
                break
            if start > end:
                blocks.append((end, start))
            blocks.append((start, stop))
            end = stop
        if end < length:
            blocks.append((end, length))
        return blocks

    def apply(self, events: Sequence[Event]) -> Delta:
        """Apply the events of one step. Returns what they add to the answer."""
        delta = Delta(self.index)
        for event in events:
            if event.draft is not None:
                self._write_draft(event.draft)
                if self._token_text is not None:
                    delta.canvas = {"step": event.draft.step, "passes": _passes(event.draft)}
            if event.transfer is not None:
                self._write_transfer(event.transfer)
            self._settle(event)
            if event.result is not None:
                delta.result = event.result
        self._extend_text(delta)
        if delta.canvas is not None:
            delta.canvas["canvas"] = self._canvas()
        return delta

    def _write_draft(self, draft: Draft) -> None:
        """Write predicted tokens. The last block may reach beyond the response; its tokens there are ignored."""
        for position, token_id in zip(draft.positions, draft.token_ids, strict=True):
            index = position - self._prompt_length
            if index < len(self._tokens):
                self._tokens[index] = token_id

    def _write_transfer(self, transfer: Transfer) -> None:
        """Write the tokens of a step, with the step and their log-probabilities; not beyond the response."""
        for index, token in iterate_tokens(transfer, self._prompt_length):
            if index < len(self._tokens):
                self._tokens[index] = token.token_id
                self._steps[index] = token.step
                self._logprobs[index] = token

    def _settle(self, event: Event) -> None:
        """Append the tokens that settled in a step to the final ones."""
        start = len(self._final)
        end = start + len(event.settled)
        self._tokens[start:end] = event.settled  # a draft may differ from the token that settled
        self._final += event.settled
        if event.draft is not None:
            for index in range(start, min(end, len(self._steps))):
                if self._steps[index] is None:  # a noise token that no step rewrote became final with its block
                    self._steps[index] = event.draft.step

    def _extend_text(self, delta: Delta) -> None:
        """Move the leading settled tokens into the text, up to the first token that ends the response."""
        result = delta.result
        start = self._text_tokens
        end = len(self._final)
        if result is not None:
            # A stop text may end the response before tokens that settled in the same step.
            end = max(start, min(end, len(result.token_ids)))
        new_tokens = [] if self._has_stopped else self._final[start:end]
        first_stop = max(0, self._response.tail - start)  # stop tokens before fixed ones do not end the response
        for index in range(first_stop, len(new_tokens)):
            if new_tokens[index] in self._stop_ids:
                self._has_stopped = True
                del new_tokens[index + 1 :]
                break
        if self._with_logprobs:
            for index, token in enumerate(new_tokens, start):
                self._push_scored(delta, index, token)
        else:
            delta.text += self._text.push(new_tokens)
        self._text_tokens += len(new_tokens)
        delta.tokens += [new_tokens[index - start] for index in self._response.answer_places(self._text_tokens, start)]
        if result is not None and result.finish_reason in ("stop", "length"):
            delta.text += self._text.finish()

    def _push_scored(self, delta: Delta, index: int, token: int) -> None:
        """Move the token at `index` of the response into the text, with its log-probability if a step wrote it."""
        offset = self._text.length
        predecessor = self._text.last_token
        delta.text += self._text.push([token])
        if (logprob := self._logprobs[index]) is not None:
            delta.scored_tokens.append(SettledToken(logprob, offset, self._text.length, predecessor))

    def _canvas(self) -> list[Mapping[str, Any]]:
        """The token of each position of the response, and the step that wrote it, None while it may change."""
        assert self._token_text is not None
        return [
            {
                "token_id": token,
                "text": None if token is None else self._token_text(token),
                "settled": None if self._rewrites and index >= len(self._final) else self._steps[index],
            }
            for index, token in enumerate(self._tokens)
        ]


def _passes(draft: Draft) -> list[list[Mapping[str, Any]]]:
    """The work of each pass of a step, run of layers by run, in the form of `stream_drafts`."""
    return [
        [{**asdict(work), "layers": [work.layers.start, work.layers.stop]} for work in layers]
        for layers in draft.passes
    ]


def trace_of(request: Request, transfers: Sequence[Transfer], usage: Usage, fingerprint: str) -> Trace:
    """Return the trace of a run of `request` that wrote `transfers`, on the model with this `fingerprint`.

    The prefix length is that of the prefix that was read (`usage`), or of the request if none was. The sampling
    parameters include the seed that `engine.request.request_of` has drawn.
    """
    return Trace(
        model=fingerprint,
        cache=name_of(request.policy),
        cache_config=settings_of(request.policy),
        prompt_tokens=len(request.prompt_token_ids),
        prefix_length=usage.prefix_tokens or request.prefix_length,
        sampling=request.params.non_defaults(),
        events=trace_events(transfers, len(request.prompt_token_ids)),
    )
