"""What the engine reports about a request: usage, transfers, drafts and the result."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from remask.core.work import LayerWork

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(slots=True)
class Usage:
    """Work done for one request.

    `forwards` counts forward passes without the prefix-only pass; a guided pair counts as one. `row_layers` sums rows
    times layers computed in them, both branches of a guided pair included. `cached_tokens` were read from the prefix
    store. `prefix_depth` is the number of leading layers that read them; `prefix_note` says why none did where some
    were wanted. `steps` counts denoising steps and those of a correction, `correction_steps` the latter alone; it is
    None where no correction was asked for.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    forwards: int = 0
    row_layers: int = 0
    prefix_depth: int = 0
    prefix_note: str | None = None
    correction_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Positions on the canvas that got tokens at the end of `step`, in ascending order.

    They are final, except on uniform models, whose tokens may change again until their block is done, and until the
    response is corrected where that was asked for.
    """

    step: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """What a pass predicted: a token for each position in `positions`, final or not, and how confident the model is.

    `confidences` are on the scale of the request's `remasking`. `passes` tells what each pass of the step computed and
    what of the shared prefix it reused, fill passes before the one that predicts; of a guided pair the conditional one.
    """

    step: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    passes: tuple[tuple[LayerWork, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. `token_ids` end with the first honoured stop token, or are `max_tokens` long."""

    id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    trace: tuple[Transfer, ...]
    first_settled_s: float | None  # seconds from arrival until the first response token was final
    elapsed_s: float  # seconds from arrival until the end
    error: str | None = None
