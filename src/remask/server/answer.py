"""One choice of an answer as it grows: from the engine's events to settled text."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from remask.core.request import Draft, Result, Transfer
from remask.detokenize import Detokenizer
from remask.engine.engine import Event
from remask.engine.request import Request
from remask.models.tokenizer import Tokenizer

NO_CHANCE = -9999.0  # log-probability of a probability that float32 rounds to 0; JSON knows no infinity


@dataclass(frozen=True, slots=True)
class Scored:
    """A settled token, the logarithm of its confidence, and where its text begins in the answer."""

    token: int
    logprob: float
    offset: int


@dataclass(slots=True)
class Delta:
    """What one engine step added to a choice. `canvas` is there where drafts are wanted."""

    index: int
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    canvas: dict[str, Any] | None = None
    result: Result | None = None


class Answer:
    """The response of one request, left to right. Its text is final: nothing of it is taken back.

    `shown` names a token for drafts; `stop_ids` are the model's own end tokens. `rewrites` says that tokens may change
    after they were written, as those of uniform models do until their block, or their correction, is done. Tokens are
    told one by one where `scored`, else their text alone.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        stop_ids: Sequence[int],
        shown: Callable[[int], str] | None = None,
        *,
        rewrites: bool = False,
        scored: bool = False,
    ) -> None:
        params = request.params
        self.index, self.request = index, request
        self._prompt = len(request.prompt_token_ids)
        self._written: list[int | None] = [None] * params.max_tokens  # the step at whose end each got its token
        self._tokens: list[int | None] = [None] * params.max_tokens  # drafts until then
        self._logprobs = [0.0] * params.max_tokens
        self._final: list[int] = []  # tokens that are final without a gap
        self._lead = 0  # of those, how many have been read
        self._rewrites, self._scored = rewrites, scored
        self._stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(stop_ids))
        self._ended = False
        self._text = Detokenizer(tokenizer, params.stop)
        self._shown = shown

    @property
    def prompt(self) -> list[Mapping[str, Any]]:
        """The prompt's tokens as drafts show them."""
        assert self._shown is not None
        return [{"token_id": token, "text": self._shown(token)} for token in self.request.prompt_token_ids]

    def take(self, events: Sequence[Event]) -> Delta:
        """What the events of one step add."""
        delta = Delta(self.index)
        for event in events:
            if event.draft is not None:
                self._note(event.draft)
                if self._shown is not None:
                    delta.canvas = {"step": event.draft.step, "passes": _passes(event.draft)}
            if event.transfer is not None:
                self._write(event.transfer)
            self._settle(event.settled)
            if event.result is not None:
                delta.result = event.result
        self._advance(delta)
        if delta.canvas is not None:
            delta.canvas["canvas"] = self._canvas()
        return delta

    def _note(self, draft: Draft) -> None:
        for position, token, confidence in zip(draft.positions, draft.token_ids, draft.confidences, strict=True):
            place = position - self._prompt
            if place < len(self._tokens):  # the last block may reach beyond the response
                self._tokens[place] = token
                self._logprobs[place] = max(math.log(confidence), NO_CHANCE) if confidence > 0 else NO_CHANCE

    def _write(self, transfer: Transfer) -> None:
        for position, token in zip(transfer.positions, transfer.token_ids, strict=True):
            place = position - self._prompt
            if place < len(self._tokens):
                self._tokens[place], self._written[place] = token, transfer.step

    def _settle(self, tokens: Sequence[int]) -> None:
        # A draft may have differed from what the canvas held.
        self._tokens[len(self._final) : len(self._final) + len(tokens)] = tokens
        self._final += tokens

    def _advance(self, delta: Delta) -> None:
        """Read what has settled without a gap, up to the first token that ends the response."""
        result = delta.result
        end = len(self._final)
        if result is not None:
            # A stop text may end the response before tokens that settled together with it.
            end = max(self._lead, min(end, len(result.token_ids)))
        new = [] if self._ended else self._final[self._lead : end]
        stop = next((place for place, token in enumerate(new) if token in self._stops), None)
        if stop is not None:
            self._ended = True
            del new[stop + 1 :]
        for tokens in ([token] for token in new) if self._scored else (new,):
            if self._scored:
                delta.scored.append(Scored(tokens[0], self._logprobs[self._lead], self._text.length))
            delta.text += self._text.push(tokens)
            self._lead += len(tokens)
        if result is not None and result.finish_reason in ("stop", "length"):
            delta.text += self._text.finish()

    def _canvas(self) -> list[Mapping[str, Any]]:
        assert self._shown is not None
        return [
            {"token_id": token, "text": None if token is None else self._shown(token), "settled": self._settled(place)}
            for place, token in enumerate(self._tokens)
        ]

    def _settled(self, place: int) -> int | None:
        """The step at whose end a position became final; None while its token may still change."""
        return None if self._rewrites and place >= len(self._final) else self._written[place]


def _passes(draft: Draft) -> list[list[Mapping[str, Any]]]:
    return [
        [{**asdict(work), "layers": [work.layers.start, work.layers.stop]} for work in each] for each in draft.passes
    ]
