"""The trace of a finished request, for training: step maps, and the log-probability of each token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remask.checks.fields import Nested, check, declare, declared, parse
from remask.checks.values import LIST, POSITIONS, Flag, ListOf, Real, Settings, Text, Whole
from remask.errors import ConfigError
from remask.request.parts import MAX_SEGMENTS, Segment
from remask.request.result import Transfer

TOP_LOGPROBS = 20
"""Largest number of further tokens at a position whose log-probabilities a request may ask for."""

MAX_EVENTS = 2**14
"""Most steps of a trace that wrote something."""

_PLACES = ListOf(Whole(0, POSITIONS), "positions of the response", LIST)
_TOKENS = ListOf(Whole(0, POSITIONS), "token ids", LIST)


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
    """The tokens that one step wrote. Raises `ConfigError` when made, naming the field and what is allowed."""

    step: int = declare(0, Whole(0, 2**30), "The denoising step, counted from 0 over the whole request.")
    positions: Sequence[int] = declare(
        (), _PLACES, "Positions that the step wrote, ascending, counted from the first one of the response."
    )
    token_ids: Sequence[int] = declare((), _TOKENS, "The token that each of them got.")
    logprobs: Sequence[float] = declare(
        (), ListOf(Real(-1e4, 1), "log-probabilities", LIST), "The log-probability of each token in that step."
    )
    edits: Sequence[int] = declare(
        (), _PLACES, "Those of the positions whose token took the place of one that an earlier step wrote."
    )

    def __post_init__(self) -> None:
        check(self, "replay.events.")
        if len(self.positions) != len(self.token_ids):
            raise ConfigError(
                f"replay.events: step {self.step} has {len(self.positions)} positions and {len(self.token_ids)} "
                "token_ids; give one token for each position"
            )


@dataclass(frozen=True, slots=True)
class Trace:
    """A run of one request: its parameters, and the tokens that each step wrote.

    With the prompt it says all that the run depended on, so that `replay` makes the same run again. It holds no times
    and no names that a server gave, so that one run has one text. Raises `ConfigError` when made, naming the field.
    """

    model: str = declare("", Text(1024, empty=True), "Fingerprint of the model.")
    cache: str = declare("none", Text(1024), "Cache policy of the run.")
    cache_config: Mapping[str, Any] | None = declare(None, Settings("settings of the policy", 64), "Its settings.")
    prompt_tokens: int = declare(1, Whole(1, POSITIONS), "Length of the prompt in tokens.")
    prefix_length: int = declare(0, Whole(0, POSITIONS), "Leading prompt tokens that could be shared.")
    segments: Sequence[Segment] = declare(
        (),
        ListOf(Nested(Segment, "segment field"), "parts", MAX_SEGMENTS),
        "Parts of the prompt that could be shared wherever they stand.",
    )
    sampling: Mapping[str, Any] | None = declare(
        None, Settings("sampling parameters", 256, 2**20), "Sampling parameters of the run, its seed included."
    )
    formed: bool = declare(
        False, Flag(), "The answer had a form (`structured_outputs`), so it was whole wherever it ended."
    )
    events: Sequence[TraceEvent] = declare(
        (),
        ListOf(Nested(TraceEvent, "event field"), "events", MAX_EVENTS, together=4 * LIST),
        "What each step wrote that wrote something, in their order.",
    )

    def __post_init__(self) -> None:
        check(self, "replay.")

    @classmethod
    def from_mapping(cls, values: object) -> "Trace":
        """A trace from JSON-like values. Raises `ConfigError` on unknown names and on values that are not allowed."""
        return parse(cls, values, "replay", "trace field")

    @property
    def content(self) -> dict[str, Any]:
        """The trace as JSON-like values; what is empty in an event is left out."""
        fields = {name: getattr(self, name) for name in declared(Trace)}
        parts = [each.content for each in self.segments]
        return fields | {"events": [_content(event) for event in self.events], "segments": parts}

    def transfers(self, prompt: int) -> tuple[Transfer, ...]:
        """The events on a canvas whose prompt has `prompt` tokens.

        Raises `ConfigError` where that is not the prompt's length in the trace.
        """
        if prompt != self.prompt_tokens:
            raise ConfigError(
                f"replay: the trace is of a prompt of {self.prompt_tokens} tokens, and this one has {prompt}; send the "
                "prompt of that run"
            )
        return tuple(
            Transfer(each.step, tuple(prompt + place for place in each.positions), tuple(each.token_ids))
            for each in self.events
        )


def events_of(trace: Sequence[Transfer], prompt: int) -> tuple[TraceEvent, ...]:
    """The events of a run whose prompt has `prompt` tokens."""
    return tuple(
        TraceEvent(
            each.step,
            [position - prompt for position in each.positions],
            each.token_ids,
            each.logprobs,
            [position - prompt for position in each.edits],
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
    values = {name: getattr(event, name) for name in declared(TraceEvent)}
    return {name: value for name, value in values.items() if name == "step" or value}
