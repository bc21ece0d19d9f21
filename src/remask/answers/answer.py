"""One choice of an answer: the engine's events of its request become settled text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from remask.engine.request import Request
from remask.plan.canvas import OPEN
from remask.policies.registry import name_of, settings_of
from remask.request.result import Draft, Event, Result, Transfer, Usage
from remask.request.trace import TokenLogprob, Trace, iterate_tokens, trace_events
from remask.text.detokenize import ResponseText
from remask.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Scored:
    """A settled token with its log-probability in the step that wrote it, and where its text begins in the answer.

    `before` is the token that its text goes on from, None at the beginning of a text.
    """

    read: TokenLogprob
    offset: int
    before: int | None


@dataclass(slots=True)
class Delta:
    """What one engine step added to a choice. `canvas` is None unless the request asked for drafts.

    `calls` are pieces of calls of tools, where somebody reads such from the text.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    canvas: dict[str, Any] | None = None
    result: Result | None = None
    calls: list[Any] = field(default_factory=list)


class ResponseCollector:
    """Collects the response of one request, left to right. Text that it has returned never changes.

    Args:
        index: number of the choice in the answer.
        stop_ids: the model's own end tokens.
        token_text: returns the text of a token id, for drafts; None if the request did not ask for drafts.
        blocks: canvas positions of each block, for drafts; the last one may reach beyond the response.
        rewrites: tokens may change after they were written. Uniform models do this until a block, or its correction,
            is done.
        scored: report each token with its log-probability, for which the request must have asked.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        token_text: Callable[[int], str] | None = None,
        blocks: Sequence[range] = (),
        *,
        rewrites: bool = False,
        scored: bool = False,
    ) -> None:
        params, template = request.params, request.response
        self.index, self.request = index, request
        self._prompt = len(request.prompt_token_ids)
        # The tokens, drafts until they are written.
        self._tokens: list[int | None] = [None if token == OPEN else token for token in template.tokens]
        # The step that wrote each token: none yet, or -1 for what was given.
        self._steps: list[int | None] = [None if token == OPEN else -1 for token in template.tokens]
        self._logprobs: list[TokenLogprob | None] = [None] * params.max_tokens
        self._final: list[int] = []  # the leading tokens that are final
        self._lead = 0  # how many of `_final` are in the text
        self._rewrites, self._scored = rewrites, scored
        self._stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(stop_ids))
        self._ended = False
        self._text = ResponseText(tokenizer, template, params, request.context)
        self._template = template
        self._token_text, self._blocks = token_text, blocks

    @property
    def holes(self) -> list[str] | None:
        """The text of each hole so far, where the request says what the response is made of and shows all of it."""
        template = self.request.template
        return None if template is None or template.fill_only else self._text.holes

    @property
    def stop_text(self) -> str | None:
        """The stop text that ended it; None where something else did, or nothing yet."""
        return self._text.stop

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens as `Usage` counts them: those that were given, and those that were generated so far."""
        template = self._template
        return self._prompt + len(template) - template.open_places, template.tokens[: self._lead].count(OPEN)

    @property
    def prompt(self) -> list[Mapping[str, Any]]:
        """The prompt's tokens, in the form in which drafts list tokens."""
        assert self._token_text is not None
        return [{"token_id": token, "text": self._token_text(token)} for token in self.request.prompt_token_ids]

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """The blocks as places of the response, from and to before. The first one may begin within the prompt.

        What is fixed between them, and around them, stands as a block of its own.
        """
        places, blocks, end = len(self._tokens), [], 0
        for block in self._blocks:
            start, stop = max(0, block.start - self._prompt), min(places, block.stop - self._prompt)
            if start >= places:
                break
            blocks += [(end, start)] if start > end else []
            blocks.append((start, stop))
            end = stop
        return [*blocks, (end, places)] if end < places else blocks

    def take(self, events: Sequence[Event]) -> Delta:
        """Apply the events of one step. Returns what they add."""
        delta = Delta(self.index)
        for event in events:
            if event.draft is not None:
                for position, token in zip(event.draft.positions, event.draft.token_ids, strict=True):
                    place = position - self._prompt
                    if place < len(self._tokens):  # the last block may reach beyond the response
                        self._tokens[place] = token
                if self._token_text is not None:
                    delta.canvas = {"step": event.draft.step, "passes": _passes(event.draft)}
            if event.transfer is not None:
                for place, read in iterate_tokens(event.transfer, self._prompt):
                    if place < len(self._tokens):
                        self._tokens[place], self._steps[place], self._logprobs[place] = read.token_id, read.step, read
            self._settle(event)
            if event.result is not None:
                delta.result = event.result
        self._advance(delta)
        if delta.canvas is not None:
            delta.canvas["canvas"] = self._canvas()
        return delta

    def _settle(self, event: Event) -> None:
        # A draft may differ from the token that settled.
        first, end = len(self._final), len(self._final) + len(event.settled)
        self._tokens[first:end] = event.settled
        self._final += event.settled
        if event.draft is not None:
            for place in range(first, min(end, len(self._steps))):
                if self._steps[place] is None:  # noise that was right: it became final with its block
                    self._steps[place] = event.draft.step

    def _advance(self, delta: Delta) -> None:
        """Move the leading settled tokens into the text, up to the first token that ends the response."""
        result = delta.result
        end = len(self._final)
        if result is not None:
            # A stop text may end the response before tokens that settled in the same step.
            end = max(self._lead, min(end, len(result.token_ids)))
        new = [] if self._ended else self._final[self._lead : end]
        before = max(0, self._template.tail - self._lead)  # there something fixed follows, and no stop ends it all
        stop = next((place for place, token in enumerate(new) if place >= before and token in self._stops), None)
        if stop is not None:
            self._ended = True
            del new[stop + 1 :]
        first = self._lead
        for tokens in ([token] for token in new) if self._scored else (new,):
            if self._scored and (read := self._logprobs[self._lead]) is not None:
                delta.scored.append(Scored(read, self._text.length, self._text.last))
            delta.text += self._text.push(tokens)
            self._lead += len(tokens)
        delta.tokens += [new[place - first] for place in self._template.answer_places(self._lead, first)]
        if result is not None and result.finish_reason in ("stop", "length"):
            delta.text += self._text.finish()

    def _canvas(self) -> list[Mapping[str, Any]]:
        """Of each place its token, and the step in which it became final, None while it may change."""
        assert self._token_text is not None
        return [
            {
                "token_id": token,
                "text": None if token is None else self._token_text(token),
                "settled": None if self._rewrites and place >= len(self._final) else self._steps[place],
            }
            for place, token in enumerate(self._tokens)
        ]


def _passes(draft: Draft) -> list[list[Mapping[str, Any]]]:
    return [
        [{**asdict(work), "layers": [work.layers.start, work.layers.stop]} for work in layers]
        for layers in draft.passes
    ]


def trace_of(request: Request, transfers: Sequence[Transfer], usage: Usage, fingerprint: str) -> Trace:
    """The trace of a run of `request` that wrote `transfers`, on the model with this `fingerprint`.

    It names the prefix that was read, as `usage` tells. The parameters have a seed (`engine.request.request_of`).
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
