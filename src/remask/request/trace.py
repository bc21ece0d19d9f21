"""The trace of a finished request, for training: step maps, and the log-probability of each token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from remask.request.result import Transfer

TOP_LOGPROBS = 20
"""Largest number of further tokens at a position whose log-probabilities a request may ask for."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a response with its log-probability in the step that wrote it.

    Attributes:
        token_id: the token.
        logprob: its log-probability.
        step: the step that wrote it, counted from 0 over the whole request.
        top: the most probable tokens of its position in that step, with theirs.
    """

    token_id: int
    logprob: float
    step: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """The tokens that one step wrote.

    Attributes:
        step: the denoising step, counted from 0 over the whole request.
        positions: positions that it wrote, ascending, counted from the first one of the response.
        token_ids: the token that each of them got.
        logprobs: the log-probability of each token in that step; empty where none were asked for.
        edits: those of the positions whose token took the place of one that an earlier step wrote.
        writes: of a model that deletes and inserts, positions and tokens as it wrote them, before these were carried
            out; `positions` and `token_ids` are what the response changed by.
    """

    step: int
    positions: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    edits: Sequence[int] = ()
    writes: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """A run of one request: its parameters, and the tokens that each step wrote.

    With the prompt it says all that the run depended on. It holds no times and no names that a server gave, so that
    one run has one text.

    Attributes:
        model: fingerprint of the model.
        cache: cache policy of the run, with its settings in `cache_config`.
        prompt_tokens: length of the prompt in tokens.
        prefix_length: leading prompt tokens that could be shared.
        sampling: sampling parameters of the run, its seed included.
        events: what each step wrote that wrote something, in their order.
    """

    model: str
    cache: str
    cache_config: Mapping[str, Any] | None
    prompt_tokens: int
    prefix_length: int
    sampling: Mapping[str, Any]
    events: Sequence[TraceEvent]

    @property
    def content(self) -> dict[str, Any]:
        """The trace as JSON-like values; what is empty in an event is left out."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"events": [_content(event) for event in self.events]}


def events_of(trace: Sequence[Transfer], prompt: int) -> tuple[TraceEvent, ...]:
    """The events of a run whose prompt has `prompt` tokens."""
    return tuple(
        TraceEvent(
            each.step,
            [position - prompt for position in each.positions],
            each.token_ids,
            each.logprobs,
            [position - prompt for position in each.edits],
            [(position - prompt, token) for position, token in each.writes],
        )
        for each in trace
    )


def step_map(trace: Sequence[Transfer], prompt: int, length: int) -> list[int]:
    """For each of the first `length` tokens of a response, the step that first wrote it, counted from 1.

    It is 0 for tokens that the request gave.
    """
    steps: dict[int, int] = {}
    for each in trace:
        for position in each.positions:
            steps.setdefault(position - prompt, each.step + 1)
    return [steps.get(place, 0) for place in range(length)]


def read_tokens(transfer: Transfer, prompt: int) -> Iterator[tuple[int, TokenLogprob]]:
    """Each token of a transfer and its place in the response. Without log-probabilities, these are 0."""
    logprobs = transfer.logprobs or (0.0,) * len(transfer.positions)
    tops = transfer.top_logprobs or ((),) * len(transfer.positions)
    for position, token, logprob, top in zip(transfer.positions, transfer.token_ids, logprobs, tops, strict=True):
        yield position - prompt, TokenLogprob(token, logprob, transfer.step, top)


def token_logprobs(trace: Sequence[Transfer], prompt: int, length: int) -> tuple[TokenLogprob, ...]:
    """Each of the first `length` tokens of a response, with what was read of it in the step that wrote it last.

    `trace` is of a request that asked for log-probabilities. Tokens that the request gave are left out.
    """
    found = dict(pair for each in trace for pair in read_tokens(each, prompt))
    return tuple(found[place] for place in range(length) if place in found)


def _content(event: TraceEvent) -> dict[str, Any]:
    values = {each.name: getattr(event, each.name) for each in fields(event)}
    return {name: value for name, value in values.items() if name == "step" or value}
