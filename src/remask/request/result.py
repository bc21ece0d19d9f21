"""The reports of a request: events of its steps, usage, transfers, drafts and the result."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from remask.plan.pass_cost import LayerWork

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "error"]

_MAX_FIELDS = ("prefix_depth", "prefix_tokens")
_TEXT_FIELDS = ("prefix_note", "approximation")


@dataclass(slots=True)
class Usage:
    """Work done for one request.

    Attributes:
        prompt_tokens: given tokens: the prompt, and the fixed parts of the response.
        completion_tokens: tokens of the response that were generated.
        cached_tokens: tokens whose K/V were read from the store.
        steps: denoising steps, correction steps included.
        forwards: forward passes. The two canvases of a guided pair count as one, the prefix-only pass does not count.
        row_layers: rows times layers that these passes computed, on both canvases of a guided pair.
        prefix_row_layers: rows times layers of the prefix-only pass that ran because this request's prefix was not
            stored.
        prefix_depth: number of leading layers that read the K/V of a shared prefix from the store.
        prefix_tokens: length of that prefix, whether it was stored before or this request brought it.
        prefix_note: why no shared prefix was read.
        approximation: the cache policy that ran, if its cache may change tokens compared with `none`; None if the
            answer is the model's own.
        correction_steps: correction steps. None if the request asks for none.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    forwards: int = 0
    row_layers: int = 0
    prefix_row_layers: int = 0
    prefix_depth: int = 0
    prefix_tokens: int = 0
    prefix_note: str | None = None
    approximation: str | None = None
    correction_steps: int | None = None

    @classmethod
    def total(cls, usages: Sequence["Usage"]) -> "Usage":
        """Merge the usage of several requests. Every request counts its whole prompt.

        `prefix_depth` and `prefix_tokens` are the largest ones, `prefix_note` and `approximation` the different texts,
        joined, and all other fields sums.
        """
        merged_values: dict[str, Any] = {}
        for item in fields(cls):
            values = [value for usage in usages if (value := getattr(usage, item.name)) is not None]
            if item.name in _MAX_FIELDS:
                merged_values[item.name] = max(values, default=0)
            elif item.name in _TEXT_FIELDS:
                merged_values[item.name] = "; ".join(dict.fromkeys(values)) or None
            else:
                # `correction_steps`, which is None by default, stays None if it is None for all requests.
                merged_values[item.name] = sum(values) if values or item.default is not None else None
        return cls(**merged_values)


@dataclass(slots=True, unsafe_hash=True)  # never changed; a frozen one takes four times as long to make, in every step
class Transfer:
    """Positions on the canvas that got tokens at the end of `step`, in ascending order.

    The tokens are final, with two exceptions. On uniform models a token may change until its block is done or, if the
    request has correction steps, until the response is corrected. Under a rule that edits, a token may change until
    its block is done; `edits` are the positions whose token replaces one of an earlier step.

    If the request asks for log-probabilities, `logprobs` belong to `token_ids`, and `top_logprobs` hold the most
    probable tokens of every position with their log-probabilities (`readers/logprobs.py` defines the distribution).

    Under a rule that deletes and inserts, `positions` and `token_ids` describe how the canvas changed, and `writes`
    holds what the model wrote before that, DELETE and INSERT tokens included.
    """

    step: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    edits: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """What a pass predicted.

    Attributes:
        positions: predicted positions, ascending. They need not be final.
        confidences: the confidence of each, on the scale of the request's `remasking`.
        passes: the work of every pass of the step, reuse of the shared prefix included. Fill passes come before the
            pass that predicts. For a guided pair it is the work on the conditional canvas.
    """

    step: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    passes: tuple[tuple[LayerWork, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. `token_ids` end with the first honoured stop token, or are `max_tokens` long.

    `reads` holds what the request's readers have found, by their names (`remask.readers.base.Reader.result`).
    """

    id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    trace: tuple[Transfer, ...]
    first_settled_s: float | None  # seconds from arrival until the first response token was final
    elapsed_s: float  # seconds from arrival until the end
    error: str | None = None
    reads: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)  # not frozen, as one is made for each step of each request
class Event:
    """The result of a step for one request.

    `queued_s` is set in the request's first event only: the seconds that it waited. `settled` holds the response tokens
    that became final with no gap before them, so that they can be shown in order. They may reach beyond a stop token;
    the tokens of the result do not.
    """

    id: str
    queued_s: float | None = None
    draft: Draft | None = None
    transfer: Transfer | None = None
    settled: tuple[int, ...] = ()
    result: Result | None = None
