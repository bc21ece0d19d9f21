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
        step: the step that wrote it, counted from 0 over the whole request.
        top: the most probable tokens of its position in that step, with their log-probabilities.
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
        logprobs: the log-probability of each token in that step; empty if none were requested.
        edits: the positions whose token replaced one of an earlier step.
        writes: positions and tokens as a model wrote them that deletes and inserts, before the deletions and
            insertions; `positions` and `token_ids` are how the response changed by them.
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

    Together with the prompt it is all that the run depended on. It holds no times and no ids of a server, so that equal
    runs have equal traces.

    Attributes:
        model: fingerprint of the model.
        cache: cache policy of the run, with its settings in `cache_config`.
        prefix_length: leading prompt tokens that could be shared.
        sampling: sampling parameters of the run, its seed included.
        events: the steps that wrote something, in order.
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
        """Return the trace as JSON-like values. Empty fields of events are left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"events": [_event_values(event) for event in self.events]}


def trace_events(trace: Sequence[Transfer], prompt_length: int) -> tuple[TraceEvent, ...]:
    """Return the events of a run, with positions counted from the response's start."""
    return tuple(
        TraceEvent(
            step=transfer.step,
            positions=[position - prompt_length for position in transfer.positions],
            token_ids=transfer.token_ids,
            logprobs=transfer.logprobs,
            edits=[position - prompt_length for position in transfer.edits],
            writes=[(position - prompt_length, token) for position, token in transfer.writes],
        )
        for transfer in trace
    )


def step_map(trace: Sequence[Transfer], prompt_length: int, length: int) -> list[int]:
    """Return, for each of the first `length` response tokens, the step that first wrote it, counted from 1.

    Tokens that the request fixed have step 0.
    """
    steps: dict[int, int] = {}
    for transfer in trace:
        for position in transfer.positions:
            steps.setdefault(position - prompt_length, transfer.step + 1)
    return [steps.get(index, 0) for index in range(length)]


def iterate_tokens(transfer: Transfer, prompt_length: int) -> Iterator[tuple[int, TokenLogprob]]:
    """Yield each position that the step wrote, counted from the response's start, with its token.

    Log-probabilities are 0 if none were requested.
    """
    logprobs = transfer.logprobs or (0.0,) * len(transfer.positions)
    tops = transfer.top_logprobs or ((),) * len(transfer.positions)
    for position, token_id, logprob, top in zip(transfer.positions, transfer.token_ids, logprobs, tops, strict=True):
        yield position - prompt_length, TokenLogprob(token_id, logprob, transfer.step, top)


def token_logprobs(trace: Sequence[Transfer], prompt_length: int, length: int) -> tuple[TokenLogprob, ...]:
    """Return the first `length` response tokens with their log-probabilities in the step that wrote them last.

    The `trace` must be of a request that asked for log-probabilities. Tokens that the request fixed are left out.
    """
    tokens: dict[int, TokenLogprob] = {}
    for transfer in trace:
        tokens.update(iterate_tokens(transfer, prompt_length))
    return tuple(tokens[index] for index in range(length) if index in tokens)


def _event_values(event: TraceEvent) -> dict[str, Any]:
    """Return the fields of an event that are not empty, and its step."""
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    return {name: value for name, value in values.items() if name == "step" or value}
